"""Keys of scopes: from one secret of the deployment that routers and sidecars share.

    chain key   HKDF-SHA256(deployment key, scope)    of the ids of a scope's blocks
    salt        what engines are told in place of a tenant's name, see ``engine_salt``

A scope is known by the digest of the salt that engines see (``state.prefix.salt_scope``). Router
and sidecar derive the same chain key from it: the router knows whose request it is, and the sidecar
reads the salt in the engine's events. The deployment key is in a file that only its owner may read,
and nothing that follows from it is in the state store but ids of blocks.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from state.prefix import ChainKey

LEAST_KEY_BYTES: Final = 32
MOST_KEY_BYTES: Final = 4096
KEYS_KEPT: Final = 4_096
_OTHERS: Final = 0o077
_CHAIN_TAG: Final = b"warmroute chain key\0"
_SALT_TAG: Final = b"warmroute engine salt\0"


class SecretError(ValueError):
    """A deployment key cannot be used; the text names the file and what was expected."""


def read_deployment_key(path: Path) -> bytes:
    """Return the deployment key in ``path``: its bytes without white space around them.

    Raises SecretError for a file that others may read, or that is too short to be a key.
    """
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            key = file.read(MOST_KEY_BYTES + 1).strip()
    except OSError as error:
        message = f"{path}: {error.strerror}"
        raise SecretError(message) from None
    if mode & _OTHERS:
        message = f"{path}: expected a file that only its owner may read (chmod 600)"
        raise SecretError(message)
    if not LEAST_KEY_BYTES <= len(key) <= MOST_KEY_BYTES:
        message = f"{path}: expected {LEAST_KEY_BYTES} to {MOST_KEY_BYTES} bytes, got {len(key)}"
        raise SecretError(message)
    return key


def derived(secret: bytes, info: bytes) -> bytes:
    """Return 32 bytes for ``info`` (HKDF-SHA256, RFC 5869, without a salt, one round)."""
    extracted = hmac.digest(bytes(hashlib.sha256().digest_size), secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def engine_salt(secret: bytes, scope: str, epoch: str, user: str | None = None) -> str:
    """Return the ``cache_salt`` of a scope's requests: the same for the same scope and epoch.

    With ``user`` it is that of one part of the scope, which meets neither the others nor what has
    no user.
    """
    parts = [scope.encode(), epoch.encode()]
    if user is not None:
        parts.append(hashlib.sha256(user.encode("utf-8", "surrogatepass")).digest())
    named = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return base64.urlsafe_b64encode(derived(secret, _SALT_TAG + named)).rstrip(b"=").decode()


class ChainKeys:
    """The key of each scope's chains: a deployment's secret makes one for each, a seed is all's."""

    __slots__ = ("_known", "_secret", "_seed")

    def __init__(self, seed: int = 0, secret: bytes | None = None) -> None:
        self._seed = seed
        self._secret = secret
        self._known: dict[str, bytes] = {}

    def of(self, scope: str) -> ChainKey:
        """Return the key of the chains of ``scope``, as in ``ModelIdentity``."""
        if self._secret is None:
            return self._seed
        key = self._known.get(scope)
        if key is None:
            if len(self._known) >= KEYS_KEPT:
                self._known.clear()
            key = self._known[scope] = derived(self._secret, _CHAIN_TAG + scope.encode())
        return key

    def forget(self, scopes: Iterable[str]) -> None:
        """Keep no key of ``scopes``, which ended."""
        for scope in scopes:
            self._known.pop(scope, None)
