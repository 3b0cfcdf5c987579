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
    BLOCK_ID_BYTES,
    ENTRY_FIELD,
    STREAM_CAP_ENTRIES,
    Entry,
    EntryKind,
    ReplicaKeys,
    encode_entry,
    suffix_parts,
    unpack_blocks,
)
from state.script import Script, run_scripts
from state.seal import NO_SEAL
from state.stamp import sealed_entry
from state.timing import StoreTiming

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from state.client import Argument, Client
    from state.model import NamespaceId, ReplicaId
    from state.schema import SuffixParts
    from state.seal import Seal

PORTION_BLOCKS: Final = 2048
"""Blocks that go at a time, in one entry of the stream: a millisecond of a mirror."""
_STREAM_TTL_MS: Final = round(StoreTiming().residency_ttl_s * 1000)
_EMPTY: Final = b"\xc4\x00"
"""No bytes, in msgpack: an entry ends with what was removed, what was stored, and no seal."""


class Purged(Struct, frozen=True, kw_only=True):
    """What was taken from the index: keys, and the blocks in them, counted once per replica."""

    keys: int = 0
    blocks: int = 0
    replicas: int = 0


async def purge_namespaces(
    client: Client,
    replicas: Iterable[ReplicaId],
    namespaces: Collection[NamespaceId],
    seal: Seal | None = None,
) -> Purged:
    """Unlink the residency of ``namespaces`` on ``replicas``; raises what the store raises."""
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
            if seal is None:
                blocks += await _purge_set(client, names, suffix, parts)
            else:
                blocks += await _purge_sealed(client, seal, names, suffix, parts)
        keys += len(doomed)
        touched += bool(doomed)
    return Purged(keys=keys, blocks=blocks, replicas=touched)


async def _purge_set(client: Client, names: ReplicaKeys, suffix: str, parts: SuffixParts) -> int:
    """Empty one residency set and return how many blocks it had."""
    script = Script("scope_purge")
    told = Entry(
        kind=EntryKind.PURGED,
        generation=parts.generation,
        namespace=parts.namespace,
        tier=parts.tier,
    )
    head = encode_entry(told).removesuffix(3 * _EMPTY)
    keys = [names.residency(suffix), names.sets, names.changes]
    arguments: list[Argument] = [PORTION_BLOCKS, suffix, head, 2 * _EMPTY]
    arguments += [STREAM_CAP_ENTRIES, _STREAM_TTL_MS]
    blocks = 0
    while True:
        [reply] = await run_scripts(client, [script.call(keys, arguments)])
        gone = int(reply)
        blocks += gone
        if gone < PORTION_BLOCKS:
            return blocks


async def _purge_sealed(
    client: Client, seal: Seal, names: ReplicaKeys, suffix: str, parts: SuffixParts
) -> int:
    """Do the same where the store must not write entries, as it cannot seal them.

    What two routers take away at once is told twice, which changes nothing.
    """
    scan, key, blocks, cursor = Script("scan"), names.residency(suffix), 0, b""
    while cursor != b"0":
        call = scan.call([key], [cursor or b"0", PORTION_BLOCKS, BLOCK_ID_BYTES])
        [(cursor, packed)] = await run_scripts(client, [call])
        if not packed:
            continue
        told = Entry(
            kind=EntryKind.PURGED,
            generation=parts.generation,
            namespace=parts.namespace,
            tier=parts.tier,
            removed=packed,
            seal=NO_SEAL,
        )
        entry = (ENTRY_FIELD, sealed_entry(seal, names, told))
        pipeline = client.pipeline(transaction=True)
        pipeline.execute_command("SREM", key, *unpack_blocks(packed))
        pipeline.execute_command(
            "XADD", names.changes, "MAXLEN", "~", STREAM_CAP_ENTRIES, "*", *entry
        )
        pipeline.execute_command("PEXPIRE", names.changes, _STREAM_TTL_MS)
        gone, *_ = await pipeline.execute()
        blocks += int(gone)
    await run_command(client, "SREM", names.sets, suffix)
    return blocks
