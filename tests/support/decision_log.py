"""A trace in virtual time through the router's own chooser, as a log of its decisions.

``python decision_log.py TRACE POLICY SEED`` prints the log of a Mooncake trace (JSON lines with
``timestamp`` in ms, ``input_length``, ``output_length`` and ``hash_ids``); policy as JSON. Nothing
here reads a clock, and replicas announce what they hold as their sidecars would.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from policies.hot import HeatMap, HotSettings
from policies.union import AnyPolicy
from prompt.model import PromptTokens, ReadPrompt
from router.chooser import Chooser, Knowledge
from router.fleet import Member
from router.upstream import Endpoint
from state.lease import LeaseBook, Outcome
from state.memory import MemoryState
from state.model import (
    ChangeBatch,
    Generation,
    ModelIdentity,
    ReplicaId,
    ReplicaLoad,
    ReplicaRecord,
    RouterId,
)
from state.placement import Placements
from state.prefix import chain_of, chain_root, namespace_of, pack_tokens
from state.secret import ChainKeys

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router.chooser import Choice

BLOCK_TOKENS: Final = 64
CHAIN_SEED: Final = 3
REPLICAS: Final = 6
PREFILL_TOKENS_PER_S: Final = 4_000.0
IDENTITY: Final = ModelIdentity(model="m", block_tokens=BLOCK_TOKENS)
ROOT: Final = chain_root(IDENTITY, CHAIN_SEED)


class Line(Struct, frozen=True):
    """One request of a trace."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]

    def packed(self) -> bytes:
        """Return a prompt of which equal ids make equal blocks."""
        tokens = [
            number * BLOCK_TOKENS + i for number in self.hash_ids for i in range(BLOCK_TOKENS)
        ]
        return pack_tokens(tokens[: self.input_length])


def write_trace(path: Path, requests: int, seed: int) -> None:
    """Write a trace of conversations that grow and share their system prompts."""
    rng = random.Random(seed)
    sessions = [[number % 4, 100 + number] for number in range(30)]
    fresh = 1_000
    now_ms = 0
    lines = []
    for _ in range(requests):
        now_ms += round(rng.expovariate(1 / 40))
        ids = rng.choice(sessions)
        ids.append(fresh)
        fresh += 1
        tokens = len(ids) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS)
        lines.append(Line(now_ms, tokens, rng.randrange(1, 300), list(ids)))
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")


class Replay:
    """The chooser, a memory of what replicas hold, and virtual time."""

    def __init__(self, policy: AnyPolicy, seed: int) -> None:
        self.now_s = 0.0
        self.state = MemoryState(clock=lambda: self.now_s)
        know = Knowledge(
            reader=self.state.reader(RouterId("replay")),
            leases=LeaseBook(),
            pending=Placements(2.0),
            guessed=Placements(600.0),
            heat=HeatMap(HotSettings()),
        )
        self.chooser = Chooser(
            know, policy, keys=ChainKeys(CHAIN_SEED), seed=seed, clock=lambda: self.now_s
        )
        self.members: list[Member] = []
        self._begun = 0
        self._ends: list[tuple[float, int, Choice, bytes]] = []

    async def add(self, number: int) -> None:
        """Let one replica register, idle and cold."""
        name = ReplicaId(f"r{number}")
        endpoint = Endpoint("127.0.0.1", 1 + number)
        record = ReplicaRecord(
            replica=name,
            endpoint=f"http://{endpoint.authority}",
            generation=Generation("g"),
            identity=IDENTITY,
            page_tokens=16,
            sidecar=f"s{number}",
        )
        await self.state.register(record)
        self.members.append(
            Member(
                replica=name,
                endpoint=endpoint,
                identity=IDENTITY,
                load=ReplicaLoad(running=0, queued=number % 2),
                is_registered=True,
                has_events=True,
                capacity_tokens=40_000,
            )
        )

    async def decide(self, line: Line) -> bytes:
        """Return the decision on one request, as JSON."""
        await self._pass_time(line.timestamp / 1000)
        packed = line.packed()
        prompt = ReadPrompt(
            model="m", is_stream=True, prompts=(PromptTokens(packed=packed, is_exact=True),)
        )
        choice = self.chooser.choose(self.chooser.route(prompt), self.members)
        assert choice is not None
        decision = choice.decision
        uncached = line.input_length - decision.predicted_cached_tokens
        end_s = self.now_s + uncached / PREFILL_TOKENS_PER_S + line.output_length * 0.01
        self._begun += 1
        heapq.heappush(self._ends, (end_s, self._begun, choice, packed))
        return msgspec.json.encode(decision)

    async def _pass_time(self, until_s: float) -> None:
        while self._ends and self._ends[0][0] <= until_s:
            self.now_s, sequence, choice, packed = heapq.heappop(self._ends)
            choice.first_byte(self.now_s)
            choice.finish(Outcome.DONE, had_first_byte=True, output_tokens=10)
            await self.state.apply(
                [
                    ChangeBatch(
                        replica=choice.member.replica,
                        generation=Generation("g"),
                        namespace=namespace_of(IDENTITY),
                        sequence=sequence,
                        stored=tuple(chain_of(ROOT, packed, BLOCK_TOKENS, CHAIN_SEED)),
                    )
                ]
            )
        self.now_s = until_s

    async def log(self, lines: Iterator[Line]) -> bytes:
        """Return the decisions on all requests, one a line."""
        for number in range(REPLICAS):
            await self.add(number)
        return b"\n".join([await self.decide(line) for line in lines]) + b"\n"


def main(trace: str, policy: str, seed: str) -> None:
    """Print the log of a trace."""
    lines = (msgspec.json.decode(line, type=Line) for line in Path(trace).read_bytes().splitlines())
    replay = Replay(msgspec.json.decode(policy, type=AnyPolicy), int(seed))
    sys.stdout.buffer.write(asyncio.run(replay.log(lines)))


if __name__ == "__main__":
    main(*sys.argv[1:])
