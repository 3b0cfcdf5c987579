"""Held-out runs: mixed requests that arrive at random, measured and predicted.

The prediction replays the arrivals as they were on a virtual engine with the fitted step model.
"""

from __future__ import annotations

import asyncio
import math
import random
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta, Struct, structs

from policies.round_robin import RoundRobin
from replay.probe import ASSUMED_PAGE_TOKENS, alone_row, draw_tokens, salted
from replay.setting import FleetSettings
from replay.simulate import simulate
from replay.trace import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replay.fit import StepFit
    from replay.probe import Answer, Ask, EngineFacts

UTILIZATION: Final = 0.6
"""Of the engine, if it took one request after another."""
REQUESTS: Final = (10, 60)
"""A run has so many, if they can be had in its time."""
SPREAD: Final = 8
"""The longest prompt and answer of a run over the shortest ones."""
MEAN: Final = 0.42
"""Of the longest one: what lengths come to with this spread."""
LEAST_MS: Final = 1.0
LEAST_PROMPT: Final = 24
LEAST_OUTPUT: Final = 4
MOST_OUTPUT: Final = 128
LONGEST_PART: Final = 3
"""The longest prompt of the probes over that of a run."""


class RunSettings(Struct, frozen=True, kw_only=True):
    """``seconds`` of all ``runs`` together, about; ``salt`` as for probes."""

    runs: Annotated[int, Meta(ge=1)] = 5
    seconds: Annotated[float, Meta(gt=0)] = 30.0
    seed: int = 1
    salt: int = 0


