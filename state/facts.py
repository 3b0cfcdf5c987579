"""What sidecars detected of their engines, as it goes through the shared state to the routers.

Facts are for people: they have a key of their own beside a replica's record, so that no decision
waits for them and no record changes with them. A reader fetches them in the background, and what it
reads is untrusted: a value that is not exactly of the expected shape is left out and counted.
"""

from __future__ import annotations

import asyncio
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from state.client import read_value
from state.model import ReplicaFacts
from state.prefix import block_id
from state.schema import MALFORMED, MAX_VALUE_BYTES, ReplicaKeys
from state.seal import Kind
from state.seal_guard import SealGuard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from state.client import Client
    from state.model import ReplicaId, ReplicaRecord
    from state.secret import ChainKeys

CHECK_BYTES: Final = 4
"""Enough to tell two keys apart, far too little to find one."""
READ_INTERVAL_S: Final = 1.0
ROUND_REPLICAS: Final = 64
"""So many are read in a round; 1,000 take 16 s, within the life of facts."""
_CHECK_SCOPE: Final = "key check"
_CHECK_TEXT: Final = b"warmroute key check"
_decoder = msgspec.json.Decoder(ReplicaFacts)


def key_check(keys: ChainKeys) -> str:
    """Return what tells whether two processes derive the same ids: equal for equal keys."""
    return block_id(_CHECK_TEXT, keys.of(_CHECK_SCOPE))[:CHECK_BYTES].hex()


def encode_facts(facts: ReplicaFacts) -> bytes:
    """Return the stored form of facts."""
    return msgspec.json.encode(facts)


def decode_facts(value: bytes) -> ReplicaFacts | None:
    """Return the facts; None when they are malformed."""
    try:
        return _decoder.decode(value) if len(value) <= MAX_VALUE_BYTES else None
    except MALFORMED:
        return None


def facts_of(
    record: ReplicaRecord | None, facts: Mapping[ReplicaId, ReplicaFacts]
) -> ReplicaFacts | None:
    """Return the facts of a registered replica; None where they are of an earlier generation."""
    told = facts.get(record.replica) if record is not None else None
    return told if record and told and told.generation == record.generation else None


class FactsBoard:
    """The newest facts of each replica, read in rounds; what did not change costs little."""

    def __init__(self, guard: SealGuard | None = None) -> None:
        self._guard = guard or SealGuard()
        self._known: dict[ReplicaId, tuple[bytes, ReplicaFacts | None]] = {}
        self._view: Mapping[ReplicaId, ReplicaFacts] = MappingProxyType({})
        self._next = 0
        self.malformed_values = 0

    def __call__(self) -> Mapping[ReplicaId, ReplicaFacts]:
        """Return what the last rounds read; the mapping does not change."""
        return self._view

    async def read(self, client: Client, replicas: Iterable[ReplicaId]) -> None:
        """Read the facts of some ``replicas``, of others in the next rounds.

        Raises what the store answers.
        """
        listed = sorted(replicas)
        begin = self._next if self._next < len(listed) else 0
        names = listed[begin : begin + ROUND_REPLICAS]
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.execute_command("GET", ReplicaKeys(name).facts)
        replies = await pipeline.execute(raise_on_error=False)
        known = {name: self._known[name] for name in listed if name in self._known}
        for name, reply in zip(names, replies, strict=True):
            value = read_value(reply)
            if value is None:
                known.pop(name, None)
            else:
                known[name] = self._decoded(name, value)
        self._known, self._next = known, begin + len(names)
        told = {name: facts for name, (_, facts) in known.items() if facts is not None}
        self._view = MappingProxyType(told)

    async def follow(self, client: Client, replicas: Iterable[ReplicaId]) -> None:
        """Do one round, then rest."""
        await self.read(client, replicas)
        await asyncio.sleep(READ_INTERVAL_S)

    def _decoded(self, replica: ReplicaId, value: bytes) -> tuple[bytes, ReplicaFacts | None]:
        before = self._known.get(replica)
        if before is not None and before[0] == value:
            return before
        opened = self._guard.open(Kind.FACTS, ReplicaKeys(replica).facts, value)
        if opened is None:
            return value, before[1] if before is not None else None
        facts = decode_facts(opened)
        self.malformed_values += facts is None
        return value, facts
