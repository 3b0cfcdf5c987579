"""Engines that are broken on purpose behind a real router: found, avoided, repaired, trusted."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple, Self

import msgspec
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from router.diagnosis import Diagnosis, DiagnosisReport, Kind
from router.trust import TrustReport, TrustRow
from support.fleet import FleetPlan, LocalFleet, until
from support.reporting_engine import BLOCK_TOKENS, PAGE_TOKENS, ReportingEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from warmroute.local import Child

MODEL = "tiny"
LENGTHS = (336, 656, 1_296, 464, 976, 592)
NEWS_S = 0.7
"""After so long a placement no longer counts."""
MOST_REQUESTS = 150
"""To find a fault, or to trust again."""
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="fleet")
async def router_alone(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    """Serve without engines: each test brings its own."""
    plan = FleetPlan(
        replicas=0, config={"receipts": True, "seed": 3, "health": {"interval_s": 0.1}}
    )
    async with LocalFleet(tmp_path_factory.mktemp("loop"), plan) as running:
        yield running


class Asked(NamedTuple):
    """One request: who served it, and its cached tokens, as predicted and as reported."""

    tokens: list[int]
    replica: str
    predicted: int
    reported: int


class Stand:
    """Two engines with sidecars; ``sick`` is the one that a test breaks."""

    names = itertools.count()

    def __init__(self, fleet: LocalFleet) -> None:
        self.fleet = fleet
        number = next(self.names)
        self.engines = {f"sick{number}": ReportingEngine(), f"well{number}": ReportingEngine()}
        self.sick_name, self.well_name = self.engines
        self.sick, self.well = self.engines.values()
        self._talks = self._prompts(number)
        self._stack = AsyncExitStack()
        self._sidecars: list[Child] = []
        self.asked: list[Asked] = []

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for engine in self.engines.values():
                await stack.enter_async_context(engine)
            stack.push_async_callback(self._stop_sidecars)
            for name, engine in self.engines.items():
                self._sidecars.append(self.fleet.start_sidecar(name, engine.url))
            for sidecar in self._sidecars:
                await sidecar.ready()
            await self.fleet.all_up(self.fleet.router, 2)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _stop_sidecars(self) -> None:
        for sidecar in self._sidecars:
            sidecar.process.terminate()
        for sidecar in self._sidecars:
            await asyncio.to_thread(self.fleet.processes.stop, sidecar)
        await self.fleet.all_up(self.fleet.router, 0)

    @staticmethod
    def _prompts(seed: int) -> Iterator[list[int]]:
        rng = random.Random(seed)
        for length in itertools.cycle(LENGTHS):
            yield [rng.randrange(1_000, 30_000) for _ in range(length)]

    async def ask(self, tokens: list[int]) -> Asked:
        """Send one request."""
        body = {"model": MODEL, "prompt": tokens, "max_tokens": 1}
        url = f"{self.fleet.router.url}/v1/completions"
        async with self.fleet.http.post(url, json=body) as answer:
            assert answer.status == 200, await answer.text()
            usage = msgspec.json.decode(await answer.read())["usage"]
            asked = Asked(
                tokens,
                answer.headers["x-warmroute-replica"],
                int(answer.headers["x-warmroute-predicted-cached-tokens"]),
                usage["prompt_tokens_details"]["cached_tokens"],
            )
        self.asked.append(asked)
        return asked

    async def news(self) -> None:
        """Wait until the router knows what the engines told, and counts no placement any more."""

        async def is_known() -> bool:
            seen = await self.fleet.seen()
            return all(
                seen[name]["resident_blocks"] >= engine.told_blocks
                for name, engine in self.engines.items()
                if engine.has_told_all
            )

        await until(is_known, "what the engines told")
        await asyncio.sleep(NEWS_S)

    def proved_blocks(self, replica: str) -> int:
        """Return how many blocks its reports proved so far, where events told of none."""
        ends = {
            tuple(one.tokens[:end])
            for one in self.asked
            if one.replica == replica
            for end in range(BLOCK_TOKENS, one.reported + 1, BLOCK_TOKENS)
        }
        return len(ends)

    async def talk(self, count: int = 12) -> list[Asked]:
        """Have new talks of two turns, all first ones first; return what the second ones gave."""
        firsts = [next(self._talks) for _ in range(count)]
        for tokens in firsts:
            await self.ask(tokens)
        await self.news()
        return [await self.ask([*tokens, *tokens[:100]]) for tokens in firsts]

    async def diagnoses(self) -> list[Diagnosis]:
        report = await self.report()
        return [one for one in report.active if one.replica in self.engines]

    async def report(self) -> DiagnosisReport:
        async with self.fleet.http.get(f"{self.fleet.router.admin_url}/admin/diagnoses") as answer:
            return msgspec.json.decode(await answer.read(), type=DiagnosisReport)

    async def trust(self) -> dict[str, TrustRow]:
        async with self.fleet.http.get(f"{self.fleet.router.admin_url}/admin/trust") as answer:
            report = msgspec.json.decode(await answer.read(), type=TrustReport)
        return {row.replica: row for row in report.replicas if row.replica in self.engines}

    async def samples(self, name: str) -> dict[tuple[str, ...], float]:
        async with self.fleet.http.get(f"{self.fleet.router.url}/metrics") as answer:
            text = await answer.text()
        return {
            tuple(
                sample.labels[label] for label in sorted(sample.labels, reverse=True)
            ): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }

    async def talk_until(self, wanted: list[Kind]) -> list[Asked]:
        """Have talks until these are the diagnoses; return the last turns."""
        before, turns = len(self.asked), []
        while [one.kind for one in await self.diagnoses()] != wanted:
            assert len(self.asked) - before < MOST_REQUESTS, await self.trust()
            turns = await self.talk()
        return turns

    def lines(self) -> list[str]:
        """Return what the router logged of this test's diagnoses."""
        text = self.fleet.router.child.log.read_text()
        return [
            line
            for line in text.splitlines()
            if "diagnosis" in line and any(name in line for name in self.engines)
        ]


