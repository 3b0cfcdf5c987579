"""Who a request is from: an API key -> its tenant -> the salt of that tenant's scope.

A presented key is known by its SHA-256, which is looked up and then compared in constant time: how
long that takes says nothing about a key. Whatever is wrong with one, the answer is the same 401.
An address that fails often is told to wait (429); its good keys go on being good, as many clients
may be behind one address.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from router.address import network_of
from router.config import ConfigError
from router.error import ForbiddenError, RateLimitedError, RouterError, UnauthenticatedError
from router.metrics import Counts
from router.reply import error_response
from router.salt import salt_field, salted
from router.server import FORM_PATHS
from router.session import scoped_session
from router.tally import Tally
from router.tenant import FirstEpoch, Tenant, keys_of, tenant_of
from router.user import user_of
from state.secret import SecretError, derived, engine_salt, read_deployment_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client import CollectorRegistry

    from router.client import Answer, Handler
    from router.config import Config
    from router.request import Request
    from router.tenant import Epochs, TenantSettings

FAILURES_AT_ONCE: Final = 20
FAILURES_PER_S: Final = 1.0
ADDRESSES_KEPT: Final = 4_096
GUARDED_PATHS: Final = frozenset({"/v1/models"})
OPERATOR_PATHS: Final = frozenset({"/metrics"})
"""Sums over all tenants: not for clients."""
UNSALTED_PATHS: Final = FORM_PATHS
"""No engine takes a salt there."""
_SESSION_TAG: Final = b"warmroute session\0"
_NOBODY: Final = bytes(hashlib.sha256().digest_size)
_UNKNOWN: Final = "API key: expected a known one, in Authorization: Bearer or in X-Api-Key"


class _Known(Struct, frozen=True):
    digest: bytes
    tenant: Tenant
    until_s: float | None


class Failures:
    """Failed tries per address: ``at_once``, then ``per_s``. The oldest addresses are forgotten."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        at_once: int = FAILURES_AT_ONCE,
        per_s: float = FAILURES_PER_S,
        addresses: int = ADDRESSES_KEPT,
    ) -> None:
        self._clock = clock
        self._at_once = at_once
        self._per_s = per_s
        self._addresses = addresses
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._left)

    def allow(self, peer: str | None) -> bool:
        """Count one failure; return whether the address may have it."""
        name, now_s = network_of(peer), self._clock()
        left, since_s = self._left.pop(name, (float(self._at_once), now_s))
        left = min(float(self._at_once), left + self._per_s * (now_s - since_s))
        is_allowed = left >= 1.0
        self._left[name] = (left - 1.0 if is_allowed else left, now_s)
        if len(self._left) > self._addresses:
            self._left.popitem(last=False)
        return is_allowed


