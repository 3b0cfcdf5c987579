"""Who holds which page: fed with every transition, it completes the snapshots of the audit.

The pools only count references, which is all that they need; names are kept here, and only while
an audit is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from sidecar.journal import Transition

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.audit_log import AuditLog
    from sidecar.journal import PageRecord
    from sidecar.pool import PagePool

_LEAVES: Final = frozenset({"release", "copy"})
_TAKES: Final = frozenset({"create", "append", "reserve", "share"})
COUNT_EVERY_STEPS: Final = 256


class PageLedger:
    """Passes transitions on to an audit log and answers its snapshots."""

    def __init__(self) -> None:
        self._pools: Sequence[PagePool] = ()
        self._log: AuditLog | None = None
        self._holders: dict[tuple[str, int], dict[str, int]] = {}
        self._steps = 0

    def watch(self, pools: Sequence[PagePool], log: AuditLog) -> None:
        """Start to write; raises OSError when the log cannot be opened."""
        self._pools = pools
        self._log = log
        log.open()

    def note(self, transition: Transition) -> None:
        """Take one transition."""
        holder = transition.request
        if holder is not None:
            if transition.op in _TAKES:
                for page in transition.pages:
                    holders = self._holders.setdefault((transition.tier, page), {})
                    holders[holder] = holders.get(holder, 0) + 1
            elif transition.op in _LEAVES:
                for page in transition.pages:
                    self._drop(transition.tier, page, holder)
        if self._log is not None:
            self._log.note(transition)

    def step(self) -> None:
        """Write what a step did, now and then with the counts of all pools."""
        if self._log is None:
            return
        self._steps += 1
        if self._steps % COUNT_EVERY_STEPS == 0:
            self._log.note(self._count())
        self._log.flush()

    def close(self) -> None:
        """Write the last counts: every request has ended, so whatever is still held leaked."""
        if self._log is not None:
            self._log.note(self._count("closed"))
            self._log.close()
            self._log = None

    def snapshot(self) -> Transition:
        """Return all pages of all pools as they are."""
        return Transition(op="open", totals=self._totals(), records=self._records())

    def _records(self) -> dict[str, list[PageRecord]]:
        return {
            pool.tier: [
                msgspec.structs.replace(record, holders=dict(self._holders[pool.tier, record.page]))
                if (pool.tier, record.page) in self._holders
                else record
                for record in pool.snapshot()
            ]
            for pool in self._pools
        }

    def _totals(self) -> dict[str, dict[str, int]]:
        return {pool.tier: pool.states() for pool in self._pools}

    def _count(self, why: str | None = None) -> Transition:
        tenants: dict[str, dict[str, dict[str, int]]] = {
            pool.tier: pool.tenants() for pool in self._pools
        }
        return Transition(op="count", why=why, totals=self._totals(), tenants=tenants)

    def _drop(self, tier: str, page: int, holder: str) -> None:
        holders = self._holders.get((tier, page), {})
        left = holders.pop(holder, 0) - 1
        if left > 0:
            holders[holder] = left
        if not holders:
            self._holders.pop((tier, page), None)