@pytest_asyncio.fixture(loop_scope="module")
async def stand(fleet: LocalFleet) -> AsyncIterator[Stand]:
    async with Stand(fleet) as running:
        yield running


async def warm_on_sick(stand: Stand) -> list[int]:
    """Return a long prompt that only the sick engine holds; it is not sick yet."""
    for turn in await stand.talk(6):
        assert turn.predicted > 0
        assert 0 <= turn.reported - turn.predicted <= BLOCK_TOKENS
    turns = await stand.talk(12)
    return next(t.tokens for t in turns if t.replica == stand.sick_name and len(t.tokens) > 900)


def break_engine(engine: ReportingEngine, kind: Kind) -> None:
    if kind is Kind.NO_HITS:
        engine.counted = lambda _: 0
    elif kind is Kind.PROMPT_MISMATCH:
        engine.template = [1, 2, 3, 4, 5, 6, 7]
    elif kind is Kind.CONSTANT_RATIO:
        engine.counted = lambda cached_tokens: cached_tokens // PAGE_TOKENS
    else:
        engine.is_heard = False


def repair(engine: ReportingEngine) -> None:
    engine.template, engine.is_heard = [], True
    engine.counted = lambda cached_tokens: cached_tokens


@pytest.mark.parametrize("kind", [Kind.NO_HITS, Kind.CONSTANT_RATIO])
async def test_an_engine_whose_hits_fail_is_found_avoided_and_trusted_again(
    stand: Stand, kind: Kind
) -> None:
    """A77, B14, R-25: events of another engine than that which answers; pages for tokens."""
    prompt = await warm_on_sick(stand)
    assert {(await stand.ask(prompt)).replica for _ in range(3)} == {stand.sick_name}
    break_engine(stand.sick, kind)
    await stand.talk_until([kind])
    [found] = await stand.diagnoses()
    assert (found.replica, found.model, found.times) == (stand.sick_name, MODEL, 1)
    trust = await stand.trust()
    assert trust[stand.sick_name].credit < 0.8
    assert trust[stand.well_name].credit == 1.0
    gauge = await stand.samples("warmroute_diagnosis")
    assert gauge[(stand.sick_name, kind.value)] == 1.0
    assert sum(gauge.values()) == 1.0

    for _ in range(MOST_REQUESTS):
        if (await stand.ask(prompt)).replica == stand.well_name:
            break
    await stand.news()
    assert {(await stand.ask(prompt)).replica for _ in range(4)} == {stand.well_name}
    record = (await stand.fleet.decisions(1))[0]["attempts"][-1]
    assert record["credits"][stand.sick_name] < 0.8

    repair(stand.sick)
    await stand.talk_until([])
    assert (await stand.trust())[stand.sick_name].credit == 1.0
    assert set((await stand.samples("warmroute_diagnosis")).values()) == {0.0}
    lines = stand.lines()
    assert len(lines) == 2, lines
    begins, ends = lines
    assert re.search(rf"diagnosis begins: replica={stand.sick_name} .*kind={kind.value}", begins)
    assert re.search(rf"diagnosis ends: replica={stand.sick_name} .*kind={kind.value}", ends)
    assert (await stand.report()).ended[0].replica == stand.sick_name


async def test_another_chat_template_is_named_and_costs_no_credit_elsewhere(stand: Stand) -> None:
    """B42: seven tokens before each prompt that the router does not know of."""
    break_engine(stand.sick, Kind.PROMPT_MISMATCH)
    await stand.talk_until([Kind.PROMPT_MISMATCH])
    [found] = await stand.diagnoses()
    assert found.replica == stand.sick_name
    assert "tokenizer" in found.advice
    assert (await stand.trust())[stand.well_name].credit == 1.0
    repair(stand.sick)
    await stand.talk_until([])
    assert len(stand.lines()) == 2


async def test_events_that_are_cut_are_noticed_and_reports_fill_in(stand: Stand) -> None:
    """B06: what the engine holds and did not tell is learned from what it reports."""
    break_engine(stand.sick, Kind.MISSING_EVENTS)
    turns = await stand.talk_until([Kind.MISSING_EVENTS])
    [found] = await stand.diagnoses()
    assert found.replica == stand.sick_name
    assert (await stand.trust())[stand.sick_name].credit == 1.0
    proved_blocks = stand.proved_blocks(stand.sick_name)
    assert proved_blocks > 0

    async def is_learned() -> bool:
        learned = await stand.samples("warmroute_learned_blocks")
        assert learned[(stand.well_name,)] == 0
        return learned[(stand.sick_name,)] == proved_blocks

    await until(is_learned, "what was proved counts")
    await stand.news()
    proved = [one for one in turns if one.replica == stand.sick_name]
    assert all(one.reported > one.predicted for one in proved)
    again = await stand.ask(proved[-1].tokens)
    assert again.replica == stand.sick_name
    assert again.predicted > proved[-1].predicted
    assert again.predicted == proved[-1].reported // BLOCK_TOKENS * BLOCK_TOKENS

    repair(stand.sick)
    await stand.talk_until([])
    assert len(stand.lines()) == 2
