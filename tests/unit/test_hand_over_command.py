"""What ``warmroute drain --hand-over`` makes of how hand-overs ended, of one process or several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from router.warm_job import JobEnd, JobRow
from router.warm_up import WarmUpView
from warmroute import drain, hand_over
from warmroute.cli import build_parser
from warmroute.hand_over import BEST_FIRST, shortfall, whole

if TYPE_CHECKING:
    from collections.abc import Callable


def row(end: str, done: int = 4, failed: int = 0, **fields: Any) -> JobRow:
    told: dict[str, Any] = {
        "kind": "hand_over",
        "replica": "w0",
        "state": "ended" if end else "working",
        "planned": 4,
        "spent_tokens": 100,
        "budget_tokens": 1_000,
        "computed_tokens": 100,
        "cached_tokens": 0,
        "gave_way": 0,
        "began_unix_s": 1.0,
        "left_s": 0.0,
    }
    return JobRow(end=end, done=done, failed=failed, **(told | fields))


def test_every_end_has_its_place() -> None:
    assert set(BEST_FIRST) == {end.value for end in JobEnd}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("done")], ""),
        ([row("tokens")], ""),
        ([row("done"), row("done", 0, planned=0)], ""),
        ([row("time", 3)], "not all was handed over: its time was over (warm_up.seconds); 3 of 4"),
        ([row("time", 0)], "nothing was handed over: its time was over"),
        ([row("done", 3, 1)], "not all was handed over: 1 prefixes could not be placed; 3 of 4"),
        ([row("tokens", 3, 1)], "1 prefixes could not be placed"),
        ([row("failed", 0, 4)], "nothing was handed over: it was refused or failed"),
        ([row("obsolete", 1)], "no longer drained"),
        ([row("stopped", 1)], "the router ended"),
        ([row("done"), row("failed", 0, 1, planned=1)], "not all was handed over: it was refused"),
        ([row("time", 1), row("done", 2, planned=2)], "3 of 6 prefixes are placed"),
    ],
)
@pytest.mark.parametrize("order", [list, reversed])
def test_what_is_missing_is_said_whichever_process_tells_it(
    rows: list[JobRow], words: str, order: Callable[[list[JobRow]], Any]
) -> None:
    missing = shortfall(whole(list(order(rows))))
    assert words in missing
    assert bool(missing) is bool(words)


def test_while_a_process_goes_on_its_row_is_the_hand_over() -> None:
    assert whole([row("done"), row("", 2)]).done == 2


@pytest.mark.parametrize(("end", "code"), [("done", 0), ("tokens", 0), ("time", 1), ("failed", 1)])
def test_the_exit_code_and_a_line_say_that_not_all_was_handed_over(
    end: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    view = WarmUpView(enabled=True, kept_prefixes=1, kept_bytes=1, jobs=(row(end, 3),))
    monkeypatch.setattr(hand_over, "ask", lambda *_: view)
    monkeypatch.setattr(hand_over, "POLL_S", 0.0)
    options = build_parser("drain").parse_args(["drain", "w0", "--hand-over", "--reason", "r"])
    assert drain._handed_over(options, set()) == code
    told = capsys.readouterr().err
    assert ("warmroute drain: w0: not all was handed over" in told) is bool(code)
