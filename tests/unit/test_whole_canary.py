"""What several processes tell of a canary, of warm-ups and of a shadow policy, as one router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from policies.expected_ttft import ExpectedTtft
from policies.least_loaded import LeastLoaded
from policies.weighted import Weighted
from router.canary_admin import CanaryView, SideCounts
from router.canary_row import CanaryRow, candidate_words, row_of
from router.canary_setting import CanarySettings
from router.canary_verdict import CanaryVerdict, Word
from router.running_mean import Mean
from router.shadow_policy import ShadowReport, ShadowSide
from router.supervisor import whole
from router.supervisor.canary import canary, canary_row
from router.warm_job import JobRow
from router.warm_up import WarmUpView, whole_warm_ups
from warmroute.canary import lines_of

if TYPE_CHECKING:
    from router.snapshot import Snapshot

SETTINGS = CanarySettings(id="c1", started_unix_s=0.0, policy=LeastLoaded(), percent=10.0)


def verdict(requests: int, word: Word = Word.SAME) -> CanaryVerdict:
    return CanaryVerdict(
        word=word, control_requests=requests, candidate_requests=requests // 2, measures=()
    )


def view(requests: int, own: int = 0, **fields: Any) -> CanaryView:
    told: dict[str, Any] = {
        "state": "running",
        "settings_version": 3,
        "unix_s": 1.0,
        "settings": SETTINGS,
        "counted_by": 2,
        "verdict": verdict(requests),
        "own": SideCounts(control=own, candidate=own),
    }
    return CanaryView(**(told | fields))


NONE = CanaryView(state="none", settings_version=2, unix_s=1.0)


def test_the_figures_are_those_of_the_process_that_has_counted_most() -> None:
    told = canary({0: view(10, 4), 1: view(12, 6)})
    assert told.verdict == verdict(12)
    assert [(one.process, one.own and one.own.control) for one in told.processes] == [
        (0, 4),
        (1, 6),
    ]


@pytest.mark.parametrize("ending", [0, 1])
def test_one_process_that_ended_it_is_what_counts(ending: int) -> None:
    """Its figures are why; who gets requests still is told beside them."""
    ended = view(5, state="ending", fault="no route", verdict=verdict(5, Word.WORSE))
    told = canary({ending: ended, 1 - ending: view(50)})
    assert (told.state, told.fault, told.verdict) == ("ending", "no route", ended.verdict)
    states = {one.process: one.state for one in told.processes}
    assert states == {ending: "ending", 1 - ending: "running"}


def test_a_process_that_is_cut_off_alone_does_not_hide_what_the_others_know() -> None:
    told = canary({0: view(90, fault="no route"), 1: view(50)})
    assert (told.verdict, told.fault) == (verdict(50), ""), "these are no figures of one alone"
    assert [one.fault for one in told.processes] == ["no route", ""]
    text = "\n".join(lines_of(told))
    assert "process 0: running, 0 of the candidate, 0 of the control; cut off: no route" in text
    assert "alone" not in text


def test_a_process_that_has_older_settings_says_so_and_counts_for_nothing() -> None:
    told = canary({0: NONE, 1: view(0)})
    assert told.state == "running"
    assert [(one.state, one.settings_version) for one in told.processes] == [
        ("none", 2),
        ("running", 3),
    ]
    text = "\n".join(lines_of(told))
    assert "process 0: none, by version 2" in text
    assert "process 1: running, 0 of the candidate, 0 of the control" in text
    gone = CanaryView(state="none", settings_version=4, unix_s=1.0)
    assert canary({0: gone, 1: view(7)}).state == "none"


def shot(row: CanaryRow | None, version: int = 3) -> Snapshot:
    router = SimpleNamespace(settings_version=version)
    return cast("Snapshot", SimpleNamespace(router=router, canary=row))


def test_the_row_of_a_snapshot_goes_by_the_same_rules() -> None:
    few, more = (row_of(view(requests), LeastLoaded()) for requests in (10, 12))
    assert few is not None
    assert more is not None
    assert canary_row([shot(few), shot(more)]) == more
    assert canary_row([shot(None, 2), shot(few)]) == few
    assert canary_row([shot(few), shot(None, 4)]) is None
    cut_off = row_of(view(90, fault="no route"), LeastLoaded())
    assert canary_row([shot(cut_off), shot(more)]) == more
    alone = row_of(view(4, state="ending", fault="no route"), LeastLoaded())
    told = canary_row([shot(more), shot(alone)])
    assert told is not None
    assert (told.state, told.is_alone, told.control_requests) == ("ending", True, 4)
    assert row_of(NONE, LeastLoaded()) is None


def test_a_candidate_is_told_by_what_differs() -> None:
    control = ExpectedTtft(w_copy=0.5)
    assert candidate_words(ExpectedTtft(w_copy=0.8), control) == "expected_ttft w_copy=0.8"
    assert candidate_words(control, control) == "expected_ttft"
    assert candidate_words(Weighted(w_queue=2.0), control) == "weighted w_queue=2.0"


def job(state: str, end: str = "", began_unix_s: float = 1.0) -> JobRow:
    return JobRow(
        kind="warm_up", replica="w0", state=state, end=end, planned=1, done=0, failed=0,
        spent_tokens=0, budget_tokens=1, computed_tokens=0, cached_tokens=0, gave_way=0,
        began_unix_s=began_unix_s, left_s=0.0,
    )  # fmt: skip


def test_jobs_stand_once_for_each_process_those_that_go_on_first() -> None:
    one = WarmUpView(enabled=True, kept_prefixes=2, kept_bytes=20, jobs=(job("ended", "done", 9),))
    two = WarmUpView(
        enabled=True, kept_prefixes=3, kept_bytes=30, jobs=(job("working"), job("elsewhere", "", 2))
    )
    told = whole_warm_ups([one, two])
    assert (told.enabled, told.kept_prefixes, told.kept_bytes) == (True, 5, 50)
    assert [row.state for row in told.jobs] == ["elsewhere", "working", "ended"]


def report(decisions: int, version: int = 3) -> ShadowReport:
    side = ShadowSide(
        decisions=decisions,
        same_replica=1,
        ttft_change_ms=Mean(count=decisions, mean=float(decisions)),
        hit_change_ratio=Mean(count=0, mean=None),
    )
    return ShadowReport(
        policy="least_loaded", active="weighted", settings_version=version, sample=1.0,
        overall=side, unanswered=1, skipped=2, reasons={"load": side}, worst=(),
    )  # fmt: skip


def test_a_shadow_report_adds_up_what_is_of_the_newest_settings() -> None:
    told = whole.shadow([report(1), report(3), report(50, 2)])
    assert (told.overall.decisions, told.unanswered, told.skipped) == (4, 2, 4)
    assert told.overall.ttft_change_ms.mean == pytest.approx((1 * 1 + 3 * 3) / 4)
    assert told.reasons["load"].decisions == 4