class Arrival(Struct, frozen=True, kw_only=True):
    """One request of a run: when it is to be asked, and how much."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


class HeldOut(Struct, frozen=True, kw_only=True):
    """One run: the means of its requests. Errors are relative to what was measured."""

    requests: int
    ttft_ms: float
    predicted_ttft_ms: float
    tpot_ms: float
    predicted_tpot_ms: float

    @property
    def ttft_error(self) -> float:
        """Return by how much the first tokens were predicted too late, as a part."""
        return self.predicted_ttft_ms / self.ttft_ms - 1

    @property
    def tpot_error(self) -> float:
        """Return by how much the other tokens were predicted too slow, as a part."""
        return self.predicted_tpot_ms / self.tpot_ms - 1


def median_errors(runs: Sequence[HeldOut]) -> tuple[float, float]:
    """Return the medians of the absolute errors of first tokens and of the others."""
    ttft = median(abs(run.ttft_error) for run in runs)
    return ttft, median(abs(run.tpot_error) for run in runs)


def draw_run(
    rng: random.Random, fit: StepFit, facts: EngineFacts, longest_tokens: int, run_s: float
) -> tuple[Arrival, ...]:
    """Return Poisson arrivals for about ``run_s``, prompts up to a part of ``longest_tokens``.

    Where too few requests fit, prompts or answers get shorter, whichever take longer.
    """
    prompt = max(LEAST_PROMPT, min(longest_tokens // LONGEST_PART, facts.context_tokens // 2))
    output = max(LEAST_OUTPUT, min(MOST_OUTPUT, facts.context_tokens // 4))
    fewest, most = REQUESTS
    while True:
        mean_prompt, mean_output = (round(MEAN * longest) for longest in (prompt, output))
        prefill_ms = fit.predicted_ms(alone_row(mean_prompt, 1, facts.step_tokens))
        mean_ms = fit.predicted_ms(alone_row(mean_prompt, mean_output, facts.step_tokens))
        mean_ms = max(mean_ms, LEAST_MS)
        count = int(1e3 * run_s * UTILIZATION / mean_ms)
        if count >= fewest or (prompt == LEAST_PROMPT and output == LEAST_OUTPUT):
            break
        if output > LEAST_OUTPUT and (2 * prefill_ms < mean_ms or prompt == LEAST_PROMPT):
            output = max(LEAST_OUTPUT, output // 2)
        else:
            prompt = max(LEAST_PROMPT, prompt // 2)
    arrivals = []
    at_s = 0.0
    for _ in range(min(most, max(fewest, count))):
        arrivals.append(
            Arrival(
                at_s=at_s,
                prompt_tokens=_log_uniform(rng, prompt),
                output_tokens=max(2, _log_uniform(rng, output)),
            )
        )
        at_s += rng.expovariate(1e3 * UTILIZATION / mean_ms)
    return tuple(arrivals)


def _log_uniform(rng: random.Random, most: int) -> int:
    return max(1, round(most * math.exp(-rng.random() * math.log(SPREAD))))


async def measure_run(
    ask: Ask, clock: Callable[[], float], arrivals: Sequence[Arrival], rng: random.Random
) -> list[Answer]:
    """Ask all requests in time, whatever became of those before; raises what ``ask`` does."""
    prompts = [draw_tokens(rng, arrival.prompt_tokens) for arrival in arrivals]
    began_s = clock()

    async def ask_one(arrival: Arrival, prompt: Sequence[int]) -> Answer:
        await asyncio.sleep(max(0.0, began_s + arrival.at_s - clock()))
        return await ask(prompt, arrival.output_tokens)

    return await asyncio.gather(*map(ask_one, arrivals, prompts))


def compare_run(
    fit: StepFit, facts: EngineFacts, arrivals: Sequence[Arrival], answers: Sequence[Answer]
) -> HeldOut:
    """Return what was measured and what the model says of the same requests."""
    first_s = min(answer.sent_s for answer in answers)
    order = sorted(range(len(answers)), key=lambda index: answers[index].sent_s)
    requests = [
        TraceRequest(
            arrival_s=answers[index].sent_s - first_s,
            prompt_tokens=arrivals[index].prompt_tokens,
            output_tokens=arrivals[index].output_tokens,
            chain=(),
            line=index,
        )
        for index in order
    ]
    run = simulate(requests, _page_tokens(facts), RoundRobin(), _virtual(fit, facts))
    ttfts_s = [outcome.ttft_s for outcome in run.outcomes if outcome.ttft_s is not None]
    predicted_s = [outcome.tpot_s for outcome in run.outcomes if outcome.tpot_s is not None]
    overheads_ms = [fit.request_ms(arrival.prompt_tokens) for arrival in arrivals]
    tpots_s = [answer.tpot_s for answer in answers if answer.tpot_s is not None]
    return HeldOut(
        requests=len(answers),
        ttft_ms=1e3 * fmean(answer.ttft_s for answer in answers),
        predicted_ttft_ms=1e3 * fmean(ttfts_s) + fmean(overheads_ms),
        tpot_ms=1e3 * fmean(tpots_s),
        predicted_tpot_ms=1e3 * fmean(predicted_s),
    )


def _page_tokens(facts: EngineFacts) -> int:
    return facts.page_tokens or ASSUMED_PAGE_TOKENS


def _virtual(fit: StepFit, facts: EngineFacts) -> FleetSettings:
    """Return one engine like the measured one."""
    virtual = FleetSettings(
        replicas=1,
        cost=fit.cost,
        step_tokens=facts.step_tokens,
        max_sequences=facts.max_sequences,
        hot=None,
    )
    if facts.capacity_tokens is None:
        return virtual
    return structs.replace(virtual, capacity_tokens=facts.capacity_tokens)


async def hold_out(
    ask: Ask,
    clock: Callable[[], float],
    fit: StepFit,
    facts: EngineFacts,
    longest_tokens: int,
    settings: RunSettings,
) -> list[HeldOut]:
    """Measure and predict all runs, one after another."""
    rng = random.Random(settings.seed)  # noqa: S311 - reproducible, not secret
    tokens = salted(settings.seed, settings.salt)
    runs = []
    for _ in range(settings.runs):
        arrivals = draw_run(rng, fit, facts, longest_tokens, settings.seconds / settings.runs)
        answers = await measure_run(ask, clock, arrivals, tokens)
        runs.append(compare_run(fit, facts, arrivals, answers))
    return runs
