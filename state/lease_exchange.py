"""One router's leases on the common board, and those of the others as of the last exchange."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from state.lease import sum_leases
from state.schema import LEASES, ROUTER_INDEX, decode_leases, encode_leases
from state.script import Script, run_scripts
from state.seal import NO_SEAL, Kind
from state.seal_guard import SealGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from state.client import Client
    from state.model import LeaseTotals, ReplicaId, RouterId

_NOTHING: Final[Mapping[ReplicaId, LeaseTotals]] = MappingProxyType({})


class LeaseExchange:
    """``publish`` and ``foreign`` are synchronous; ``exchange`` is a mirror's background round."""

    def __init__(
        self,
        router: RouterId,
        clock: Callable[[], float],
        lease_ttl_s: float,
        guard: SealGuard | None = None,
    ) -> None:
        self._guard = guard or SealGuard()
        self._router = router
        self._clock = clock
        self._lease_ttl_s = lease_ttl_s
        self._own: Mapping[ReplicaId, LeaseTotals] = {}
        self._foreign: Mapping[ReplicaId, LeaseTotals] = _NOTHING
        self._is_changed = True
        self._published_s = float("-inf")
        self._received_s = float("-inf")
        self._exchange = Script("exchange")
        self._withdraw = Script("withdraw")
        self.malformed_values = 0
        self.is_alone = False
        """Whether the last exchange saw no other router."""
        self.routers = 1
        """Live ones, with this one, as of the last exchange."""
        self.rank = 0
        """How many of them come before this one, by name."""

    def publish(self, totals: Mapping[ReplicaId, LeaseTotals]) -> None:
        """Set what this router has in flight; the next exchange tells the others."""
        self._own = dict(totals)
        self._is_changed = True

    def foreign(self) -> Mapping[ReplicaId, LeaseTotals]:
        """Return the sums of the others; nothing when there was no news for a lease's life."""
        if self._clock() - self._received_s > self._lease_ttl_s:
            return _NOTHING
        return self._foreign

    async def exchange(self, client: Client, heartbeat_s: float) -> None:
        """Publish what changed, or all each ``heartbeat_s``, and read everybody's."""
        now_s = self._clock()
        is_publishing = self._is_changed or now_s - self._published_s >= heartbeat_s
        self._is_changed = False
        value = self._encoded() if is_publishing else b""
        ttl_ms = round(self._lease_ttl_s * 1000)
        call = self._exchange.call([LEASES, ROUTER_INDEX], [self._router, value, ttl_ms])
        try:
            [board] = await run_scripts(client, [call])
        except BaseException:
            self._is_changed = self._is_changed or is_publishing
            raise
        if is_publishing:
            self._published_s = now_s
        self._take_foreign(board)
        self._received_s = self._clock()

    def _encoded(self) -> bytes:
        if self._guard.seal is None:
            return encode_leases(self._own)
        value = encode_leases(self._own, NO_SEAL)
        return self._guard.sealed(Kind.LEASES, LEASES, value, self._router)

    async def withdraw(self, client: Client) -> None:
        """Take this router off the board."""
        await run_scripts(client, [self._withdraw.call([LEASES, ROUTER_INDEX], [self._router])])

    def _opened(self, router: bytes, value: bytes) -> bytes | None:
        if self._guard.seal is None:
            return value
        return self._guard.open(Kind.LEASES, LEASES, value, router.decode("utf-8", "replace"))

    def _take_foreign(self, board: Sequence[Any]) -> None:
        own = self._router.encode()
        others = {
            router: opened
            for router, value in zip(board[::2], board[1::2], strict=True)
            if router != own and (opened := self._opened(router, value)) is not None
        }
        decoded = [decode_leases(value) for value in others.values()]
        self.malformed_values += decoded.count(None)
        self.is_alone = not decoded
        self.routers = 1 + len(decoded)
        self.rank = sum(router < own for router in others)
        totals = sum_leases(leases for leases in decoded if leases is not None)
        self._foreign = MappingProxyType(totals)
