"""Traces made of traces."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from replay import transform
from replay.trace import TraceRequest
from state.model import BlockId
from state.prefix import common_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BLOCK_TOKENS = 64


def request(
    arrival_s: float, blocks: str = "abc", session: str = "", output_tokens: int = 5
) -> TraceRequest:
    ids = tuple(BlockId(blocks[: end + 1].encode().rjust(16)) for end in range(len(blocks)))
    return TraceRequest(
        arrival_s=arrival_s,
        prompt_tokens=len(blocks) * BLOCK_TOKENS + 1,
        output_tokens=output_tokens,
        chain=ids,
        session=session,
        tenant="t",
        line=int(arrival_s * 10) + 1,
    )


TRACE = [request(time / 4, "ab" + chr(99 + time % 7), f"s{time % 5}") for time in range(100)]
QUANTISED = [request(3.0 * (place // 20)) for place in range(200)]


def arrivals(requests: Iterable[TraceRequest]) -> list[float]:
    return [one.arrival_s for one in requests]


STEPS: dict[str, Callable[[Iterable[TraceRequest]], Iterable[TraceRequest]]] = {
    "speed_up": lambda trace: transform.speed_up(trace, 3.0),
    "at_rate": lambda trace: transform.at_rate(trace, 7.0),
    "with_jitter": lambda trace: transform.with_jitter(trace, 3.0, 1),
    "limit": lambda trace: transform.limit(trace, 50),
    "cloned": lambda trace: transform.cloned(trace, 3, 1),
    "with_arrivals_of": lambda trace: transform.with_arrivals_of(trace, TRACE, BLOCK_TOKENS),
    "held_out, first": lambda trace: transform.held_out(trace, 0.3)[0],
    "held_out, last": lambda trace: transform.held_out(trace, 0.3)[1],
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("trace", [TRACE, QUANTISED], ids=["spread", "quantised"])
def test_what_comes_out_starts_at_zero_stays_in_order_and_can_be_read_again(
    name: str, trace: list[TraceRequest]
) -> None:
    before = list(trace)
    made = STEPS[name](trace)
    times = arrivals(made)
    assert times[0] == 0
    assert times == sorted(times)
    assert list(made) == list(made)
    assert trace == before
    for one in made:
        assert len(one.chain) * BLOCK_TOKENS <= one.prompt_tokens


@pytest.mark.parametrize("first", STEPS)
@pytest.mark.parametrize("second", STEPS)
def test_every_step_can_be_put_on_every_other(first: str, second: str) -> None:
    made = STEPS[second](STEPS[first](TRACE))
    assert list(made)
    assert list(made) == list(made)


def test_faster_means_shorter_gaps_and_nothing_else() -> None:
    made = list(transform.speed_up(TRACE, 2.5))
    assert made[40].arrival_s == TRACE[40].arrival_s / 2.5
    assert made[40].chain == TRACE[40].chain
    assert arrivals(transform.speed_up(TRACE, 0.5))[-1] == TRACE[-1].arrival_s * 2


def test_a_rate_is_one_over_the_mean_gap() -> None:
    uneven = [request(time) for time in (0.0, 1.0, 1.0, 9.0)]
    assert arrivals(transform.at_rate(uneven, 6.0)) == pytest.approx([0, 1 / 18, 1 / 18, 0.5])
    assert list(transform.at_rate(uneven[:1], 6.0)) == uneven[:1]
    assert list(transform.at_rate([], 6.0)) == []
    with pytest.raises(ValueError, match="more than one arrival time"):
        transform.at_rate([request(0), request(0)], 1.0)


def test_what_reads_twice_refuses_what_can_be_read_once() -> None:
    for step in (
        lambda: transform.at_rate(iter(TRACE), 1),
        lambda: transform.held_out(iter(TRACE), 0.5),
    ):
        with pytest.raises(ValueError, match="read twice"):
            step()


def test_jitter_spreads_a_quantum_evenly_up_to_the_next() -> None:
    made = list(transform.with_jitter(QUANTISED, 3.0, 7))
    shift_s = made[20].arrival_s - made[0].arrival_s
    for place, one in enumerate(made):
        assert 3 * (place // 20) - 3 <= one.arrival_s < 3 * (place // 20) + 3
    assert 0 < shift_s < 6
    gaps = [after - before for before, after in pairwise(arrivals(made))]
    assert max(gaps) < 1.5
    assert sum(gap == 0 for gap in gaps) == 0
    thirds = [0, 0, 0]
    many = [request(0.0) for _ in range(3_000)] + [request(3.0)]
    for one in list(transform.with_jitter(many, 3.0, 1))[:-1]:
        thirds[math.floor(one.arrival_s)] += 1
    assert all(900 < count < 1_100 for count in thirds)


def test_jitter_keeps_the_order_of_requests_and_never_passes_the_next_arrival() -> None:
    rng = random.Random(3)
    times = sorted(rng.choice((0.0, 0.999, 2.0, 2.001, 50.0)) for _ in range(400))
    trace = [request(time, session=str(place)) for place, time in enumerate(times)]
    made = list(transform.with_jitter(trace, 3.0, 4))
    assert [one.session for one in made] == [str(place) for place in range(400)]
    late_s = [after.arrival_s - before.arrival_s for before, after in zip(trace, made, strict=True)]
    assert max(late_s) < 3.0
    assert made != list(transform.with_jitter(trace, 3.0, 5))
    assert list(transform.with_jitter(trace, 0.0, 5)) == trace


class Counted:
    """A trace that counts what was read of it."""

    def __init__(self, requests: list[TraceRequest]) -> None:
        self._requests = requests
        self.read = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        for one in self._requests:
            self.read += 1
            yield one


def test_jitter_holds_one_group_and_knows_the_next() -> None:
    trace = Counted(QUANTISED)
    next(iter(transform.with_jitter(trace, 3.0, 1)))
    assert trace.read <= 41


def test_a_copy_is_held_no_longer_than_until_it_is_due() -> None:
    trace = Counted(TRACE)
    made = iter(transform.cloned(trace, 2, 1, within_s=1.0))
    taken = [next(made) for _ in range(50)]
    assert TRACE[trace.read - 1].arrival_s <= taken[-1].arrival_s + 1.0


def test_a_limit_reads_no_further() -> None:
    trace = Counted(TRACE)
    assert list(transform.limit(trace, 3)) == TRACE[:3]
    assert trace.read == 3
    assert len(list(transform.limit(TRACE, 1_000))) == 100


def test_copies_share_nothing_with_each_other_and_everything_inside() -> None:
    made = list(transform.cloned(TRACE, 3, 9))
    assert len(made) == 300
    by_copy = defaultdict(list)
    for one in made:
        by_copy[one.session.partition(" ")[2]].append(one)
    assert {len(group) for group in by_copy.values()} == {100}
    used = [{block for one in group for block in one.chain} for group in by_copy.values()]
    assert len(set.union(*used)) == sum(map(len, used)) == 3 * len(used[0])
    assert sorted(by_copy[""], key=lambda one: one.line) == TRACE
    for name, group in by_copy.items():
        assert {one.tenant for one in group} == {"t"}
        if name:
            first, second = sorted(group, key=lambda one: one.line)[:2]
            assert common_blocks(first.chain, second.chain) == 2


def test_a_session_of_a_copy_is_later_by_one_time_within_the_bound() -> None:
    original = {one.line: one.arrival_s for one in TRACE}
    later_s = defaultdict(set)
    for one in transform.cloned(TRACE, 2, 9, within_s=10.0):
        later_s[one.session].add(round(one.arrival_s - original[one.line], 6))
    copies = {name: times for name, times in later_s.items() if "copy" in name}
    assert len(copies) == 5
    assert all(len(times) == 1 for times in later_s.values())
    assert all(0 <= min(times) < 10 for times in copies.values())
    assert len(set.union(*copies.values())) == 5
    assert list(transform.cloned(TRACE, 2, 9)) != list(transform.cloned(TRACE, 2, 8))
    assert list(transform.cloned(TRACE, 1, 9)) == TRACE


def test_requests_without_a_session_keep_their_distances_in_a_copy() -> None:
    trace = [request(float(time), chr(97 + time)) for time in range(5)]
    copy = [one for one in transform.cloned(trace, 2, 1) if one.chain[0] not in trace[0].chain]
    late = [one for one in copy if one.chain[0] not in {other.chain[0] for other in trace}]
    assert [after - before for before, after in pairwise(arrivals(late))] == pytest.approx([1] * 4)


def test_arrivals_and_lengths_of_one_trace_stand_on_the_chains_of_another() -> None:
    chains = [request(0.0, "abcd", "s"), request(0.0, "ab"), request(0.0, "x")]
    timed = [
        TraceRequest(
            arrival_s=time, prompt_tokens=tokens, output_tokens=8, chain=(), tenant="u", line=9
        )
        for time, tokens in ((0.0, 2 * BLOCK_TOKENS + 5), (0.7, 1_000))
    ]
    first, second = transform.with_arrivals_of(chains, timed, BLOCK_TOKENS)
    assert first.chain == chains[0].chain[:2]
    assert (first.prompt_tokens, first.output_tokens, first.session) == (133, 8, "s")
    assert first.tenant == "t"
    assert second.chain == chains[1].chain
    assert (second.arrival_s, second.prompt_tokens) == (0.7, 1_000)


def test_the_part_held_out_is_the_last_part_of_the_time() -> None:
    trace = [request(time) for time in (0.0, 1.0, 2.0, 7.4, 7.6, 10.0)]
    before, after = transform.held_out(trace, 0.25)
    assert arrivals(before) == [0, 1, 2, 7.4]
    assert arrivals(after) == pytest.approx([0, 2.4])
    assert [one.line for one in after] == [77, 101]


def test_a_trace_that_cannot_be_split_is_refused() -> None:
    for trace in ([], [request(0)], [request(0), request(0)]):
        with pytest.raises(ValueError, match="on either side"):
            transform.held_out(trace, 0.5)


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf])
def test_amounts_that_make_no_sense_are_refused(wrong: float) -> None:
    for step in (
        lambda: transform.speed_up(TRACE, wrong),
        lambda: transform.at_rate(TRACE, wrong),
        lambda: transform.held_out(TRACE, wrong),
        lambda: transform.with_jitter(TRACE, wrong or -1, 1),
        lambda: transform.cloned(TRACE, 2, 1, within_s=wrong or -1),
        lambda: transform.cloned(TRACE, 0, 1),
        lambda: transform.limit(TRACE, 0),
        lambda: transform.with_arrivals_of(TRACE, TRACE, 0),
    ):
        with pytest.raises(ValueError, match="expected"):
            step()
