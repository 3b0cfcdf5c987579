from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from policies.weighted import Weighted
from replay.outcome import Outcome, ReplayRun
from replay.trace import TraceRequest
from replay.trial import Cell, TrialError
from replay.trial_replay import Loaded, ReplayTrials, TrialSettings, excerpt, trace_digest
from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replay.setting import FleetSettings
    from replay.trial import Part

WHOLE = TrialSettings(kept=1.0)


def request(line: int, arrival_s: float, session: str = "") -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s,
        prompt_tokens=100,
        output_tokens=2,
        chain=(BlockId(bytes([line])),),
        session=session,
        line=line,
    )


TRACE = tuple(request(line, float(line), f"s{line % 20}") for line in range(101))


def cell(part: Part = "tuning", load: float = 1.0, seed: int = 1) -> Cell:
    return Cell(part=part, load=load, seed=seed)


def lines(requests: Sequence[TraceRequest]) -> list[int]:
    return [one.line for one in requests]


def test_the_tuning_part_ends_where_the_held_out_part_begins_to_count() -> None:
    tuning = excerpt(TRACE, WHOLE, cell())
    held_out = excerpt(TRACE, WHOLE, cell("held_out"))
    counted = [one for one in held_out.requests if one.arrival_s >= held_out.counted_from_s]
    assert lines(tuning.requests) == list(range(70))
    assert tuning.counted_from_s == 0
    assert lines(counted) == list(range(70, 101))


def test_the_held_out_part_is_warmed_by_as_much_before_it() -> None:
    held_out = excerpt(TRACE, WHOLE, cell("held_out"))
    assert lines(held_out.requests) == list(range(40, 101))
    assert held_out.requests[0].arrival_s == 0
    assert held_out.counted_from_s == pytest.approx(30)


def test_a_long_held_out_part_is_warmed_by_what_there_is() -> None:
    settings = TrialSettings(kept=1.0, hold_out=0.8)
    assert lines(excerpt(TRACE, settings, cell("held_out")).requests) == list(range(101))


def test_a_load_of_two_halves_the_time() -> None:
    fast = excerpt(TRACE, WHOLE, cell(load=2.0))
    assert [one.arrival_s for one in fast.requests] == [line / 2 for line in range(70)]


def test_a_seed_keeps_whole_sessions_and_the_load() -> None:
    kept = excerpt(TRACE, TrialSettings(kept=0.5), cell()).requests
    sessions = {one.session for one in kept}
    assert 4 <= len(sessions) <= 16
    assert lines(kept) == [one.line for one in TRACE[:70] if one.session in sessions]
    assert kept[-1].arrival_s == pytest.approx(kept[-1].line * len(kept) / 70)


def test_a_trace_without_sessions_is_thinned_by_request() -> None:
    bare = tuple(request(line, float(line)) for line in range(101))
    kept = excerpt(bare, TrialSettings(kept=0.5), cell()).requests
    assert 20 <= len(kept) <= 50


def test_seeds_keep_different_sessions_and_each_the_same_at_every_load() -> None:
    settings = TrialSettings(kept=0.5)
    by_seed = [lines(excerpt(TRACE, settings, cell(seed=seed)).requests) for seed in range(5)]
    assert len({tuple(kept) for kept in by_seed}) == 5
    other_load = excerpt(TRACE, settings, cell(load=1.3, seed=3)).requests
    assert lines(other_load) == by_seed[3]


@pytest.mark.parametrize("trace", [(), TRACE[:1]])
def test_a_trace_too_short_to_split_is_said(trace: tuple[TraceRequest, ...]) -> None:
    with pytest.raises(TrialError, match="the tuning part has no requests"):
        excerpt(trace, WHOLE, cell())


def test_the_digest_follows_the_content() -> None:
    loaded = Loaded(name="a", block_tokens=16, requests=TRACE)
    renamed = Loaded(name="b", block_tokens=16, requests=TRACE)
    other_blocks = Loaded(name="a", block_tokens=32, requests=TRACE)
    shorter = Loaded(name="a", block_tokens=16, requests=TRACE[:-1])
    assert trace_digest(loaded) == trace_digest(renamed)
    assert len({trace_digest(one) for one in (loaded, other_blocks, shorter)}) == 3


class Run:
    """Stands for the simulator: ``ttft_s`` by line; the prompts of ``failing`` lines fail."""

    def __init__(
        self, *, failing: frozenset[int] = frozenset(), ttft_s: float | None = 1.0
    ) -> None:
        self.failing = failing
        self.ttft_s = ttft_s
        self.fleets: list[FleetSettings] = []

    def __call__(
        self, requests: tuple[TraceRequest, ...], _: int, __: Any, fleet: Any, **___: Any
    ) -> ReplayRun:
        self.fleets.append(fleet)
        outcomes = tuple(
            Outcome(
                ordinal=ordinal,
                line=one.line,
                arrival_s=one.arrival_s,
                prompt_tokens=one.prompt_tokens,
                output_tokens=1,
                replica=f"r{ordinal % 2}",
                cached_tokens=0 if ordinal % 2 else 50,
                ttft_s=None if self.ttft_s is None else self.ttft_s * (one.line + 1),
                error="gone" if one.line in self.failing else None,
            )
            for ordinal, one in enumerate(requests)
        )
        return ReplayRun(
            trace="t", policy="weighted", replicas=("r0", "r1"), outcomes=outcomes, span_s=1.0
        )


def trials(run: Run) -> ReplayTrials:
    return ReplayTrials(Loaded(name="t", block_tokens=16, requests=TRACE), WHOLE, run)


def test_figures_are_of_the_counted_requests_only() -> None:
    figures = trials(Run())(Weighted(), cell("held_out"))
    assert figures.requests == 31
    assert figures.ttft_mean_s == pytest.approx(86.0)  # lines 70 to 100, one second a line
    assert figures.ttft_p99_s == pytest.approx(100.7)
    assert figures.hit_ratio == pytest.approx(16 * 50 / 3100)
    assert figures.imbalance == pytest.approx(2 * 1500 / 2300)


def test_what_failed_is_counted_and_in_no_figure() -> None:
    figures = trials(Run(failing=frozenset({69})))(Weighted(), cell())
    assert (figures.requests, figures.failed) == (70, 1)
    assert figures.ttft_mean_s == pytest.approx(35.0)


def test_each_seed_draws_its_own_ties() -> None:
    run = Run()
    for seed in (1, 2):
        trials(run)(Weighted(), cell(seed=seed))
    assert run.fleets[0].seed != run.fleets[1].seed


def test_no_first_token_at_all_is_said() -> None:
    with pytest.raises(TrialError, match=r"no request got a first token at load 1\.3"):
        trials(Run(ttft_s=None))(Weighted(), cell(load=1.3))


def test_times_of_zero_cannot_be_compared() -> None:
    with pytest.raises(TrialError, match="took no time"):
        trials(Run(ttft_s=0.0))(Weighted(), cell())
