"""Direct lookup: no copy of the index in the router; the store is asked once per request.

For fleets whose index is larger than a router should hold. Replicas, loads and leases are kept as a
mirror keeps them; what a chain's overlap is, each request asks, on a few connections of its own.
One script call per replica (``overlap.lua``) walks the chain beside the data. Its answer is the
exact leading run, also where evictions left holes, since no id of the run is skipped. The first
round asks for FIRST_BLOCKS of the chain on every candidate; further rounds, of NEXT_BLOCKS, only
where everything so far is resident. At most MAX_ROUNDS are made: what lies behind MAX_BLOCKS is
taken as not resident. A reply is two numbers, whatever the length.

A command that was sent is never cancelled: whoever waits no longer leaves it to finish, so that
connections live on. A breaker stops the asking when answers fail or come too late to be of use.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self

from msgspec import Struct
from redis.exceptions import TryAgainError

from state.address import redact
from state.breaker import Admission, Breaker
from state.client import STORE_ERRORS, command_client, describe, is_wrong_type
from state.model import Overlap, Rung, Tier
from state.rhythm import Backoff
from state.schema import BLOCK_ID_BYTES, ReplicaKeys, residency_suffix
from state.script import Script, try_scripts
from state.timing import LookupTiming

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from random import Random

    from state.client import RedisSettings
    from state.figures import MirrorFigures, MirrorHolding
    from state.mirror import Mirror
    from state.model import (
        BlockId,
        Generation,
        LeaseTotals,
        NamespaceId,
        ReplicaFacts,
        ReplicaId,
        ReplicaState,
    )
    from state.seal_guard import SealGuard
    from state.store import Question

_log = logging.getLogger(__name__)

FIRST_BLOCKS: Final = 512
NEXT_BLOCKS: Final = 4096
MAX_ROUNDS: Final = 8
MAX_BLOCKS: Final = FIRST_BLOCKS + (MAX_ROUNDS - 1) * NEXT_BLOCKS
LOOKUP_CONNECTIONS: Final = 4
"""Per server or node; as many lookups run at a time."""
_TIERS: Final = (Tier.GPU, *(tier for tier in Tier if tier is not Tier.GPU))
_KEYS_KEPT: Final = 4096
"""Replicas times namespaces whose key names are remembered; clients choose salts."""
_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})
_Answers = dict[tuple["BlockId", ...], dict["ReplicaId", Overlap]]


class LookupCounts(Struct):
    """What requests got of their lookups, since the start; each counts once."""

    answered: int = 0
    late: int = 0
    """No answer within the wait."""
    failed: int = 0
    refused: int = 0
    """Lookups rested; the request did not wait."""

    def by_outcome(self) -> dict[str, int]:
        """Return the counts by name."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


@dataclass(slots=True)
class _Walk:
    """One chain on one replica."""

    answer: dict[ReplicaId, Overlap]
    replica: ReplicaId
    keys: tuple[bytes, ...]
    packed: bytes
    gpu_blocks: int = 0
    any_tier_blocks: int = 0

    def note(self, gpu_blocks: int, any_tier_blocks: int) -> None:
        """Add the run that one more portion of the chain begins with."""
        if self.gpu_blocks == self.any_tier_blocks:
            self.gpu_blocks += gpu_blocks
        self.any_tier_blocks += any_tier_blocks
        if self.any_tier_blocks:
            self.answer[self.replica] = Overlap(
                gpu_blocks=self.gpu_blocks, any_tier_blocks=self.any_tier_blocks
            )


