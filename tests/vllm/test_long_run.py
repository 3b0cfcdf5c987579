"""Two real engines under real text for a long time: restarts, resets and salts at random.

``make test-vllm-long WARMROUTE_VLLM=/path/to/vllm``; ``WARMROUTE_LONG_MINUTES`` is 20 by default.
``WARMROUTE_LONG_ENGINES=worker`` takes the bundled worker instead, on the same model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio
from msgspec import Struct

from prompt.codec import load_codec
from support.conversation import sdk
from support.engine_load import REST, Players, Turn
from support.misprediction import Examiner, Miss
from support.real_talk import real_talks
from support.vllm import CONTEXT_TOKENS, MODEL, PAGE_TOKENS, vllm_command, write_text_model
from support.vllm_stand import open_stand
from support.worker_engine import worker_command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from support.engine_load import Talk
    from support.engine_process import Engine
    from support.vllm_stand import Stand

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.data,
    pytest.mark.timeout(0),
    pytest.mark.asyncio(loop_scope="session"),
]

MINUTES: Final = float(os.environ.get("WARMROUTE_LONG_MINUTES", "20"))
ENGINES: Final = os.environ.get("WARMROUTE_LONG_ENGINES", "vllm")
PAGES: Final = 640
"""Per engine: some twenty conversations."""
TALKS: Final = 48
"""That are told by turns; together they come to more than both caches hold."""
AT_ONCE: Final = 3
OUTPUT_TOKENS: Final = 12
MOST_PROMPT_TOKENS: Final = CONTEXT_TOKENS - OUTPUT_TOKENS - 1
RESET_EACH_S: Final = (8.0, 30.0)
RESTART_EACH: Final = 3
"""Every so many of what is done is a restart, the others are resets."""
RIGHT: Final = 0.99


class Done(Struct, frozen=True, kw_only=True):
    """What was done to which engine, and when: seconds since the epoch."""

    deed: str
    engine: str
    at_s: float


class Run(Struct, frozen=True, kw_only=True):
    """The turns, what went wrong, and what was done meanwhile."""

    turns: list[Turn]
    misses: list[Miss]
    records: dict[str, dict[str, Any]]
    deeds: list[Done]


class Audience:
    """Keeps ``TALKS`` conversations going, and gives out one that has rested."""

    def __init__(self, talks: Iterator[Talk], seed: int) -> None:
        self._talks = talks
        self._rng = random.Random(seed)
        self._active = [next(talks) for _ in range(TALKS)]
        self._recent: deque[Talk] = deque(maxlen=REST)

    def next(self) -> Talk:
        """Return whose turn it is."""
        for index, talk in enumerate(self._active):
            if not talk.questions:
                self._active[index] = next(self._talks)
        rested = [talk for talk in self._active if talk not in self._recent and not talk.is_busy]
        talk = self._rng.choice(rested)
        self._recent.append(talk)
        return talk


async def meddle(stand: Stand, deadline_s: float, deeds: list[Done]) -> None:
    """Reset and kill engines at random until the time is up; one of them is always there."""
    rng = random.Random(7)
    for number in range(1, 1_000_000):
        await asyncio.sleep(rng.uniform(*RESET_EACH_S))
        if time.monotonic() > deadline_s:
            return
        engine = rng.choice(stand.engines.engines)
        deed = "restart" if number % RESTART_EACH == 0 else "reset"
        deeds.append(Done(deed=deed, engine=engine.name, at_s=time.time()))
        if deed == "reset":
            with contextlib.suppress(TimeoutError):  # it was never idle for a moment
                await stand.engines.reset(engine)
            continue
        await restarted(stand, engine)


async def restarted(stand: Stand, engine: Engine) -> None:
    await stand.strike(engine)
    stand.engines.start(engine)
    await stand.engines.ready(engine)
    await stand.ready()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def run(tmp_path_factory: pytest.TempPathFactory, vllm: Path) -> AsyncIterator[Run]:
    folder = tmp_path_factory.mktemp("long")
    model = write_text_model("tiny-chat", folder / "model", vllm)
    codec = load_codec(model)
    audience = Audience(real_talks(codec, MOST_PROMPT_TOKENS, seed=1), seed=2)
    records: dict[str, dict[str, Any]] = {}
    deeds: list[Done] = []
    if ENGINES == "worker":
        command = worker_command(model, PAGES)
    else:
        command = vllm_command(vllm, model, PAGES)
    async with (
        open_stand(folder, command, model) as stand,
        sdk(stand.fleet.router.url) as client,
    ):
        players = Players(client, MODEL, at_once=AT_ONCE, output_tokens=OUTPUT_TOKENS)
        deadline_s = time.monotonic() + 60 * MINUTES

        async def listen() -> None:
            while time.monotonic() < deadline_s:
                turn = await players.turn("all", audience.next())
                name = turn.answered.request_id
                records[name] = await stand.fleet.decision(name)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(meddle(stand, deadline_s, deeds))
            for _ in range(AT_ONCE):
                tasks.create_task(listen())
        misses = list(Examiner(players.turns, codec, records, stand.logs).misses())
        run = Run(turns=players.turns, misses=misses, records=records, deeds=deeds)
        print("\n".join(report(run, stand)))  # noqa: T201 - the result, shown with -rP
        yield run


def report(run: Run, stand: Stand) -> list[str]:
    """Return the figures, and each wrong prediction with its cause."""
    right = len(run.turns) - len(run.misses)
    salts = Counter(turn.salt or "none" for turn in run.turns)
    deeds = Counter(f"{done.deed} of {done.engine}" for done in run.deeds)
    tokens = sum(turn.answered.prompt_tokens for turn in run.turns)
    cached = sum(turn.answered.cached_tokens for turn in run.turns)
    evicted = {name: len(log.evictions) for name, log in stand.logs.items()}
    return [
        f"{MINUTES:g} minutes: {right} of {len(run.turns)} right ({right / len(run.turns):.2%})",
        f"cached: {cached} of {tokens} prompt tokens; evicted pages: {evicted}",
        f"salts: {dict(salts)}; done: {dict(deeds)}",
        f"causes: {dict(Counter(miss.cause.value for miss in run.misses))}",
        *map(str, run.misses),
    ]


async def test_predictions_are_right_to_the_page_whatever_happens(run: Run) -> None:
    right = sum(turn.is_right(PAGE_TOKENS) for turn in run.turns)
    assert right + len(run.misses) == len(run.turns)
    assert right >= RIGHT * len(run.turns), "\n".join(map(str, run.misses))


async def test_all_that_was_to_happen_did(run: Run) -> None:
    assert {done.deed for done in run.deeds} == {"reset", "restart"}
    assert {turn.answered.replica for turn in run.turns} == {"v0", "v1"}
    assert all(record["is_exact"] for record in run.records.values())
    for salt in (None, "blue", "green"):
        assert any(turn.salt == salt and turn.answered.cached_tokens for turn in run.turns)
    later = [turn for turn in run.turns if turn.known_tokens]
    assert len(later) > len(run.turns) // 4
    assert sum(turn.is_cut(PAGE_TOKENS) for turn in later) > 0.02 * len(later)
