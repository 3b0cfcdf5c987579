"""Who holds which page, as the audit's snapshots need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from sidecar.audit import AuditFault, AuditReplay
from sidecar.audit_file import replay_files
from sidecar.audit_log import AuditLog
from sidecar.journal import Transition
from sidecar.ledger import COUNT_EVERY_STEPS, PageLedger
from sidecar.pool import PagePool

if TYPE_CHECKING:
    from pathlib import Path

    from sidecar.audit import AuditSummary


class Ledger:
    """A ledger over one pool, writing to a file."""

    def __init__(self, path: Path, max_bytes: int = 1 << 20) -> None:
        self.path = path
        self.ledger = PageLedger()
        self.pool = PagePool(4, journal=self.ledger.note)
        self.log = AuditLog(path, max_bytes, 99, self.ledger.snapshot)

    def watch(self) -> None:
        self.ledger.watch([self.pool], self.log)

    def end(self, request: str) -> None:
        self.ledger.note(Transition(op="end", request=request, why="done"))

    def replay(self) -> AuditSummary:
        replay = AuditReplay()
        replay_files(replay, self.path.parent.iterdir())
        return replay.summary()


@pytest.fixture
def rig(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "audit.jsonl")


def test_the_snapshot_names_every_holder_as_often_as_it_holds(rig: Ledger) -> None:
    one, other = rig.pool.take(2, "t", holder="a").pages
    rig.pool.fill([one, other])
    rig.pool.share([one, one], "b")
    rig.pool.release([other, one], "a")
    rig.watch()
    (record,) = rig.ledger.snapshot().records["device"]
    assert (record.page, record.state, record.holders) == (one, "used", {"b": 2})
    assert record.tenant == "t"


def test_a_log_that_begins_in_the_middle_replays(rig: Ledger) -> None:
    pages = rig.pool.take(3, holder="a").pages
    rig.pool.fill(pages)
    rig.pool.index(pages[:2])
    rig.pool.pin(pages[:1], 5.0)
    rig.watch()
    rig.pool.share(pages[:1], "b")
    rig.pool.release(pages[::-1], "a", "done")
    rig.pool.release(pages[:1], "b", "done")
    for request in "ab":
        rig.end(request)
    rig.ledger.close()
    summary = rig.replay()
    assert (summary.ended_requests, summary.open_requests) == ({"done": 2}, [])
    assert summary.final_pages["device"]["pinned"] == 1


def test_a_rotated_log_goes_on_from_a_true_snapshot(tmp_path: Path) -> None:
    rig = Ledger(tmp_path / "audit.jsonl", max_bytes=300)
    rig.watch()
    for number in range(12):
        pages = rig.pool.take(2, holder=f"r{number}").pages
        rig.ledger.step()
        rig.pool.fill(pages)
        rig.pool.release(pages, f"r{number}", "done")
        rig.end(f"r{number}")
        rig.ledger.step()
    rig.ledger.close()
    assert len(list(tmp_path.iterdir())) > 2
    assert rig.replay().ended_requests == {"done": 12}


def test_counts_are_written_now_and_then_and_at_the_end(rig: Ledger) -> None:
    rig.watch()
    for _ in range(COUNT_EVERY_STEPS):
        rig.ledger.step()
    rig.ledger.close()
    lines = [msgspec.json.decode(line) for line in rig.path.read_bytes().splitlines()]
    counts = [each.get("why") for each in lines if each["op"] == "count"]
    assert counts == [None, "closed"]


def test_what_is_held_at_the_end_is_a_leak_and_its_holder_is_named(rig: Ledger) -> None:
    rig.watch()
    rig.pool.take(1, holder="lost")
    rig.ledger.close()
    with pytest.raises(AuditFault, match=r"leaked.*lost"):
        rig.replay()


def test_nothing_is_written_and_nothing_breaks_without_a_log(rig: Ledger) -> None:
    pages = rig.pool.take(1, holder="a").pages
    rig.ledger.step()
    rig.pool.release(pages, "a")
    rig.ledger.close()
    assert not rig.path.exists()


def test_a_log_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Ledger(tmp_path / "nowhere" / "audit.jsonl").watch()
