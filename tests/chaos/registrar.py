"""The sidecars of the rig's replicas: what each cache holds goes into the shared state.

One object for each replica follows its changes and its lives, and announces everything again when
the state was emptied. It writes to the server itself, not by the links that routers use.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from chaos.speech import BLOCK_TOKENS, MODEL
from state.client import RedisSettings, command_client
from state.model import (
    BlockId,
    ChangeBatch,
    Fence,
    Generation,
    ModelIdentity,
    NamespaceId,
    ReplicaId,
    ReplicaLoad,
    ReplicaRecord,
)
from state.prefix import chain_of, chain_root, namespace_of, pack_tokens, salt_scope
from state.redis_writer import RedisWriter
from state.rhythm import check_cancelled
from state.secret import ChainKeys
from state.store import StateError
from state.timing import StoreTiming

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

POLL_S: Final = 0.15
HEARTBEAT_S: Final = 0.5
CHANGES: Final = "/chaos/changes"
CAPACITY_PAGES: Final = 24_000
PATIENT: Final = StoreTiming(record_ttl_s=60.0, load_ttl_s=20.0)
"""All registrars are in one busy process: none of them is dead because it is late."""


@dataclass(slots=True)
class Held:
    """What one life of a replica holds: its own block names to ids and namespaces of routers'."""

    life: str
    cursor: int = 0
    sequence: int = 0
    blocks: dict[str, tuple[NamespaceId, BlockId]] = field(default_factory=dict)


class Registrar:
    """Keeps one replica's record and residency; ``endpoint`` is what routers dial."""

    def __init__(
        self,
        name: str,
        endpoint: str,
        ask: Callable[[str], Awaitable[Any]],
        state_url: str,
        about: tuple[str, bytes],
    ) -> None:
        self._name = ReplicaId(name)
        self._endpoint = endpoint
        self._ask = ask
        self._digest, secret = about
        self._keys = ChainKeys(secret=secret)
        settings = RedisSettings(url=state_url, command_timeout_s=1.0, connect_timeout_s=1.0)
        self._client = command_client(settings)
        self._writer = RedisWriter(
            self._client,
            clock=time.monotonic,
            rng=random.Random(name),
            timing=PATIENT,
            stream_cap_entries=2_000,
        )
        self.held: Held | None = None
        self._is_registered = False
        self._beat_s = 0.0

    async def run(self) -> None:
        """Follow the replica until cancelled; what fails is tried again."""
        try:
            while True:
                with contextlib.suppress(OSError, TimeoutError, StateError):
                    await self._round()
                check_cancelled()
                await asyncio.sleep(POLL_S)
        finally:
            await self._client.aclose()

    def _identity(self, salt: str) -> ModelIdentity:
        return ModelIdentity(
            model=MODEL,
            tokenizer=self._digest,
            scope=salt_scope(salt),
            block_tokens=BLOCK_TOKENS,
        )

    def _record(self, life: str) -> ReplicaRecord:
        return ReplicaRecord(
            replica=self._name,
            endpoint=self._endpoint,
            generation=Generation(life),
            identity=self._identity(""),
            page_tokens=16,
            sidecar=f"rig-{self._name}",
            capacity_pages=CAPACITY_PAGES,
        )

    async def _round(self) -> None:
        held = self.held
        # Of another life than the one asked for, all changes come.
        told = await self._ask(f"/chaos/changes?{held.life}.{held.cursor}" if held else CHANGES)
        if held is None or told["life"] != held.life:
            self.held = held = Held(told["life"])
            self._is_registered = False
        record = self._record(held.life)
        if not self._is_registered:
            await self._announce(record, held)
        batches = self._batches(held, told["changes"])
        held.cursor = told["next"]
        try:
            await self._writer.apply(batches)
        except StateError:
            self._is_registered = False  # all of it is announced again
            raise
        if time.monotonic() - self._beat_s >= HEARTBEAT_S:
            state = await self._ask("/chaos/state")
            load = ReplicaLoad(running=state["active"], queued=0, kv_used_fraction=0.1)
            fence = await self._writer.heartbeat(record, load)
            self._beat_s = time.monotonic()
            self._is_registered = fence is Fence.HELD

    async def _announce(self, record: ReplicaRecord, held: Held) -> None:
        await self._writer.register(record)
        by_namespace: dict[NamespaceId, list[BlockId]] = {}
        for namespace, block in held.blocks.values():
            by_namespace.setdefault(namespace, []).append(block)
        is_first = True
        for namespace, blocks in by_namespace.items():
            stored = tuple(dict.fromkeys(blocks))
            batch = self._batch(held, namespace, stored, ())
            await self._writer.apply([_clearing(batch) if is_first else batch])
            is_first = False
        self._is_registered = True

    def _batches(self, held: Held, changes: list[dict[str, Any]]) -> list[ChangeBatch]:
        """Return what is different after ``changes``: one batch for each namespace."""
        fresh: dict[str, tuple[NamespaceId, BlockId]] = {}
        gone: list[tuple[NamespaceId, BlockId]] = []
        for change in changes:
            for name in change.get("removed", ()):
                found = held.blocks.pop(name, None)
                if found is not None and fresh.pop(name, None) is None:
                    gone.append(found)
            if "salt" in change:
                named = self._named(held, change)
                held.blocks |= named
                fresh |= named
        kept = set(fresh.values())
        batches = []
        for namespace in dict.fromkeys(pair[0] for pair in (*kept, *gone)):
            stored = tuple(block for space, block in kept if space == namespace)
            removed = tuple(
                block for space, block in gone if space == namespace and (space, block) not in kept
            )
            batches.append(self._batch(held, namespace, stored, removed))
        return batches

    def _named(self, held: Held, change: dict[str, Any]) -> dict[str, tuple[NamespaceId, BlockId]]:
        """Return what a replica's own names of stored blocks mean to routers."""
        identity = self._identity(change["salt"])
        namespace, key = namespace_of(identity), self._keys.of(identity.scope)
        parent = held.blocks.get(change["parent"])
        if change["parent"] and parent is None:
            return {}  # the parent was evicted meanwhile: nothing can reach these
        root = parent[1] if parent else chain_root(identity, key)
        tokens = pack_tokens(change["tokens"].encode("latin-1"))
        chain = chain_of(root, tokens, BLOCK_TOKENS, key)
        return {name: (namespace, block) for name, block in zip(change["ids"], chain, strict=True)}

    def _batch(
        self,
        held: Held,
        namespace: NamespaceId,
        stored: tuple[BlockId, ...],
        removed: tuple[BlockId, ...],
    ) -> ChangeBatch:
        held.sequence += 1
        return ChangeBatch(
            replica=self._name,
            generation=Generation(held.life),
            namespace=namespace,
            sequence=held.sequence,
            stored=stored,
            removed=removed,
        )


def _clearing(batch: ChangeBatch) -> ChangeBatch:
    return ChangeBatch(
        replica=batch.replica,
        generation=batch.generation,
        namespace=batch.namespace,
        sequence=batch.sequence,
        stored=batch.stored,
        is_clear=True,
    )
