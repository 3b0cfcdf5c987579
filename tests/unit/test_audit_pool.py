from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from sidecar.audit import AuditFault, AuditReplay
from sidecar.audit_file import replay_files
from sidecar.audit_log import AuditLog
from sidecar.journal import Transition
from sidecar.ledger import PageLedger
from sidecar.pool import PagePool

if TYPE_CHECKING:
    from pathlib import Path

    from sidecar.pool import PageId

TENANTS = ("", "x", "y")


class Rig:
    """A device pool and a host pool of the worker that write their own audit."""

    def __init__(self, path: Path, max_bytes: int = 20_000) -> None:
        self.ledger = PageLedger()
        self.device = PagePool(12, journal=self.ledger.note)
        self.host = PagePool(4, tier="host", journal=self.ledger.note)
        log = AuditLog(path, max_bytes, 50, self.ledger.snapshot)
        self.ledger.watch([self.device, self.host], log)
        self.held: dict[str, list[PageId]] = {}
        self.born = 0

    def step(self, rng: random.Random) -> None:
        """Begin, grow, share or end a request; demote a page."""
        if rng.random() < 0.4 and self.device.available_pages() >= 3:
            self.born += 1
            self.held[f"r{self.born}"] = self._take(f"r{self.born}", rng)
        for request in rng.sample(list(self.held), min(2, len(self.held))):
            self.device.fill(self.held[request])
            fresh = [p for p in self.held[request] if not self.device.is_indexed(p)]
            if rng.random() < 0.6:
                self.device.index(fresh)
            if rng.random() < 0.5:
                self._end(request, rng)
        if rng.random() < 0.1:
            self.device.pin(range(12), until_s=1.0)  # type: ignore[arg-type]
        if rng.random() < 0.1:
            self.device.expire_pins(2.0)
        if rng.random() < 0.03:
            self.device.forget_content()
        if rng.random() < 0.3 and self.host.available_pages():
            (slot,) = self.host.take(1, holder="demotion", how="reserve").pages
            self.host.fill([slot])
            self.host.index([slot])
            self.host.release([slot], "demotion", "moved")
        self.ledger.step()

    def _take(self, request: str, rng: random.Random) -> list[PageId]:
        tenant = rng.choice(TENANTS)
        pages = self.device.take(2, tenant, holder=request).pages
        shared = [p for p in self.held.get(f"r{self.born - 1}", []) if self.device.is_indexed(p)]
        self.device.share(shared, request)
        return [*pages, *shared]

    def _end(self, request: str, rng: random.Random) -> None:
        why = rng.choice(["done", "cancelled", "timed_out", "failed"])
        self.device.release(self.held.pop(request)[::-1], request, why)
        self.ledger.note(Transition(op="end", request=request, why=why))


def test_the_pools_of_the_worker_tell_the_truth_across_rotations(tmp_path: Path) -> None:
    rig, rng = Rig(tmp_path / "audit"), random.Random(3)
    for _ in range(600):
        rig.step(rng)
    for request in list(rig.held):
        rig._end(request, rng)
    rig.ledger.close()
    replay = AuditReplay()
    files = list(tmp_path.iterdir())
    assert len(files) > 3
    assert replay_files(replay, files) == []
    assert replay.is_closed
    summary = replay.summary()
    assert sum(summary.ended_requests.values()) == rig.born
    assert summary.open_requests == []
    assert min(rig.born, *(summary.peak_pages["device"][s] for s in ("used", "pinned"))) > 1
    assert summary.evicted_pages["lru"] > 1


def test_a_request_that_the_engine_forgot_is_named_when_it_closes(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "audit")
    pages = rig.device.take(2, "x", holder="forgotten").pages
    rig.ledger.close()
    with pytest.raises(AuditFault) as caught:
        replay_files(AuditReplay(), [tmp_path / "audit"])
    assert (caught.value.page, caught.value.request) == (pages[0], "forgotten")


def test_a_release_by_the_wrong_request_is_found(tmp_path: Path) -> None:
    """The pool counts references only; the audit knows whose they are."""
    rig = Rig(tmp_path / "audit")
    pages = rig.device.take(1, holder="a").pages
    rig.device.release(pages, "b", "done")
    rig.ledger.step()
    with pytest.raises(AuditFault, match="b releases it, but it is allocated, held by a"):
        replay_files(AuditReplay(), [tmp_path / "audit"])


def test_a_snapshot_names_how_often_each_request_holds_a_page(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "audit")
    pages = rig.device.take(1, "x", holder="a").pages
    rig.device.share(pages, "a")
    rig.device.share(pages, "b")
    rig.device.release(pages, "b")
    (record,) = rig.ledger.snapshot().records["device"]
    assert record.holders == {"a": 2}
    rig.device.release(pages, "a")
    rig.device.release(pages, "a")
    assert rig.ledger.snapshot().records["device"] == []