class DirectReader:
    """``FleetReader`` and ``Lookup``. ``mirror`` keeps the rest; its index must be off.

    ``settings`` are those of the lookups: short limits, few connections.
    """

    def __init__(
        self,
        mirror: Mirror,
        settings: RedisSettings,
        *,
        clock: Callable[[], float],
        rng: Random,
        timing: LookupTiming = LookupTiming(),  # noqa: B008 - a frozen value
    ) -> None:
        self._mirror = mirror
        self._settings = settings
        self._clock = clock
        self._timing = timing
        backoff = Backoff(timing.backoff_base_s, timing.backoff_cap_s, rng)
        self._breaker = Breaker(
            backoff, max_errors=timing.max_errors, max_silence_s=timing.max_silence_s
        )
        self._slots = asyncio.Semaphore(settings.max_connections)
        self._script = Script("overlap")
        self._answers: _Answers = {}
        self._keys: dict[tuple[ReplicaId, Generation, NamespaceId], tuple[bytes, ...]] = {}
        self._running: set[asyncio.Task[_Answers | None]] = set()
        self._answered_s = clock()
        self._was_open = False
        self._last_fault = ""
        self.counts = LookupCounts()
        self.left_out = 0
        """Replicas left out of an answer: a key was of another type, or on its way to a node."""

    async def __aenter__(self) -> Self:
        self._client = command_client(self._settings)
        await self._mirror.__aenter__()
        return self

    async def __aexit__(self, *details: object) -> None:
        try:
            await self._mirror.__aexit__(*details)
        finally:
            running = tuple(self._running)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await self._client.aclose()

    def replicas(self) -> Mapping[ReplicaId, ReplicaState]:
        """Return the registered replicas; the mapping is a snapshot and does not change."""
        return self._mirror.replicas()

    def overlap(self, chain: Sequence[BlockId]) -> Mapping[ReplicaId, Overlap]:
        """Return the leading resident run per replica, for a chain that ``prepare`` asked for."""
        return self._answers.get(tuple(chain), _NOTHING)

    def publish_leases(self, totals: Mapping[ReplicaId, LeaseTotals]) -> None:
        """Set this router's own leases; they reach the other routers in the background."""
        self._mirror.publish_leases(totals)

    def clears(self) -> Mapping[ReplicaId, int]:
        """Return how often each replica's cache was cleared: nothing, that is in the index."""
        return {}

    def gpu_blocks(self, replica: ReplicaId) -> int | None:  # noqa: ARG002 - of nobody
        """Return None: no index is kept."""
        return None

    def foreign_leases(self) -> Mapping[ReplicaId, LeaseTotals]:
        """Return the leases of all other live routers, summed per replica."""
        return self._mirror.foreign_leases()

    @property
    def guard(self) -> SealGuard:
        """What opens sealed values."""
        return self._mirror.guard

    @property
    def routers(self) -> int:
        """Live routers, with this one."""
        return self._mirror.routers

    @property
    def rank(self) -> int:
        """How many of the live routers come before this one, by name."""
        return self._mirror.rank

    def freshness(self) -> tuple[Rung, float]:
        """Return the mirror's rung and age; LOCAL, since the last answer, while lookups rest."""
        rung, age_s = self._mirror.freshness()
        if rung is Rung.LIVE and self._breaker.is_open:
            return Rung.LOCAL, self._clock() - self._answered_s
        return rung, age_s

    async def settle(self, timeout_s: float) -> bool:
        """Wait until every change stored before the call is visible; False when it is not."""
        return await self._mirror.settle(timeout_s)

    def holdings(self) -> dict[ReplicaId, MirrorHolding]:
        """Return nothing: no block is held in this process."""
        return {}

    def facts(self) -> Mapping[ReplicaId, ReplicaFacts]:
        """Return what the sidecars detected of their engines."""
        return self._mirror.facts()

    def figures(self) -> MirrorFigures:
        """Return the figures of the mirror that keeps the rest."""
        return self._mirror.figures()

    async def prepare(self, questions: Sequence[Question]) -> bool:
        """Let ``overlap`` answer for these chains until the next call; waits a few ms at most."""
        self._answers = {}
        if not any(question.replicas and question.chain for question in questions):
            return True
        admission = self._breaker.admit(self._clock())
        if admission is Admission.PROBE:
            await self._probe(questions)
        if admission is not Admission.ASK:
            self.counts.refused += 1
            return False
        answers: _Answers | None = None
        try:
            async with asyncio.timeout(self._timing.wait_s):
                await self._slots.acquire()
                answers = await asyncio.shield(self._start(questions, admission))
        except TimeoutError:
            self.counts.late += 1
            return False
        if answers is None:
            self.counts.failed += 1
            return False
        self.counts.answered += 1
        self._answers = answers
        return True

    async def _probe(self, questions: Sequence[Question]) -> None:
        """Ask for the breaker's sake; nobody waits for the answer."""
        if self._slots.locked():  # earlier lookups have not even failed yet
            self._breaker.late(Admission.PROBE, self._clock())
            return
        await self._slots.acquire()  # free: it does not wait
        self._start(questions, Admission.PROBE)

    def _start(
        self, questions: Sequence[Question], admission: Admission
    ) -> asyncio.Task[_Answers | None]:
        """Ask in a task of its own, which gives back the slot that the caller took."""
        task = asyncio.create_task(self._ask(questions, admission), name="lookup")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _ask(self, questions: Sequence[Question], admission: Admission) -> _Answers | None:
        began_s = self._clock()
        try:
            answers = await self._walk(questions)
        except STORE_ERRORS as error:
            self._note_failure(admission, describe(error))
            return None
        except Exception as error:  # noqa: BLE001 - a fault of ours must not fail a request
            if repr(error) != self._last_fault:
                _log.exception("lookup failed")
            self._last_fault = repr(error)
            self._note_failure(admission, self._last_fault)
            return None
        finally:
            self._slots.release()
        now_s = self._clock()
        if now_s - began_s > self._timing.wait_s:
            self._breaker.late(admission, now_s)
            self._note_circuit("answers come too late")
        else:
            self._breaker.answered(admission)
            self._answered_s = now_s
            self._note_circuit("")
        return answers

    def _note_failure(self, admission: Admission, reason: str) -> None:
        self._breaker.failed(admission, self._clock())
        self._note_circuit(reason)

    def _note_circuit(self, reason: str) -> None:
        """Log that lookups stopped or go on: one line each, however many failed."""
        if self._breaker.is_open is self._was_open:
            return
        self._was_open = self._breaker.is_open
        where = redact(self._settings.url)
        if self._was_open:
            _log.warning("lookups at %s rest: %s", where, reason)
        else:
            _log.info("lookups at %s go on", where)

    async def _walk(self, questions: Sequence[Question]) -> _Answers:
        """Return the overlaps of each chain; raises what the store raises."""
        answers: _Answers = {}
        walks = [walk for question in questions for walk in self._walks(question, answers)]
        begin, portion = 0, FIRST_BLOCKS
        for _ in range(MAX_ROUNDS):
            if not walks:
                break
            end = begin + portion * BLOCK_ID_BYTES
            parts = [walk.packed[begin:end] for walk in walks]
            calls = [
                self._script.call(walk.keys, [part, BLOCK_ID_BYTES])
                for walk, part in zip(walks, parts, strict=True)
            ]
            replies = await try_scripts(self._client, calls)
            unfinished = []
            for walk, part, reply in zip(walks, parts, replies, strict=True):
                if is_wrong_type(reply) or isinstance(reply, TryAgainError):
                    self.left_out += 1
                    continue
                if isinstance(reply, Exception):
                    raise reply
                walk.note(*reply)
                if reply[1] * BLOCK_ID_BYTES == len(part) and end < len(walk.packed):
                    unfinished.append(walk)
            walks, begin, portion = unfinished, end, NEXT_BLOCKS
        return answers

    def _walks(self, question: Question, answers: _Answers) -> list[_Walk]:
        if not question.chain:
            return []
        packed = b"".join(question.chain)
        answer = answers.setdefault(question.chain, {})
        known = self._mirror.replicas()
        walks = []
        for replica in question.replicas:
            state = known.get(replica)
            if state is not None:
                keys = self._keys_of(replica, state.record.generation, question.namespace)
                walks.append(_Walk(answer, replica, keys, packed))
        return walks

    def _keys_of(
        self, replica: ReplicaId, generation: Generation, namespace: NamespaceId
    ) -> tuple[bytes, ...]:
        """Return the keys of the residency sets, the one of GPU blocks first."""
        known = self._keys.get((replica, generation, namespace))
        if known is None:
            if len(self._keys) >= _KEYS_KEPT:
                self._keys.clear()
            keys = ReplicaKeys(replica)
            suffixes = [residency_suffix(generation, namespace, tier) for tier in _TIERS]
            known = tuple(keys.residency(suffix).encode() for suffix in suffixes)
            self._keys[replica, generation, namespace] = known
        return known
