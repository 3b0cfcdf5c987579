"""Epochs of scopes: the present life of what a scope's tenants have cached, and how it is written.

Every salt and every block id of a scope follows from its epoch: a new one makes all that was cached
before unreachable, whatever still lies in an engine or in the index. An epoch is a counter, which
orders epochs, and a random nonce, which nobody can tell in advance or find again. Of two epochs the
later one counts, whoever knows it: a store that was emptied never brings back an earlier one.

``previous`` is the epoch before, while what it left may still be there: after a rotation, and not
after a deletion. Two epochs live at most.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final

from msgspec import Struct, structs

from state.schema import KEY_PREFIX
from state.secret import derived

NONCE_BYTES: Final = 16
MAX_COUNTER: Final = (1 << 53) - 1
EPOCH_TTL_S: Final = 86_400.0
"""How long the store keeps an epoch that no router has read since."""
VERSION_KEY: Final = f"{KEY_PREFIX}:{{scopes}}:version"
"""STRING: drawn anew with each change of an epoch, so that most rounds read nothing else."""
_COUNTER_BYTES: Final = 8
_MAC_BYTES: Final = 16
_FIELD_BYTES: Final = _COUNTER_BYTES + 2 * NONCE_BYTES
_NO_NONCE: Final = bytes(NONCE_BYTES)
_NAME_TAG: Final = b"warmroute scope name\0"
_MAC_TAG: Final = b"warmroute scope epoch\0"


class ScopeEpoch(Struct, frozen=True):
    """One epoch. Counter 0: not yet agreed on with the other routers; any agreed one is later."""

    counter: int = 0
    nonce: bytes = b""
    previous: bytes | None = None

    @property
    def name(self) -> str:
        """What salts are derived from; empty where no epoch was ever begun."""
        return self.nonce.hex()

    @property
    def live_names(self) -> tuple[str, ...]:
        """The names of the epochs whose blocks may still count: this one, and the one before."""
        return (self.name,) if self.previous is None else (self.name, self.previous.hex())

    def is_later(self, other: ScopeEpoch) -> bool:
        """Return whether this epoch comes after ``other``."""
        return (self.counter, self.nonce) > (other.counter, other.nonce)

    def following(self, *, keeps_previous: bool) -> ScopeEpoch:
        """Return a fresh epoch after this one."""
        return ScopeEpoch(
            self.counter + 1,
            secrets.token_bytes(NONCE_BYTES),
            self.nonce if keeps_previous and self.nonce else None,
        )


NO_EPOCH: Final = ScopeEpoch()


def unsettled_epoch() -> ScopeEpoch:
    """Return an epoch of this router's own, until it is agreed on or another one is heard of."""
    return ScopeEpoch(0, secrets.token_bytes(NONCE_BYTES))


def settled(epoch: ScopeEpoch) -> ScopeEpoch:
    """Return ``epoch`` as one that the routers agree on."""
    return structs.replace(epoch, counter=max(1, epoch.counter))


class EpochCodec:
    """Names and values of epochs in the store, sealed with a key that the store never sees.

    A name tells nothing of the scope, and a value that somebody else wrote, or that belongs to
    another scope, does not decode.
    """

    __slots__ = ("_mac_key", "_name_key")

    def __init__(self, secret: bytes) -> None:
        self._name_key = derived(secret, _NAME_TAG)
        self._mac_key = derived(secret, _MAC_TAG)

    def key(self, scope: str) -> str:
        """Return the name of the key that holds the epoch of ``scope``."""
        digest = hmac.digest(self._name_key, scope.encode(), "sha256")[:NONCE_BYTES]
        return f"{KEY_PREFIX}:{{scopes}}:epoch:{digest.hex()}"

    def encode(self, scope: str, epoch: ScopeEpoch) -> bytes:
        """Return the stored form of the epoch of ``scope``."""
        counter = epoch.counter.to_bytes(_COUNTER_BYTES, "big")
        fields = counter + epoch.nonce + (epoch.previous or _NO_NONCE)
        return fields + self._seal(scope, fields)

    def decode(self, scope: str, value: bytes) -> ScopeEpoch | None:
        """Return the epoch of ``scope``; None when it is malformed or not sealed with our key."""
        fields, seal = value[:_FIELD_BYTES], value[_FIELD_BYTES:]
        if len(fields) != _FIELD_BYTES or not hmac.compare_digest(seal, self._seal(scope, fields)):
            return None
        counter = int.from_bytes(fields[:_COUNTER_BYTES], "big")
        nonce = fields[_COUNTER_BYTES:-NONCE_BYTES]
        previous = fields[-NONCE_BYTES:]
        if not 1 <= counter <= MAX_COUNTER or nonce == _NO_NONCE:
            return None
        return ScopeEpoch(counter, nonce, None if previous == _NO_NONCE else previous)

    def _seal(self, scope: str, fields: bytes) -> bytes:
        name = scope.encode()
        framed = len(name).to_bytes(4, "little") + name + fields
        return hmac.digest(self._mac_key, framed, "sha256")[:_MAC_BYTES]
