"""Short ways to write down records, batches and block ids in tests of the shared state."""

from __future__ import annotations

from state.model import (
    BlockId,
    ChangeBatch,
    Generation,
    ModelIdentity,
    NamespaceId,
    ReplicaId,
    ReplicaRecord,
    Tier,
)

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
NAMESPACE = NamespaceId("00112233445566ff")


def block(number: int) -> BlockId:
    return BlockId(number.to_bytes(16, "big"))


def blocks(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(map(block, numbers))


def record(
    replica: ReplicaId = A,
    generation: str = "g1",
    sidecar: str = "s1",
    *,
    is_draining: bool = False,
) -> ReplicaRecord:
    return ReplicaRecord(
        replica=replica,
        endpoint=f"http://127.0.0.1:8000/{replica}",
        generation=Generation(generation),
        identity=ModelIdentity(model="m"),
        page_tokens=16,
        sidecar=sidecar,
        is_draining=is_draining,
    )


def batch(
    sequence: int,
    stored: tuple[BlockId, ...] = (),
    removed: tuple[BlockId, ...] = (),
    *,
    replica: ReplicaId = A,
    generation: str = "g1",
    tier: Tier = Tier.GPU,
    is_clear: bool = False,
) -> ChangeBatch:
    return ChangeBatch(
        replica=replica,
        generation=Generation(generation),
        namespace=NAMESPACE,
        sequence=sequence,
        tier=tier,
        stored=stored,
        removed=removed,
        is_clear=is_clear,
    )
