"""Engines that do not report what they had cached are named, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from router.hit_report import SILENT_ANSWERS, HitReports
from router.observer import Usage

SILENT = Usage(100, 1, None)
TELLING = Usage(100, 1, 0)


def call_of(
    replica: str = "r1", *, predicted: int = 64, is_told: bool = True, outcome: str = "done"
) -> Any:
    choice = SimpleNamespace(
        member=SimpleNamespace(replica=replica),
        decision=SimpleNamespace(predicted_cached_tokens=predicted),
        is_told=is_told,
    )
    return SimpleNamespace(choices=[choice], outcome=outcome)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_an_engine_that_never_reports_hits_is_named_once_with_the_flag_it_lacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A77: what cannot be compared is said, and not taken for a failed prediction."""
    reports = HitReports()
    for _ in range(SILENT_ANSWERS - 1):
        reports.note(call_of(), SILENT)
    assert warnings_of(caplog) == []
    for _ in range(3 * SILENT_ANSWERS):
        reports.note(call_of(), SILENT)
    [warning] = warnings_of(caplog)
    assert "r1" in warning
    assert "--enable-prompt-tokens-details" in warning
    assert "--enable-cache-report" in warning


@pytest.mark.parametrize(
    "call",
    [
        call_of(predicted=0),
        call_of(is_told=False),
        call_of(outcome="failed"),
        SimpleNamespace(choices=[], outcome="done"),
    ],
    ids=["nothing predicted", "a guess", "failed", "never sent"],
)
def test_answers_that_need_no_report_do_not_count(
    caplog: pytest.LogCaptureFixture, call: Any
) -> None:
    """An engine leaves out a report of zero; a guess may be one of nothing."""
    reports = HitReports()
    for _ in range(3 * SILENT_ANSWERS):
        reports.note(call, SILENT)
        reports.note(call_of(), None)
        reports.note(call_of(), Usage(None, None, None))
    assert warnings_of(caplog) == []


def test_one_report_is_enough_to_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    reports = HitReports()
    for _ in range(5):
        for _ in range(SILENT_ANSWERS - 1):
            reports.note(call_of(), SILENT)
        reports.note(call_of("other"), TELLING)
        reports.note(call_of(), TELLING)
    assert warnings_of(caplog) == []
