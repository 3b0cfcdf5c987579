"""Hot prefixes: which part of a prompt is so popular that several replicas should hold it.

Affinity sends equal prefixes to one replica. That is right until the prefix brings more traffic
than one replica should spend on it. Per prefix (a node of the sketch, see ``policies.sketch``):

    demand = rate_per_s * prefix_tokens / (prefill_tokens_per_s * share)      [replicas]
    wanted = clamp(max(ceil(demand), round(traffic_share * replicas)), 1, replicas)

``rate_per_s`` is the decayed arrival rate; ``prefix_tokens`` its length, so that rate x tokens is
the prefill work per second that the prefix would cost cold; ``share`` is the part of one replica's
prefill capacity that a single prefix may take. ``traffic_share`` is the prefix's part of all
arrivals: who brings a quarter of the traffic needs a quarter of the fleet, and a prefix that every
prompt has (a template's header) is held by everybody, so that it bends no decision.

Where the traffic forks: a node becomes a unit of its own only if the tokens between it and the hot
node above it have a demand above 1 by themselves. The deepest unit on a prompt's way is its heat.
Prefixes below ``min_prefix_tokens`` or ``min_arrivals`` are never hot.

Hysteresis: ``wanted`` grows at once. It shrinks only after it was too high by more than a quarter
(``SLACK``) for ``cool_down_s``, and then waits again.

Holders are the ``wanted`` replicas with the highest hash of (prefix, replica) (rendezvous): they
need no memory, are the same on every router, and a replica that comes or goes changes at most one.
Replicas outside that hold the prefix already keep their real advantage.
"""

from __future__ import annotations

from heapq import nlargest
from math import ceil, log
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import xxhash
from msgspec import Meta, Struct

from policies.model import Heat
from policies.sketch import PrefixSketch, SketchBounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from policies.sketch import PrefixNode
    from state.model import BlockId, ReplicaId

SLACK: Final = 0.75
"""A holder set is too large when this part of it would still do."""

FORGOTTEN_ARRIVALS: Final = 2.0
"""With fewer, this one included, what was before is forgotten, and so are the holders."""

POPULAR_S: Final = 30.0
"""Popularity is told as arrivals of so long."""

SHOWN_S: Final = 60.0
"""A prefix that nobody brought for so long is not shown among the hot ones."""

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Arrival(NamedTuple):
    """What an arrival showed: ``RoutingRequest.heat`` and ``RoutingRequest.popularity``.

    ``prefix`` is the id of the hot prefix, empty without one.
    """

    heat: Heat | None = None
    popularity: tuple[tuple[int, float], ...] = ()
    prefix: bytes = b""


class HotPrefix(NamedTuple):
    """One prefix that several replicas should hold, for people to look at."""

    prefix: bytes
    tokens: int
    rate_per_s: float
    holders: frozenset[ReplicaId]


class Step(NamedTuple):
    """One part of a prompt's way: the prefix of so many blocks, how often it comes, its holders.

    ``arrivals`` and ``rate_per_s`` are decayed to now; ``wanted_holders`` is 1 where it is not hot.
    """

    blocks: int
    arrivals: float
    rate_per_s: float
    wanted_holders: int


NO_HEAT: Final = Arrival()


class HotSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a prefix is hot, and how much is remembered to tell.

    ``burst_window_s``: the least time over which arrivals of a new prefix are averaged.
    ``max_nodes`` and ``max_blocks`` bound the memory: about 0.5 kB a node and 16 bytes a block.
    """

    half_life_s: Seconds = 30.0
    prefill_tokens_per_s: Annotated[float, Meta(gt=0)] = 8_000.0
    share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    min_prefix_tokens: Annotated[int, Meta(ge=1)] = 512
    min_arrivals: Annotated[float, Meta(gt=FORGOTTEN_ARRIVALS)] = 8.0
    burst_window_s: Seconds = 5.0
    cool_down_s: Seconds = 30.0
    max_nodes: Annotated[int, Meta(ge=64)] = 4_096
    max_blocks: Annotated[int, Meta(ge=4_096)] = 524_288


class _Traffic(Struct, frozen=True, kw_only=True):
    """What arrives at one prefix; ``own_tokens`` lie between it and the hot prefix above."""

    rate_per_s: float
    prefix_tokens: int
    own_tokens: int
    traffic_share: float


class HeatMap:
    """Tells the heat of each arriving prompt. Fed at the edge; costs a few us per request."""

    def __init__(self, settings: HotSettings) -> None:
        self._settings = settings
        self._sketch: PrefixSketch | None = None

    def adopt(self, settings: HotSettings) -> None:
        """Judge by other settings from now on; what was counted stays, and so do its bounds."""
        self._settings = settings

    def observe(
        self,
        chain: Sequence[BlockId],
        prompt_tokens: int,
        replicas: Sequence[ReplicaId],
        now_s: float,
        block_tokens: int = 64,
    ) -> Arrival:
        """Count one arrival; return the hot prefix it starts with, and how popular its parts are.

        ``replicas`` are those the prompt may go to. ``now_s`` may be of any clock that does not
        go back. ``block_tokens`` is the granularity of ``chain``.
        """
        if self._sketch is None:
            self._sketch = self._new_sketch(now_s)
        sketch, window_s = self._sketch, self._settings.burst_window_s
        if prompt_tokens < self._settings.min_prefix_tokens:
            sketch.count((), now_s)  # too short to be hot, but one more of all
            return NO_HEAT
        path = sketch.count(chain, now_s)
        if len(replicas) < 2:  # noqa: PLR2004 - one replica leaves nothing to spread over
            return NO_HEAT
        per_arrival = min(1.0, POPULAR_S * log(2) / self._settings.half_life_s)
        popularity = tuple(
            [(node.end_blocks * block_tokens, per_arrival * node.arrivals) for node in path]
        )
        total_per_s: float | None = None
        hot: Heat | None = None
        prefix = b""
        for node in path:
            if node.arrivals < self._settings.min_arrivals and node.wanted_holders == 1:
                continue  # too few to be hot, and it was not: nothing to settle
            if total_per_s is None:
                total_per_s = sketch.rate_per_s(sketch.root, now_s, window_s)
            prefix_tokens = min(node.end_blocks * block_tokens, prompt_tokens)
            rate_per_s = sketch.rate_per_s(node, now_s, window_s)
            above_tokens = 0 if hot is None else hot.prefix_tokens
            unit = _Traffic(
                rate_per_s=rate_per_s,
                prefix_tokens=prefix_tokens,
                own_tokens=prefix_tokens - above_tokens,
                traffic_share=rate_per_s / total_per_s,
            )
            self._settle(node, unit, len(replicas), now_s)
            if node.wanted_holders > 1:
                prefix, node.prefix_tokens = node.name, prefix_tokens
                hot = Heat(
                    prefix_tokens=prefix_tokens,
                    rate_per_s=rate_per_s,
                    holders=_holders(node, tuple(replicas)),
                )
        return Arrival(hot, popularity, prefix)

    def hottest(self, now_s: float, most: int) -> list[HotPrefix]:
        """Return the hot prefixes that arrived within the last minute, most work first."""
        sketch, window_s = self._sketch, self._settings.burst_window_s
        if sketch is None:
            return []
        found = [
            HotPrefix(
                node.name,
                node.prefix_tokens,
                sketch.rate_per_s(node, now_s, window_s) * sketch.faded(node, now_s),
                node.placed[1],
            )
            for node in sketch.nodes()
            if node.wanted_holders > 1
            and node.placed is not None
            and node.prefix_tokens
            and now_s - node.seen_s < SHOWN_S
        ]
        return nlargest(most, found, key=lambda hot: hot.tokens * hot.rate_per_s)

    def trail(self, chain: Sequence[BlockId], now_s: float) -> list[Step]:
        """Return the parts of the way of ``chain``, shallow to deep; it is counted nowhere."""
        sketch, window_s = self._sketch, self._settings.burst_window_s
        if sketch is None:
            return []
        steps = []
        for node, blocks in sketch.walk(chain):
            left = sketch.faded(node, now_s)
            rate_per_s = sketch.rate_per_s(node, now_s, window_s) * left
            steps.append(Step(blocks, node.arrivals * left, rate_per_s, node.wanted_holders))
        return steps

    def beginnings(self, now_s: float) -> list[float]:
        """Return how often each beginning of a prompt arrived, decayed to ``now_s``.

        Prompts below ``min_prefix_tokens`` are not told apart, and not counted here.
        """
        sketch = self._sketch
        if sketch is None:
            return []
        children = sketch.root.children.values()
        return [node.arrivals * sketch.faded(node, now_s) for node in children]

    def _new_sketch(self, now_s: float) -> PrefixSketch:
        settings = self._settings
        bounds = SketchBounds(
            half_life_s=settings.half_life_s,
            settled_arrivals=settings.min_arrivals,
            max_nodes=settings.max_nodes,
            max_blocks=settings.max_blocks,
        )
        return PrefixSketch(bounds, now_s)

    def _settle(self, node: PrefixNode, unit: _Traffic, replicas: int, now_s: float) -> None:
        """Set how many holders the node wants: up at once, down slowly."""
        if node.arrivals < FORGOTTEN_ARRIVALS:
            node.wanted_holders, node.low_since_s = 1, None
            return
        target = self._wanted(node, unit, replicas, 1.0)
        if target >= node.wanted_holders:
            node.wanted_holders, node.low_since_s = target, None
            return
        enough = self._wanted(node, unit, replicas, SLACK)
        if enough >= node.wanted_holders:
            node.low_since_s = None
        elif node.low_since_s is None:
            node.low_since_s = now_s
        elif now_s - node.low_since_s >= self._settings.cool_down_s:
            node.wanted_holders, node.low_since_s = max(target, enough), now_s

    def _wanted(self, node: PrefixNode, unit: _Traffic, replicas: int, slack: float) -> int:
        settings = self._settings
        if unit.prefix_tokens < settings.min_prefix_tokens or node.arrivals < settings.min_arrivals:
            return 1
        tokens_per_s = settings.prefill_tokens_per_s * settings.share * slack
        if unit.rate_per_s * unit.own_tokens <= tokens_per_s:
            return 1
        demand = unit.rate_per_s * unit.prefix_tokens / tokens_per_s
        proportional = round(unit.traffic_share / slack * replicas)
        return min(max(ceil(demand), proportional), replicas)


def _holders(node: PrefixNode, replicas: tuple[ReplicaId, ...]) -> frozenset[ReplicaId]:
    """Return the wanted number of replicas, by rendezvous hash; kept until something changes."""
    if node.placed is not None:
        placed_over, holders = node.placed
        if placed_over == replicas and len(holders) == node.wanted_holders:
            return holders

    holders = frozenset(rendezvous(node.name, replicas)[: node.wanted_holders])
    node.placed = (replicas, holders)
    return holders


def rendezvous(prefix: bytes, replicas: Iterable[ReplicaId]) -> list[ReplicaId]:
    """Return the replicas in the order in which they should hold ``prefix``, on every router."""

    def weight(replica: ReplicaId) -> int:
        return xxhash.xxh3_64_intdigest(prefix + replica.encode())

    return sorted(replicas, key=weight, reverse=True)