class Gate:
    """Knows the tenants by their keys. Nothing here waits or keeps a key."""

    def __init__(
        self,
        tenants: Iterable[TenantSettings],
        secret: bytes,
        *,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
        epochs: Epochs | None = None,
        processes: int = 1,
    ) -> None:
        self._secret = secret
        self._session_key = derived(secret, _SESSION_TAG)
        self._epochs = epochs or FirstEpoch()
        self._unix_clock = unix_clock
        self._known: dict[bytes, _Known] = {}
        self._fields: dict[str, tuple[str, bytes]] = {}
        self._salts: dict[str, tuple[str, str]] = {}
        self._failures = Failures(
            clock,
            at_once=max(1, FAILURES_AT_ONCE // processes),
            per_s=FAILURES_PER_S / processes,
        )
        self._failed = Tally(
            "warmroute_key_failures", "Requests without a known API key.", ["result"]
        )
        self.counts = Counts(self._failed)
        for settings in tenants:
            tenant = tenant_of(settings)
            for key in keys_of(settings):
                digest = bytes.fromhex(key.digest)
                until_s = key.until.timestamp() if key.until is not None else None
                self._known[digest] = _Known(digest, tenant, until_s)

    def admit(self, request: Request) -> Tenant:
        """Return whose request it is; raises UnauthenticatedError or RateLimitedError."""
        key = request.headers.api_key
        if key is not None:
            digest = hashlib.sha256(key).digest()
            known = self._known.get(digest)
            is_equal = hmac.compare_digest(known.digest if known is not None else _NOBODY, digest)
            if known is not None and is_equal:
                until_s = known.until_s
                if until_s is None or self._unix_clock() < until_s:
                    return known.tenant
        if self._failures.allow(request.peer):
            self._failed.add(1, ("refused",))
            raise UnauthenticatedError(_UNKNOWN)
        self._failed.add(1, ("limited",))
        request.keep_alive = False
        message = "too many requests without a known API key"
        raise RateLimitedError(message)

    def salted(self, tenant: Tenant, body: bytes, path: str = "") -> bytes:
        """Return ``body`` with the salt of the tenant's scope; raises ClientError.

        It is that of one user where the tenant keeps its users apart and the body names one.
        """
        epoch = self._epochs.of(tenant.scope)
        if tenant.is_by_user:
            user = user_of(path, body)
            if user is not None:  # nothing is kept: there may be any number of them
                field = salt_field(engine_salt(self._secret, tenant.scope, epoch, user))
                return salted(scoped_session(body, self._session_key, field), field)
        known = self._fields.get(tenant.scope)
        if known is None or known[0] != epoch:
            field = salt_field(engine_salt(self._secret, tenant.scope, epoch))
            known = self._fields[tenant.scope] = (epoch, field)
        return salted(scoped_session(body, self._session_key, known[1]), known[1])

    def salt_of(self, scope: str) -> str:
        """Return the present salt of a scope, as its tenants' requests have it."""
        epoch = self._epochs.of(scope)
        known = self._salts.get(scope)
        if known is None or known[0] != epoch:
            salt = engine_salt(self._secret, scope, epoch)
            known = self._salts[scope] = (epoch, salt)
        return known[1]

    def guarded(
        self, routes: Mapping[str, Mapping[str, Handler]]
    ) -> dict[str, Mapping[str, Handler]]:
        """Return the table of clients' paths, with what needs a key, and without what has none."""
        table: dict[str, Mapping[str, Handler]] = {}
        for path, methods in routes.items():
            if path in UNSALTED_PATHS:
                table[path] = dict.fromkeys(methods, self._behind(_refuse_unsalted))
            elif path in GUARDED_PATHS:
                table[path] = {method: self._behind(handler) for method, handler in methods.items()}
            elif path not in OPERATOR_PATHS:
                table[path] = methods
        return table

    def _behind(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Answer:
            try:
                self.admit(request)
            except RouterError as error:
                return error_response(error, request.headers.request_id)
            return await handler(request)

        return guarded


async def _refuse_unsalted(_: Request) -> Answer:
    message = "this path takes no cache salt, which keeps tenants apart"
    raise ForbiddenError(message)


def load_secret(config: Config) -> bytes | None:
    """Return the deployment key, where one is configured; raises ConfigError."""
    if config.deployment_key_file is None:
        return None
    try:
        return read_deployment_key(Path(config.deployment_key_file))
    except SecretError as error:
        message = f"deployment_key_file: {error}"
        raise ConfigError(message) from None


def open_gate(
    config: Config,
    secret: bytes | None,
    registry: CollectorRegistry,
    epochs: Epochs | None = None,
) -> Gate | None:
    """Return the gate where there are tenants; raises ConfigError where there is no secret."""
    if not config.tenants:
        return None
    if secret is None:
        message = "deployment_key_file: expected a key that was read, as there are tenants"
        raise ConfigError(message)
    gate = Gate(
        config.tenants,
        secret,
        clock=time.monotonic,
        unix_clock=time.time,
        epochs=epochs,
        processes=config.processes,
    )
    registry.register(gate.counts)
    return gate
