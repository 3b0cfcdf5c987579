"""A token source with a fleet in memory, a clock to turn, and what it made of prompts."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, Self

from prometheus_client import CollectorRegistry

from prompt.codec import load_codec
from prompt.reader import CHAT_PATH, PromptReader
from router.config import TokenSettings
from router.fleet import FleetTable
from router.token_source import TokenSource, TokenSourceParts
from router.upstream import UpstreamPool, UpstreamSettings
from state.memory import MemoryState
from state.model import Generation, ModelIdentity, ReplicaId, ReplicaRecord, RouterId

if TYPE_CHECKING:
    from types import TracebackType

    from prompt.model import ReadPrompt
    from support.token_engine import TokenEngine

WORDS = "the quick brown fox jumps over the lazy dog " * 40
PATIENT = TokenSettings(patience_s=5.0, patience_cap_s=5.0)


class Up:
    """Every replica is up and serves what it announces."""

    def is_up(self, replica: ReplicaId) -> bool:
        """See ``Pulse``."""
        return bool(replica)

    def served_models(self, replica: ReplicaId) -> frozenset[str]:
        """See ``Pulse``."""
        return frozenset() if replica else frozenset({"?"})


class Rig:
    """A source with a fleet in memory and a clock to turn."""

    def __init__(self, settings: TokenSettings = PATIENT, **sources: Any) -> None:
        self.now_s = 100.0
        self.state = MemoryState(clock=lambda: 0.0)
        self.fleet = FleetTable(self.state.reader(RouterId("me")), ())
        self.registry = CollectorRegistry()
        self.pool = UpstreamPool(UpstreamSettings(connect_timeout_s=10.0))
        self.reader = PromptReader({}, load_codec(None))
        self.source = TokenSource(
            TokenSourceParts(
                fleet=self.fleet,
                pulse=Up(),
                pool=self.pool,
                settings=settings,
                sources=sources,
                registry=self.registry,
                clock=lambda: self.now_s,
                rng=random.Random(1),
            )
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.source.close()
        await self.pool.close()
        self.reader.close()

    async def register(
        self,
        engine: TokenEngine,
        name: str = "a",
        *,
        model: str = "m",
        tokenizer: str = "",
        has_events: bool = True,
    ) -> None:
        await self.state.register(
            ReplicaRecord(
                replica=ReplicaId(name),
                endpoint=engine.url,
                generation=Generation("1"),
                identity=ModelIdentity(model=model, tokenizer=tokenizer),
                page_tokens=16,
                sidecar="s",
                has_events=has_events,
            )
        )

    async def read(self, path: str, body: dict[str, Any]) -> ReadPrompt:
        raw = json.dumps(body).encode()
        return await self.source.refined(path, raw, await self.reader.read(path, raw))

    async def chat(self, text: str = WORDS, **fields: Any) -> ReadPrompt:
        return await self.read(CHAT_PATH, chat_body(text, **fields))

    def results(self) -> dict[str, int]:
        """Return the counts of results that are not 0."""
        return {
            sample.labels["result"]: int(sample.value)
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == "warmroute_engine_tokenizations_total" and sample.value
        }


def chat_body(text: str = WORDS, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def is_by_bytes(read: ReadPrompt) -> bool:
    return read.unroutable is None and read.is_rough and not read.shadows
