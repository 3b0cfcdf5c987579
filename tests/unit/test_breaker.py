"""When lookups rest, and who tries first."""

from __future__ import annotations

from random import Random

from state.breaker import Admission, Breaker
from state.rhythm import Backoff


def _breaker(seed: int = 1) -> Breaker:
    return Breaker(Backoff(0.1, 5.0, Random(seed)), max_errors=3, max_silence_s=1.0)


def _opened(breaker: Breaker, now_s: float) -> Breaker:
    for _ in range(3):
        breaker.failed(breaker.admit(now_s), now_s)
    assert breaker.is_open
    return breaker


def test_three_errors_in_a_row_open_it_and_an_answer_between_does_not() -> None:
    breaker = _breaker()
    for now_s in (0.0, 0.1):
        breaker.failed(breaker.admit(now_s), now_s)
    breaker.answered(breaker.admit(0.2))
    for now_s in (0.3, 0.4):
        breaker.failed(breaker.admit(now_s), now_s)
        assert not breaker.is_open
    breaker.failed(breaker.admit(0.5), 0.5)
    assert breaker.is_open


def test_answers_that_are_late_for_a_second_open_it() -> None:
    breaker = _breaker()
    for step in range(10):
        breaker.late(breaker.admit(step / 10), step / 10)
        assert not breaker.is_open
    breaker.late(breaker.admit(1.0), 1.0)
    assert breaker.is_open


def test_a_time_without_questions_is_no_silence() -> None:
    breaker = _breaker()
    breaker.answered(breaker.admit(0.0))
    breaker.late(breaker.admit(100.0), 100.0)
    assert not breaker.is_open


def test_open_it_lets_one_probe_through_and_that_one_decides() -> None:
    breaker = _opened(_breaker(), 0.0)
    assert breaker.admit(0.2) is Admission.PROBE
    assert breaker.admit(0.2) is Admission.REFUSED
    assert breaker.admit(99.0) is Admission.REFUSED
    breaker.answered(Admission.PROBE)
    assert not breaker.is_open
    assert breaker.admit(99.0) is Admission.ASK


def test_a_probe_that_fails_or_is_late_begins_a_longer_rest() -> None:
    breaker = _opened(_breaker(), 0.0)
    rests_s, now_s = [], 0.0
    for number in range(200):
        began_s = now_s
        while breaker.admit(now_s) is Admission.REFUSED:
            now_s += 0.01
        rests_s.append(now_s - began_s)
        (breaker.failed if number % 2 else breaker.late)(Admission.PROBE, now_s)
    assert max(rests_s[:1]) <= 0.11
    assert max(rests_s) > 4.0
    assert max(rests_s) <= 5.02


def test_late_answers_from_before_it_opened_do_not_close_it() -> None:
    breaker = _breaker()
    early = breaker.admit(0.0)
    _opened(breaker, 0.0)
    breaker.answered(early)
    assert breaker.is_open
    breaker.failed(early, 0.0)
    assert breaker.admit(0.2) is Admission.PROBE
