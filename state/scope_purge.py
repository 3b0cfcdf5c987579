"""Takes what an ended epoch left in the index away, by name: a few keys, never a scan.

Each portion that goes is told in the replica's change stream, so that every mirror forgets it too.
What an engine still holds nobody asks for any more. A sidecar that announces its whole cache again
also announces that, under names that nobody can derive, until the engine evicts it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from state.client import run_command
from state.schema import (
    STREAM_CAP_ENTRIES,
    Entry,
    EntryKind,
    ReplicaKeys,
    encode_entry,
    suffix_parts,
)
from state.script import Script, run_scripts
from state.timing import StoreTiming

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from state.client import Argument, Client
    from state.model import NamespaceId, ReplicaId
    from state.schema import SuffixParts

PORTION_BLOCKS: Final = 2048
"""Blocks that go at a time, in one entry of the stream: a millisecond of a mirror."""
_STREAM_TTL_MS: Final = round(StoreTiming().residency_ttl_s * 1000)
_EMPTY: Final = b"\xc4\x00"
"""No bytes, in msgpack: an entry ends with what was removed and what was stored."""


class Purged(Struct, frozen=True, kw_only=True):
    """What was taken from the index: keys, and the blocks in them, counted once per replica."""

    keys: int = 0
    blocks: int = 0
    replicas: int = 0


async def purge_namespaces(
    client: Client, replicas: Iterable[ReplicaId], namespaces: Collection[NamespaceId]
) -> Purged:
    """Unlink the residency of ``namespaces`` on ``replicas``; raises what the store raises."""
    script = Script("scope_purge")
    keys = blocks = touched = 0
    for replica in replicas if namespaces else ():
        names = ReplicaKeys(replica)
        listed = [
            member.decode("utf-8", "replace")
            for member in await run_command(client, "SMEMBERS", names.sets)
        ]
        found = {suffix: suffix_parts(suffix) for suffix in listed}
        doomed = {
            suffix: parts
            for suffix, parts in found.items()
            if parts is not None and parts.namespace in namespaces
        }
        for suffix, parts in doomed.items():
            blocks += await _purge_set(client, script, names, suffix, parts)
        keys += len(doomed)
        touched += bool(doomed)
    return Purged(keys=keys, blocks=blocks, replicas=touched)


async def _purge_set(
    client: Client, script: Script, names: ReplicaKeys, suffix: str, parts: SuffixParts
) -> int:
    """Empty one residency set and return how many blocks it had."""
    told = Entry(
        kind=EntryKind.PURGED,
        generation=parts.generation,
        namespace=parts.namespace,
        tier=parts.tier,
    )
    head = encode_entry(told).removesuffix(_EMPTY + _EMPTY)
    keys = [names.residency(suffix), names.sets, names.changes]
    arguments: list[Argument] = [PORTION_BLOCKS, suffix, head, _EMPTY]
    arguments += [STREAM_CAP_ENTRIES, _STREAM_TTL_MS]
    blocks = 0
    while True:
        [reply] = await run_scripts(client, [script.call(keys, arguments)])
        gone = int(reply)
        blocks += gone
        if gone < PORTION_BLOCKS:
            return blocks
