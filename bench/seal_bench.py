"""What seals of the shared state cost: CPU of this thread, best of several rounds.

    .venv/bin/python bench/seal_bench.py

Nothing is read or written.
"""

from __future__ import annotations

import sys
import time
import timeit
from typing import TYPE_CHECKING, Final

from router.salt import salt_field
from router.session import may_name_session, scoped_session
from state.model import (
    BlockId,
    ChangeBatch,
    Generation,
    LeaseTotals,
    ModelIdentity,
    NamespaceId,
    ReplicaId,
    ReplicaRecord,
    Tip,
)
from state.schema import (
    ENTRY_FIELD,
    LEASES,
    ReplicaKeys,
    change_entry,
    decode_entry,
    decode_leases,
    decode_record,
    encode_entry,
    encode_leases,
    encode_record,
    parts_of,
)
from state.seal import NO_SEAL, Kind, Seal
from state.seal_guard import SealGuard

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS: Final = 9
ROUND_S: Final = 0.05
REPLICA: Final = ReplicaId("w0")
KEYS: Final = ReplicaKeys(REPLICA)
GENERATION: Final = Generation("g1")
ENTRY_BLOCKS: Final = (1, 8, 64, 1024, 4096)


def cpu_us(work: Callable[[], object]) -> float:
    """Return the CPU time of one call, in us."""
    timer = timeit.Timer(work, timer=time.thread_time)
    calls = max(1, round(ROUND_S / max(1e-7, timer.timeit(20) / 20)))
    return min(timer.repeat(ROUNDS, calls)) / calls * 1e6


def row(name: str, seal: float, check: float, decode: float) -> None:
    """Print one line of the table."""
    sys.stdout.write(f"{name:<28} {seal:9.2f} {check:9.2f} {decode:9.2f}\n")


def main() -> None:
    """Print what sealing, opening and decoding take, in us."""
    seal = Seal(b"k" * 32, time.time)
    guard = SealGuard(seal, is_required=True)
    sys.stdout.write(f"{'us of CPU':<28} {'seal':>9} {'check':>9} {'decode':>9}\n")
    for count in ENTRY_BLOCKS:
        ids = tuple(BlockId(number.to_bytes(16, "big")) for number in range(count))
        batch = ChangeBatch(
            replica=REPLICA,
            generation=GENERATION,
            namespace=NamespaceId("0" * 16),
            sequence=1,
            stored=ids,
        )
        part = next(parts_of(batch))
        value = encode_entry(change_entry(batch, part, NO_SEAL))
        measure(f"entry of {count} blocks", guard, Kind.CHANGE, KEYS.changes, value, _entry)
    record = ReplicaRecord(
        replica=REPLICA,
        endpoint="http://10.0.0.1:8000",
        generation=GENERATION,
        identity=ModelIdentity(model="m"),
        page_tokens=16,
        sidecar="s1",
    )
    value = encode_record(record)
    measure("record", guard, Kind.RECORD, KEYS.record, value, lambda v: decode_record(v, REPLICA))
    tips = tuple(Tip(20, b"x" * 8) for _ in range(16))
    total = LeaseTotals(inflight=9, uncached_tokens=9_000, prefilling=3, tips=tips)
    leases = encode_leases({ReplicaId(f"w{number}"): total for number in range(16)}, NO_SEAL)
    measure("leases on 16 replicas", guard, Kind.LEASES, LEASES, leases, decode_leases)
    sessions()


def _entry(value: bytes) -> object:
    return decode_entry((ENTRY_FIELD, value))


def measure(
    name: str,
    guard: SealGuard,
    kind: Kind,
    key: str,
    value: bytes,
    decode: Callable[[bytes], object],
) -> None:
    """Print one kind of value."""
    sealed = guard.sealed(kind, key, value)
    row(
        name,
        cpu_us(lambda: guard.sealed(kind, key, value)),
        cpu_us(lambda: guard.open(kind, key, sealed)),
        cpu_us(lambda: decode(value)),
    )


def sessions() -> None:
    """Print what a body of 8 KB takes that names a session, and one that does not."""
    text = b"and then it rained " * 425
    plain = b'{"model":"m","messages":[{"role":"user","content":"' + text + b'"}]}'
    named = plain[:-1] + b',"session_id":"s-1"}'
    key, field = b"k" * 32, salt_field("x" * 43)
    for name, work in (
        ("no session, tenants", lambda: scoped_session(plain, key, field)),
        ("a session, tenants", lambda: scoped_session(named, key, field)),
        ("no session, no tenants", lambda: may_name_session(plain)),
    ):
        sys.stdout.write(f"{name:<28} {cpu_us(work):9.2f}\n")


if __name__ == "__main__":
    main()
