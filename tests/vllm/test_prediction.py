"""Predictions to the page on real engines whose caches overflow, are reset, and die."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import pytest_asyncio
from msgspec import Struct

from prompt.codec import load_codec
from support.conversation import sdk
from support.engine_load import Players, Turn, in_turns, make_talks
from support.misprediction import Examiner, Miss
from support.vllm import MODEL, PAGE_TOKENS
from support.vllm_stand import MARKS, OUTPUT_TOKENS, PAGES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.engine_load import Talk
    from support.engine_process import Engine
    from support.vllm_stand import Stand

pytestmark = MARKS

TALKS: Final = 125
"""All together they come to more than twice what both caches hold."""
TURNS: Final = 8
QUESTION_WORDS: Final = (90, 160)
AT_ONCE: Final = 4
PHASES: Final = (
    ("full caches", 450, AT_ONCE),
    ("reset of a busy engine", 100, AT_ONCE),
    ("reset of an idle engine", 100, AT_ONCE),
    ("death of an engine", 100, AT_ONCE),
    ("one engine", 50, AT_ONCE),
    ("both again", 140, AT_ONCE),
    ("one at a time", 60, 1),
)
"""Name, turns, and turns at once."""
STEP_S: Final = 0.5
"""How far into its phase an engine is reset or dies."""


class Run(Struct, frozen=True, kw_only=True):
    """What happened, and when: seconds since the epoch."""

    turns: Sequence[Turn]
    examiner: Examiner
    misses: Sequence[Miss]
    began_s: dict[str, float]
    struck_s: float
    lives: dict[str, int]
    """The engine processes that each log saw before the run."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def run(stand: Stand) -> AsyncIterator[Run]:
    """1,000 turns of 125 conversations, 4 at once; two resets and a death on the way."""
    struck, emptied = stand.engines.engines
    lives = {name: max(1, log.lives) for name, log in stand.logs.items()}
    order = in_turns(make_talks(TALKS, TURNS, QUESTION_WORDS, seed=1), active=TALKS, seed=2)
    began_s: dict[str, float] = {}
    async with sdk(stand.fleet.router.url) as client:
        players = Players(client, MODEL, at_once=AT_ONCE, output_tokens=OUTPUT_TOKENS)
        for phase, count, players.at_once in PHASES:
            turns: list[Talk] = order[:count]
            order = order[count:]
            began_s[phase] = time.time()
            if phase == "reset of an idle engine":
                await stand.engines.reset(struck)
            elif phase == "both again":
                await stand.ready()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(players.play(phase, turns))
                if phase == "reset of a busy engine":
                    await asyncio.sleep(STEP_S)
                    await stand.engines.reset(emptied)
                elif phase == "death of an engine":
                    await asyncio.sleep(STEP_S)
                    struck_s = time.time()
                    await stand.strike(struck)
                    stand.engines.start(struck)
                    tasks.create_task(stand.engines.ready(struck))
    records = {
        turn.answered.request_id: await stand.fleet.decision(turn.answered.request_id)
        for turn in players.turns
    }
    examiner = Examiner(players.turns, load_codec(stand.model), records, stand.logs)
    misses = list(examiner.misses())
    run = Run(
        turns=players.turns,
        examiner=examiner,
        misses=misses,
        began_s=began_s,
        struck_s=struck_s,
        lives=lives,
    )
    print("\n".join(report(run, stand)))  # noqa: T201 - the result, shown with -rP
    yield run


def report(run: Run, stand: Stand) -> list[str]:
    """Return how right the predictions were, and why each wrong one was."""
    lines = []
    for phase, *_ in PHASES:
        those = [turn for turn in run.turns if turn.phase == phase]
        right = sum(turn.is_right(PAGE_TOKENS) for turn in those)
        later = [turn for turn in those if turn.known_tokens]
        cut = sum(turn.is_cut(PAGE_TOKENS) for turn in later)
        warm = warm_share(run, later)
        lines.append(
            f"{phase}: {right} of {len(those)} right; {cut} of {len(later)} later turns had lost "
            f"pages; {warm.there} of {warm.turns} to the warm engine, {warm.there_free} of "
            f"{warm.free} where its queue was not the longer one; "
            f"{sum(turn.tries - 1 for turn in those)} tries again; "
            f"evicted: {evicted(run, stand, phase)}"
        )
    return lines + [str(miss) for miss in run.misses]


class WarmShare(Struct, frozen=True, kw_only=True):
    """Turns for which one engine was warm; ``free``: nor had it the longer queue.

    ``there`` and ``there_free`` are those of them that it answered.
    """

    turns: int
    there: int
    free: int
    there_free: int


def warm_share(run: Run, turns: Sequence[Turn]) -> WarmShare:
    """Count how many of ``turns`` the warm engine answered."""
    warm = [(turn, name) for turn in turns if (name := run.examiner.warm(turn)) is not None]
    free = [(turn, name) for turn, name in warm if run.examiner.is_free(turn, name)]
    return WarmShare(
        turns=len(warm),
        there=sum(turn.answered.replica == name for turn, name in warm),
        free=len(free),
        there_free=sum(turn.answered.replica == name for turn, name in free),
    )


