"""A real engine on the copying runner: all tiers, an audit, and every answer collected."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prompt.codec import load_codec
from sidecar.audit import AuditReplay
from sidecar.audit_file import replay_files
from sidecar.audit_log import AuditLog
from sidecar.cache import PagedCache
from sidecar.clock import preset_cost
from sidecar.cost import MeasuredCosts
from sidecar.engine import Engine, EngineParts, Ticket
from sidecar.generation import Delta, Generation, Halted
from sidecar.ledger import PageLedger
from sidecar.mover import Mover
from sidecar.pool import PageId
from sidecar.runner import Draw, Slot
from sidecar.scheduler import Scheduler
from sidecar.scope import Scopes
from sidecar.step import SchedulerLimits
from sidecar.store import DiskStore, HostMemory
from sidecar.tier import LowerTier
from sidecar.tiers import Tiers
from state.model import ModelIdentity
from state.prefix import pack_tokens
from support.copy_runner import CopyRunner

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from pathlib import Path

    from sidecar.audit import AuditSummary
    from sidecar.eviction import Eviction
    from sidecar.pagechange import PageChange

NAMESPACE = "ab" * 32
PATIENCE_S = 60.0


class SteadyPrices:
    """Prices for eviction and fetch plans that do not depend on how busy the machine is."""

    def fetch_ms(self, source: str, pages: int) -> float:
        return 0.01 * pages if source else 0.0

    def prefill_ms(self, tokens: int, context_tokens: int) -> float:
        return float(tokens + context_tokens * 0.01 * tokens)


@dataclass(slots=True)
class Asked:
    """One answer so far."""

    ticket: Ticket | None = None
    deltas: list[Delta | Halted] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, delta: Delta | Halted) -> None:
        self.deltas.append(delta)
        if isinstance(delta, Halted) or delta.finish is not None:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [each for d in self.deltas if isinstance(d, Delta) for each in d.token_ids]

    @property
    def halted(self) -> str | None:
        last = self.deltas[-1] if self.deltas else None
        return last.reason if isinstance(last, Halted) else None

    @property
    def cached_tokens(self) -> int | None:
        assert self.ticket is not None
        return self.ticket.sequence.cached_tokens


class EngineRig:
    """Build it inside of a running event loop; ``running`` starts it."""

    def __init__(  # noqa: PLR0913 - a test names what matters to it
        self,
        directory: Path,
        *,
        pages: int = 16,
        page_tokens: int = 4,
        host_slots: int = 0,
        disk_slots: int = 0,
        eviction: Eviction | None = None,
        request_timeout_s: float | None = None,
        public_prefixes: Iterable[list[int]] = (),
        **limits: int,
    ) -> None:
        self.runner = CopyRunner(pages, page_tokens)
        self.audit_path = directory / "audit.jsonl"
        self.ledger = PageLedger()
        self.changes: list[PageChange] = []
        identity = ModelIdentity(model="m", tokenizer="t", block_tokens=page_tokens)
        self.scopes = Scopes(identity, 0)
        self.scopes.allow(pack_tokens(each) for each in public_prefixes)
        host, disk = self._tiers(directory, host_slots, disk_slots)
        prices = SteadyPrices()
        self.cache = PagedCache(
            pages,
            page_tokens,
            eviction=eviction,
            costs=prices,
            tiers=None if host is None else Tiers(prices, page_tokens, host=host, disk=disk),
            journal=self.ledger.note,
        )
        costs = MeasuredCosts(preset_cost("llama-8b-h100"), self.runner.page_bytes)
        self.mover = self._mover(costs, host)
        pools = [self.cache.pool, *(tier.pool for tier in (host, disk) if tier is not None)]
        self.pools = pools
        self.ledger.watch(pools, AuditLog(self.audit_path, 1 << 20, 2, self.ledger.snapshot))
        self.engine = Engine(
            EngineParts(
                scheduler=Scheduler(self.cache, SchedulerLimits(**limits)),
                runner=self.runner,
                scopes=self.scopes,
                codec=load_codec(None),
                costs=costs,
                publish=self.changes.extend,
                time_s=time.monotonic,
                mover=self.mover,
                ledger=self.ledger,
                request_timeout_s=request_timeout_s,
            )
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[EngineRig]:
        """Run the engine and its writer; a crash of either fails the test."""
        tasks = [asyncio.create_task(self.engine.run())]
        if self.mover is not None:
            tasks.append(asyncio.create_task(self.mover.write_behind()))
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield self
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            if self.disk is not None:
                self.disk.close()
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended

    def ask(
        self, prompt: Iterable[int], outputs: int = 4, *, parent: Asked | None = None, **more: Any
    ) -> Asked:
        """Submit a prompt."""
        asked = Asked()
        generation = Generation(
            packed_prompt=pack_tokens(prompt), max_output_tokens=outputs, ignore_eos=True, **more
        )
        above = None if parent is None else parent.ticket
        asked.ticket = self.engine.submit(generation, asked.take, above)
        return asked

    async def answer(self, prompt: Iterable[int], outputs: int = 4, **more: Any) -> Asked:
        """Submit a prompt and wait for its end."""
        asked = self.ask(prompt, outputs, **more)
        await asked.ended.wait()
        return asked

    def tier(self, name: str) -> LowerTier:
        """Return a tier below the device."""
        assert self.cache.exchange is not None
        tiers = self.cache.exchange.tiers
        tier = tiers.host if name == "host" else tiers.disk
        assert tier is not None
        return tier

    async def settled(self) -> None:
        """Wait until the writer has nothing left to do."""
        mover, pool = self.mover, self.tier("disk").pool
        assert mover is not None
        while mover._waiting or pool.states()["reserved"]:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)

    def proven(self) -> AuditSummary:
        """Check that nothing is held, close the audit and replay it: no fault, all closed."""
        for pool in self.pools:
            pool.audit()
            assert pool.held_pages == 0, (pool.tier, pool.states())
        return self.replayed()

    def replayed(self) -> AuditSummary:
        """Close the audit and replay it; AuditFault where it does not add up."""
        self.ledger.close()
        replay = AuditReplay()
        assert replay_files(replay, [self.audit_path]) == []
        assert replay.is_closed
        return replay.summary()

    def _tiers(
        self, directory: Path, host_slots: int, disk_slots: int
    ) -> tuple[LowerTier | None, LowerTier | None]:
        note: Callable[..., None] = self.ledger.note
        host = LowerTier("host", host_slots, note) if host_slots else None
        disk = LowerTier("disk", disk_slots, note) if disk_slots else None
        self.disk = None
        if disk is not None:
            probe = DiskStore(directory / "pages", NAMESPACE, self.runner.content_bytes, 1)
            self.disk = DiskStore(
                directory / "pages",
                NAMESPACE,
                self.runner.content_bytes,
                disk_slots * probe.file_bytes,
            )
            disk.restore(self.disk.open(), self.disk.remove)
        return host, disk

    def _mover(self, costs: MeasuredCosts, host: LowerTier | None) -> Mover | None:
        if self.cache.exchange is None or host is None:
            return None
        self.memory = HostMemory(host.pool.total_pages, self.runner.content_bytes)
        return Mover(self.cache.exchange, costs, self.memory, self.disk)


def greedy(prompt: Iterable[int], outputs: int) -> list[int]:
    """Return what the runner says after a prompt, computed alone, in one go, without a cache."""
    tokens = list(prompt)
    first = len(tokens)
    runner = CopyRunner(1, first + outputs)
    context = 0
    for index in range(outputs):
        packed = pack_tokens(tokens[context:])
        (sampled,) = runner._compute(
            Slot(packed, context, (PageId(0),), (Draw(seed=0, index=index),))
        )
        context = len(tokens)
        tokens.append(sampled.token)
    return tokens[first:]
