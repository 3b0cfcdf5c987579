"""What a canary's figures are told as: by what they carry, and why they may tell nothing."""

from __future__ import annotations

from typing import Any

import pytest

from policies.least_loaded import LeastLoaded
from router.canary_admin import CanaryView
from router.canary_setting import CanarySettings, Guardrails
from router.canary_sums import CanarySums, Counter
from router.canary_verdict import CanaryVerdict, Word, judge
from router.canary_words import note_of, verdict_lines
from router.split import CANDIDATE, CONTROL, Assigned
from support.canary_traffic import record_of
from warmroute.canary import lines_of
from warmroute.setting_client import shown


def sums_of(control: list[int], candidate: list[int]) -> CanarySums:
    """Return sums of one request for each number: its group."""
    counter = Counter()
    for side, groups in ((CONTROL, control), (CANDIDATE, candidate)):
        for group in groups:
            counter.add(Assigned(side, group), record_of())
    return counter.sums


def settings(**fields: Any) -> CanarySettings:
    told: dict[str, Any] = {"split": "hash", "percent": 10.0} | fields
    return CanarySettings(id="c", started_unix_s=0.0, policy=LeastLoaded(), **told)


ALL_ALIKE = [7] * 103
MANY = list(range(32))


@pytest.mark.parametrize(
    ("control", "candidate", "fields", "words"),
    [
        (ALL_ALIKE, [], {}, "all 103 requests fell on one side, the control's: they begin in few"),
        ([], ALL_ALIKE, {}, "all 103 requests fell on one side, the candidate's: they begin in"),
        ([1] * 20, [2] * 20, {}, "all 40 requests fell into 2 groups: they begin in few ways"),
        (ALL_ALIKE, [], {"split": "tenant"}, "the control's: they are of few tenants"),
        (
            ALL_ALIKE,
            [],
            {"split": "tenant", "percent": None, "tenants": ("acme",)},
            "the control's: none of them are of the tenants that are named",
        ),
        (MANY, [], {"percent": 1.0}, "the share is small (1 % of conversations)"),
    ],
)
def test_a_split_that_cannot_tell_anything_says_why(
    control: list[int], candidate: list[int], fields: dict[str, Any], words: str
) -> None:
    told = note_of(judge(sums_of(control, candidate), Guardrails()), settings(**fields))
    assert words in told
    assert told.endswith("(docs/canary.md#who-gets-the-candidate)")


@pytest.mark.parametrize(
    ("control", "candidate"), [([7] * 29, []), (MANY, [1, 2]), ([1, 2] * 20, [3, 4])]
)
def test_one_that_may_tell_yet_says_nothing(control: list[int], candidate: list[int]) -> None:
    """Too few requests, or four groups on two sides: both may be of the first minute."""
    assert not note_of(judge(sums_of(control, candidate), Guardrails()), settings())


def test_an_older_verdict_has_no_groups_to_speak_of() -> None:
    old = CanaryVerdict(word=Word.UNKNOWN, control_requests=90, candidate_requests=0, measures=())
    assert not note_of(old, settings())
    assert "groups" not in "\n".join(verdict_lines(old))


def test_the_groups_of_both_sides_are_told_and_why_imbalance_has_no_figure() -> None:
    verdict = judge(sums_of(ALL_ALIKE, []), Guardrails())
    lines = list(verdict_lines(verdict))
    assert lines[0] == "too little to tell: 0 requests of the candidate, 103 of the control"
    assert lines[1].endswith("0 of 32 of the candidate, 1 of 32 of the control")
    [imbalance] = [line for line in lines if line.strip().startswith("imbalance")]
    assert "- against -" in imbalance
    assert "2 groups of conversations, or tenants, are needed for a side's figure" in imbalance
    filled = judge(sums_of([1] * 300, [2] * 300), Guardrails())
    [measure] = [one for one in filled.measures if one.name == "imbalance"]
    assert measure.why.startswith("2 groups of conversations")


@pytest.mark.parametrize(
    ("word", "carries"),
    [(Word.BETTER, True), (Word.SAME, True), (Word.WORSE, False), (Word.UNKNOWN, False)],
)
def test_a_promotion_takes_a_verdict_in_which_nothing_is_worse(
    word: Word, *, carries: bool
) -> None:
    told = CanaryVerdict(word=word, control_requests=1, candidate_requests=1, measures=())
    assert told.carries is carries


@pytest.mark.parametrize(
    ("lives", "words"),
    [
        (1, "figures of one router"),
        (3, "figures of 3 routers; one that was started again counts as another"),
    ],
)
def test_the_status_has_the_note_and_whose_figures_they_are(lives: int, words: str) -> None:
    view = CanaryView(
        state="running",
        settings_version=1,
        unix_s=1.0,
        settings=settings(),
        counted_by=lives,
        verdict=judge(sums_of(ALL_ALIKE, []), Guardrails()),
        note="all of them fell on one side",
    )
    lines = list(lines_of(view))
    assert words in lines
    assert lines.index(view.note) < lines.index(next(verdict_lines(view.verdict)))  # type: ignore[arg-type]


def test_a_time_in_a_change_is_told_as_one() -> None:
    assert shown(1796130436.9, "canary.started_unix_s") == "2026-12-01 13:07:16 UTC"
    assert shown(None, "canary.ended_unix_s") == "-"
    assert shown(3600.0, "canary.duration_s") == "3600.0"