def evicted(run: Run, stand: Stand, phase: str) -> dict[str, int]:
    """Return the pages that each engine said it removed in a phase."""
    times_s = [*run.began_s.values(), float("inf")]
    bounds = dict(zip(run.began_s, pairwise(times_s), strict=True))
    begin_s, end_s = bounds[phase]
    return {
        name: sum(begin_s <= told_s < end_s for told_s in log.evictions)
        for name, log in stand.logs.items()
    }


async def test_predictions_are_right_to_the_page(run: Run) -> None:
    assert len(run.turns) == TALKS * TURNS
    right = sum(turn.is_right(PAGE_TOKENS) for turn in run.turns)
    assert right >= 0.99 * len(run.turns), "\n".join(map(str, run.misses))
    assert right + len(run.misses) == len(run.turns)


async def test_every_prompt_had_as_many_tokens_as_counted(run: Run, stand: Stand) -> None:
    ids = [turn.answered.request_id for turn in run.turns]
    done = [await stand.fleet.decision(request_id) for request_id in ids]
    assert all(record["is_exact"] for record in done)
    ended = [record for record in done if record["outcome"] == "done"]
    assert len(ended) > 0.9 * len(done)  # the SDK leaves at [DONE], perhaps before the body's end
    assert all(record["reported_prompt_tokens"] == record["prompt_tokens"] for record in ended)


async def test_both_engines_evicted_in_every_phase_that_they_were_up(
    run: Run, stand: Stand
) -> None:
    """By the engines' own events, and by what they had to compute."""
    struck, emptied = stand.engines.engines
    for phase in ("full caches", "death of an engine", "one engine", "both again"):
        assert evicted(run, stand, phase)[emptied.name] > 0, phase
    for phase in ("full caches", "both again"):
        assert evicted(run, stand, phase)[struck.name] > 0, phase
    for name, log in stand.logs.items():
        assert sum(told_s > run.began_s["full caches"] for told_s in log.evictions) > PAGES, name
    later = [turn for turn in run.turns if turn.known_tokens]
    assert sum(turn.is_cut(PAGE_TOKENS) for turn in later) > 0.05 * len(later)
    assert sum(not turn.is_cut(PAGE_TOKENS) for turn in later) > 0.2 * len(later)


async def test_an_engine_was_reset_and_the_other_died_while_turns_were_asked(
    run: Run, stand: Stand
) -> None:
    struck, emptied = stand.engines.engines
    busy, idle = "reset of a busy engine", "reset of an idle engine"
    assert_amid(run, cleared_s(run, stand, emptied, busy), busy)
    last_s = max(decisions_s(run, idle))
    assert cleared_s(run, stand, struck, idle) < last_s  # vLLM tells late, the worker at once
    assert struck.lives == 2
    assert stand.logs[struck.name].lives == run.lives[struck.name] + 1
    assert stand.logs[emptied.name].lives == run.lives[emptied.name]
    assert_amid(run, run.struck_s, "death of an engine")
    answered = {turn.answered.replica for turn in run.turns if turn.phase == "one engine"}
    assert answered <= {engine.name for engine in stand.engines.engines}
    last = {turn.answered.replica for turn in run.turns if turn.phase == "both again"}
    assert last == {engine.name for engine in stand.engines.engines}


def cleared_s(run: Run, stand: Stand, engine: Engine, phase: str) -> float:
    """Return when the engine said in ``phase``, once, that it holds nothing any more."""
    begin_s = run.began_s[phase]
    names = list(run.began_s)
    end_s = run.began_s[names[names.index(phase) + 1]]
    cleared = [told_s for told_s in stand.logs[engine.name].clears if begin_s < told_s < end_s]
    assert len(cleared) == 1, (phase, cleared)
    return cleared[0]


def decisions_s(run: Run, phase: str) -> list[float]:
    """Return when the turns of ``phase`` came in."""
    return [run.examiner.decided_s(turn) for turn in run.turns if turn.phase == phase]


def assert_amid(run: Run, moment_s: float, phase: str) -> None:
    """Assert that turns of ``phase`` came in before and after."""
    decided_s = decisions_s(run, phase)
    assert min(decided_s) < moment_s < max(decided_s), phase


async def test_later_turns_go_to_the_warm_engine(run: Run) -> None:
    """The one that held clearly more of the prompt; with 4 turns at once its queue counts too."""
    later = [turn for turn in run.turns if turn.known_tokens]
    share = warm_share(run, later)
    assert share.free > 0.2 * len(later)
    assert share.there_free >= 0.98 * share.free, share
    assert share.there >= 0.4 * share.turns, share
    calm = warm_share(run, [turn for turn in later if turn.phase == "one at a time"])
    assert calm.turns > 10
    assert calm.there_free >= 0.95 * calm.free, calm
    assert calm.free >= 0.85 * calm.turns, calm  # of a fast engine, the last turn may still count
