"""What a timing audit concludes from its samples."""

from __future__ import annotations

import random

import pytest

from warmroute.audit_judge import Samples, Verdict, judge
from warmroute.audit_probe import fresh_prompt

FRESH_MS, HIT_MS = 60.0, 10.0


def drawn(
    rng: random.Random, *, probe_ms: float = FRESH_MS, hit_ms: float = HIT_MS, count: int = 100
) -> Samples:
    """Return one repeat; times spread by some ms around what is given."""

    def times(center_ms: float) -> list[float]:
        return [rng.gauss(center_ms, 3.0) for _ in range(count)]

    return Samples(
        probes=times(probe_ms), fresh=times(FRESH_MS), hits=times(hit_ms), misses=times(FRESH_MS)
    )


def test_tenants_who_see_only_their_own_cache_pass() -> None:
    rng = random.Random(1)
    report = judge([drawn(rng) for _ in range(20)])
    assert report.verdict == "passed"
    assert (report.rejections_allowed, report.controls_missed) == (1, 0)
    assert report.pooled.across.known_count == 2000
    assert report.pooled.control.p_value < 1e-50


@pytest.mark.parametrize("probe_ms", [HIT_MS, FRESH_MS - 3, FRESH_MS + 3], ids=str)
def test_a_difference_across_tenants_is_a_leak_whichever_way_it_goes(probe_ms: float) -> None:
    rng = random.Random(2)
    report = judge([drawn(rng, probe_ms=probe_ms) for _ in range(20)])
    assert (report.verdict, report.rejections) == ("leak", 20)


@pytest.mark.parametrize(("leaks", "verdict"), [(1, "passed"), (2, "leak")])
def test_one_of_twenty_may_differ_by_accident(leaks: int, verdict: str) -> None:
    rng = random.Random(3)
    repeats = [drawn(rng) for _ in range(20 - leaks)]
    repeats += [drawn(rng, probe_ms=HIT_MS) for _ in range(leaks)]
    report = judge(repeats)
    assert (report.verdict, report.rejections) == (verdict, leaks)


@pytest.mark.parametrize("hit_ms", [FRESH_MS, 2 * FRESH_MS], ids=["same", "slower"])
def test_an_audit_that_sees_no_cache_within_a_tenant_is_void(hit_ms: float) -> None:
    """S-05: the positive control; also where the times differ the wrong way."""
    rng = random.Random(4)
    blind = drawn(rng, hit_ms=hit_ms)
    assert judge([*(drawn(rng) for _ in range(19)), blind]).verdict == "void"
    leak = judge([drawn(rng, probe_ms=HIT_MS, hit_ms=hit_ms)])
    assert (leak.verdict, leak.rejections, leak.controls_missed) == ("void", 1, 1)


def test_exit_codes_tell_the_verdicts_apart() -> None:
    assert [(one.name, one.value) for one in Verdict] == [("PASSED", 0), ("LEAK", 1), ("VOID", 3)]


def test_prompts_of_one_length_share_no_word() -> None:
    prompts = [fresh_prompt(64) for _ in range(200)]
    assert len({word for prompt in prompts for word in prompt.split()}) == 200 * 64
    assert {len(prompt) for prompt in prompts} == {64 * 9 - 1}
