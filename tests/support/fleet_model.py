"""A small fleet in virtual time, for what policies do to balance and hits. No I/O, no sleeping.

A replica prefills first come first served at a fixed rate and decodes each request for a fixed
time beside it. A prompt counts as resident from its placement on: what is placed before is also
prefilled before. What the policy sees is what a router would show it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING

import xxhash

from policies.model import Reason, ReplicaView, RoutingRequest
from state.model import BlockId, ReplicaId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from policies.hot import HeatMap
    from policies.model import Decision, Policy

BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ModelPrompt:
    """A prompt as a router knows it: its chain and its length in tokens."""

    chain: tuple[BlockId, ...]
    prompt_tokens: int


@cache
def _run(parent: bytes, label: str, blocks: int) -> tuple[BlockId, ...]:
    ids = []
    for index in range(blocks):
        parent = xxhash.xxh3_128_digest(parent + f"{label}/{index}".encode())
        ids.append(BlockId(parent))
    return tuple(ids)


def model_prompt(*parts: tuple[str, int]) -> ModelPrompt:
    """Return a prompt of (label, tokens) parts: equal leading parts share their full blocks.

    A block over a boundary belongs to the later part, as it would with real tokens.
    """
    chain: tuple[BlockId, ...] = ()
    tokens = 0
    for label, part_tokens in parts:
        tokens += part_tokens
        blocks = tokens // BLOCK_TOKENS - len(chain)
        chain += _run(chain[-1] if chain else b"", label, blocks)
    return ModelPrompt(chain, tokens)


@dataclass(slots=True)
class ModelReplica:
    """One engine: an LRU of blocks, a prefill queue, and what is in flight."""

    name: ReplicaId
    capacity_blocks: int
    blocks: dict[BlockId, None] = field(default_factory=dict)
    inflight: int = 0
    prefill_free_s: float = 0.0
    recent: float = 0.0
    recent_at_s: float = 0.0

    def cached_tokens(self, prompt: ModelPrompt) -> int:
        """Return the tokens of ``prompt`` that need no computing here."""
        overlap = 0
        for block in prompt.chain:
            if block not in self.blocks:
                break
            overlap += 1
        return min(overlap * BLOCK_TOKENS, prompt.prompt_tokens - 1)

    def hold(self, prompt: ModelPrompt) -> None:
        """Make the prompt the newest content; the oldest blocks go. Tails go before their heads."""
        for block in reversed(prompt.chain):
            self.blocks.pop(block, None)
            self.blocks[block] = None
        while len(self.blocks) > self.capacity_blocks:
            del self.blocks[next(iter(self.blocks))]


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request."""

    replica: ReplicaId
    reason: Reason
    at_s: float
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    has_heat: bool


