"""Which cause is named by which signature, and how often it is said."""

from __future__ import annotations

import itertools
import logging
import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from router.diagnosis import (
    ADVICE,
    ENDED_KEPT,
    LOG_PAUSE_S,
    Diagnoses,
    DiagnosisReport,
    Kind,
)
from router.trust import RECOVERY_HITS, BookKey, Ground, Observation, Trust
from state.model import ReplicaId

if TYPE_CHECKING:
    from collections.abc import Iterable

A = ReplicaId("a")
LENGTHS = (128, 256, 640, 1_280, 320, 960, 4_096, 512)


def seen(predicted: int, reported: int | None, *, has_length: bool = True) -> Observation:
    return Observation(predicted, predicted, reported, has_length=has_length)


def hits(count: int) -> Iterable[Observation]:
    return (seen(tokens, tokens) for tokens in itertools.islice(itertools.cycle(LENGTHS), count))


class Loop:
    """Trust and diagnoses with a clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.trust = Trust()
        self.diagnoses = Diagnoses(lambda: self.now_s)

    def tell(self, observations: Iterable[Observation], ground: Ground = Ground.EVENTS) -> None:
        key = BookKey(A, "m", ground)
        for one in observations:
            book = self.trust.observe(key, one, self.now_s)
            self.diagnoses.look(key, book, self.now_s)

    def tick(self) -> None:
        self.trust.tick(self.now_s)
        self.diagnoses.tick(self.trust.books(), self.now_s)

    @property
    def kinds(self) -> list[Kind]:
        return [one.kind for one in self.diagnoses.active()]


@pytest.fixture
def loop() -> Loop:
    return Loop()


def broken(kind: Kind) -> Iterable[Observation]:
    """Return what a replica shows with each fault, without end."""
    rng = random.Random(3)
    for tokens in itertools.cycle(LENGTHS):
        if kind is Kind.NO_HITS:
            yield seen(tokens, 0)
        elif kind is Kind.PROMPT_MISMATCH:
            yield seen(tokens, 16, has_length=False)
        elif kind is Kind.CONSTANT_RATIO:
            yield seen(tokens, tokens // 4)
        elif kind is Kind.LOW_PRECISION:
            yield seen(tokens, int(tokens * rng.choice((0.0, 0.2, 0.9))))
        else:
            yield Observation(0, 0, tokens, visible_tokens=64, has_length=True)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("healthy", [0, 3, 11, 40, 5_000])
def test_each_cause_is_told_by_its_own_signature_and_by_no_other(
    loop: Loop, kind: Kind, healthy: int
) -> None:
    """A77, C45, R-25: from the first request or after a long good time, within 60 requests."""
    loop.tell(hits(healthy))
    assert loop.kinds == []
    loop.tell(itertools.islice(broken(kind), 60))
    assert loop.kinds == [kind]
    [found] = loop.diagnoses.active()
    assert (found.replica, found.model, found.ground) == (A, "m", Ground.EVENTS)
    assert found.advice == ADVICE[kind]
    assert found.evidence.recent_requests <= 16
    assert loop.diagnoses.report().ended == ()  # no other finding came before


@pytest.mark.parametrize(("kind", "most"), [(Kind.NO_HITS, 20), (Kind.PROMPT_MISMATCH, 20)])
def test_a_total_failure_is_named_within_twenty_requests(loop: Loop, kind: Kind, most: int) -> None:
    """A77: after 10,000 good ones."""
    loop.tell(hits(10_000))
    faults = broken(kind)
    needed = 0
    while not loop.kinds:
        loop.tell(itertools.islice(faults, 1))
        needed += 1
    assert needed <= most


def test_more_than_predicted_by_a_constant_is_a_ratio_too(loop: Loop) -> None:
    """A71, B14: pages of the engine that are four times what the index takes them for."""
    loop.tell(seen(tokens, 4 * tokens) for tokens in LENGTHS * 5)
    assert loop.kinds == [Kind.CONSTANT_RATIO]
    assert loop.diagnoses.active()[0].evidence.ratio == 4.0


def test_one_prompt_again_and_again_has_no_constant_ratio(loop: Loop) -> None:
    """Of equal prompts every ratio is constant: it proves no page size."""
    loop.tell([seen(640, 160)] * 60)
    assert loop.kinds == [Kind.LOW_PRECISION]


@pytest.mark.parametrize("ground", [Ground.PLACEMENTS, Ground.BYTES])
def test_placements_that_were_evicted_are_no_fault(loop: Loop, ground: Ground) -> None:
    """Without events nobody tells of evictions, nor of what other routers sent there."""
    loop.tell(itertools.islice(broken(Kind.LOW_PRECISION), 60), ground)
    loop.tell(itertools.islice(broken(Kind.MISSING_EVENTS), 60), ground)
    assert loop.kinds == []


@pytest.mark.parametrize("ground", [Ground.PLACEMENTS, Ground.BYTES])
def test_an_engine_that_never_hits_is_found_without_events_too(loop: Loop, ground: Ground) -> None:
    """B50: prefix caching is off, and no event could tell."""
    loop.tell(itertools.islice(broken(Kind.NO_HITS), 30), ground)
    assert loop.kinds == [Kind.NO_HITS]


def test_other_lengths_explain_everything_else(loop: Loop) -> None:
    """B42: with another template there are no hits either; that is not what is to be repaired."""
    loop.tell(itertools.islice(broken(Kind.NO_HITS), 30))
    assert loop.kinds == [Kind.NO_HITS]
    loop.tell(itertools.islice(broken(Kind.PROMPT_MISMATCH), 30))
    assert loop.kinds == [Kind.PROMPT_MISMATCH]
    assert [one.kind for one in loop.diagnoses.report().ended] == [Kind.NO_HITS]


def test_lengths_are_compared_where_no_cached_tokens_are_reported(loop: Loop) -> None:
    """B42: every engine counts prompt tokens."""
    loop.tell(seen(tokens, None, has_length=False) for tokens in LENGTHS * 2)
    assert loop.kinds == [Kind.PROMPT_MISMATCH]


def test_a_finding_is_logged_once_when_it_begins_and_once_when_it_ends(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    """Not once per request; it names replica, kind, numbers and what to do."""
    caplog.set_level(logging.INFO)
    loop.tell(itertools.islice(broken(Kind.NO_HITS), 5_000))
    [begun] = caplog.records
    assert begun.levelno == logging.WARNING
    text = begun.getMessage()
    for part in ("replica=a", "model=m", "kind=no_hits", "0 of", "prefix caching is on"):
        assert part in text
    loop.now_s += 90.0
    loop.tell(hits(RECOVERY_HITS))
    [_, ended] = caplog.records
    assert "diagnosis ends: replica=a model=m kind=no_hits after 90 s" in ended.getMessage()
    assert loop.kinds == []
    [past] = loop.diagnoses.report().ended
    assert (past.since_unix_s, past.ended_unix_s) == (1_000.0, 1_090.0)


def test_a_replica_that_breaks_and_recovers_all_the_time_floods_no_log(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    """100 s in which it begins 1,000 times: it is shown each time and logged twice."""
    caplog.set_level(logging.INFO)
    faults = broken(Kind.NO_HITS)
    for _ in range(1_000):
        loop.tell(itertools.islice(faults, 24))
        assert loop.kinds == [Kind.NO_HITS]
        loop.tell(hits(RECOVERY_HITS))
        assert loop.kinds == []
        loop.now_s += 0.1
    assert len(caplog.records) <= 2
    report = loop.diagnoses.report()
    assert len(report.ended) == ENDED_KEPT
    assert report.ended[0].times == 1_000
    loop.now_s += LOG_PAUSE_S
    loop.tell(itertools.islice(faults, 24))
    assert "diagnosis begins" in caplog.records[-1].getMessage()


def test_the_border_does_not_flap(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    """A replica just as bad as what is significant: it stays found for long."""
    caplog.set_level(logging.INFO)
    rng = random.Random(5)
    for _ in range(20_000):
        tokens = rng.choice(LENGTHS)
        loop.tell([seen(tokens, tokens if rng.random() < 0.82 else 0)])
        loop.now_s += 1.0
    assert len(caplog.records) <= 120  # 3 in 500 requests


def test_a_finding_ends_when_its_evidence_is_old(loop: Loop) -> None:
    """Nobody asks the replica any more: it is tried again."""
    loop.tell(itertools.islice(broken(Kind.NO_HITS), 50))
    loop.now_s += 3_600.0
    loop.tick()
    assert loop.kinds == []
    assert loop.trust.credits == {}


def test_a_replica_that_left_has_no_finding(loop: Loop) -> None:
    """It ends with the reason."""
    loop.tell(itertools.islice(broken(Kind.NO_HITS), 50))
    loop.trust.forget(A)
    loop.diagnoses.forget(A, "the replica left")
    assert loop.kinds == []
    assert loop.diagnoses.report().ended[0].ended_because == "the replica left"


def test_a_book_that_was_dropped_takes_its_finding_along(loop: Loop) -> None:
    """Models are bounded; what is not judged any more is not claimed either."""
    loop.tell(itertools.islice(broken(Kind.NO_HITS), 50))
    loop.trust.forget(A)
    loop.tick()
    assert loop.kinds == []


def test_the_report_is_json_that_others_read(loop: Loop) -> None:
    """What ``/admin/diagnoses`` answers decodes as what it was."""
    loop.tell(itertools.islice(broken(Kind.CONSTANT_RATIO), 60))
    report = loop.diagnoses.report()
    assert msgspec.json.decode(msgspec.json.encode(report), type=DiagnosisReport) == report