@dataclass(slots=True)
class FleetModel:
    """Replicas, a policy, and the requests served so far. ``now_s`` only moves forward."""

    policy: Policy
    replicas: list[ModelReplica]
    heat: HeatMap | None = None
    prefill_tokens_per_s: float = 8_000.0
    decode_s: float = 1.0
    recent_half_life_s: float = 10.0
    seed: int = 1
    now_s: float = 0.0
    served: list[Served] = field(default_factory=list)
    last_decision: Decision | None = None
    _events: list[tuple[float, int, Callable[[], object]]] = field(default_factory=list)
    _scheduled: int = 0

    def at(self, time_s: float, action: Callable[[], object]) -> None:
        """Do ``action`` at ``time_s``; what is due at one time happens in this order."""
        self._scheduled += 1
        heapq.heappush(self._events, (time_s, self._scheduled, action))

    def run(self, until_s: float = float("inf")) -> None:
        """Let time pass until nothing is left to happen by ``until_s``."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()

    def open_loop(self, prompts: Iterable[tuple[float, ModelPrompt]]) -> None:
        """Serve prompts that arrive at given times."""
        for time_s, prompt in prompts:
            self.at(time_s, partial(self.submit, prompt))
        self.run()

    def closed_loop(self, prompts: Iterable[ModelPrompt], clients: int) -> None:
        """Serve prompts, ``clients`` at once: each takes the next when its last is done."""
        waiting = iter(prompts)

        def take_next() -> None:
            prompt = next(waiting, None)
            if prompt is not None:
                self.submit(prompt, on_done=take_next)

        for _ in range(clients):
            self.at(self.now_s, take_next)
        self.run()

    def submit(self, prompt: ModelPrompt, on_done: Callable[[], None] | None = None) -> ReplicaId:
        """Route one prompt now and start it."""
        heat = None
        if self.heat is not None:
            names = [replica.name for replica in self.replicas]
            heat = self.heat.observe(prompt.chain, prompt.prompt_tokens, names, self.now_s).heat
        request = RoutingRequest(
            ordinal=len(self.served),
            seed=self.seed,
            prompt_tokens=prompt.prompt_tokens,
            heat=heat,
        )
        decision = self.policy.pick(request, self.snapshot(prompt))
        assert decision is not None
        self.last_decision = decision
        replica = next(r for r in self.replicas if r.name == decision.replica)
        first_byte_s = self._start(replica, prompt, decision.predicted_cached_tokens, on_done)
        self.served.append(
            Served(
                replica=replica.name,
                reason=decision.reason,
                at_s=self.now_s,
                ttft_s=first_byte_s - self.now_s,
                prompt_tokens=prompt.prompt_tokens,
                cached_tokens=decision.predicted_cached_tokens,
                has_heat=heat is not None,
            )
        )
        return replica.name

    def snapshot(self, prompt: ModelPrompt) -> tuple[ReplicaView, ...]:
        """Return what the policy would see of ``prompt`` now."""
        return tuple(
            ReplicaView(
                replica=replica.name,
                inflight=replica.inflight,
                queued=0,
                recent_assignments=self._recent(replica),
                cached_tokens=replica.cached_tokens(prompt),
            )
            for replica in self.replicas
        )

    def _recent(self, replica: ModelReplica) -> float:
        idle_s = self.now_s - replica.recent_at_s
        return replica.recent * float(0.5 ** (idle_s / self.recent_half_life_s))

    def _start(
        self,
        replica: ModelReplica,
        prompt: ModelPrompt,
        cached_tokens: int,
        on_done: Callable[[], None] | None,
    ) -> float:
        """Occupy the replica; return when the first byte comes."""
        replica.recent, replica.recent_at_s = self._recent(replica) + 1.0, self.now_s
        replica.inflight += 1
        replica.hold(prompt)
        prefill_s = (prompt.prompt_tokens - cached_tokens) / self.prefill_tokens_per_s
        first_byte_s = max(self.now_s, replica.prefill_free_s) + prefill_s
        replica.prefill_free_s = first_byte_s

        def done() -> None:
            replica.inflight -= 1
            if on_done is not None:
                on_done()

        self.at(first_byte_s + self.decode_s, done)
        return first_byte_s


def fleet_model(
    policy: Policy,
    replicas: int,
    *,
    heat: HeatMap | None = None,
    capacity_blocks: int = 10**9,
    decode_s: float = 1.0,
    seed: int = 1,
) -> FleetModel:
    """Return an idle, cold fleet of ``replicas``."""
    return FleetModel(
        policy=policy,
        replicas=[ModelReplica(ReplicaId(f"r{i:03}"), capacity_blocks) for i in range(replicas)],
        heat=heat,
        decode_s=decode_s,
        seed=seed,
    )


def counts(fleet: FleetModel, served: Sequence[Served] | None = None) -> list[int]:
    """Return how many requests each replica got, in fleet order."""
    got = Counter(one.replica for one in (fleet.served if served is None else served))
    return [got[replica.name] for replica in fleet.replicas]


def imbalance(fleet: FleetModel, served: Sequence[Served] | None = None) -> float:
    """Return the largest share of requests, as a multiple of the fair share."""
    got = counts(fleet, served)
    return max(got) * len(got) / sum(got)


def token_hit_ratio(served: Sequence[Served]) -> float:
    """Return the part of all prompt tokens that was cached."""
    return sum(one.cached_tokens for one in served) / sum(one.prompt_tokens for one in served)
