"""Which replica is named as a source of KV pages, and when none is."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from policies.model import Reason
from policies.round_robin import RoundRobin
from policies.weighted import Weighted
from router.kv_source import KvTransferSettings
from state.memory import MemoryState
from state.model import (
    ChangeBatch,
    Generation,
    ModelIdentity,
    ReplicaId,
    ReplicaRecord,
    RouterId,
    Tier,
)
from state.prefix import namespace_of
from state.schema import decode_record, encode_record
from support.choosing import IDENTITY, Choosing, chain_for, member_of, prompt_for

A, B, C, D = (ReplicaId(name) for name in "abcd")
LONG = range(6_400)
PROMPT = range(6_450)
BY_LOAD = Weighted(tokens_scale=100_000)


def record(name: ReplicaId, **changes: object) -> ReplicaRecord:
    base = ReplicaRecord(
        replica=name,
        endpoint=f"http://127.0.0.1:{ord(name)}",
        generation=Generation("g"),
        identity=IDENTITY,
        page_tokens=16,
        sidecar=name,
        can_fetch=True,
    )
    return msgspec.structs.replace(base, **changes)


@dataclass
class Rig:
    """A fleet of which each replica holds the tokens that it is said to hold."""

    policy: Weighted | RoundRobin = BY_LOAD
    kv_transfer: KvTransferSettings = field(default_factory=KvTransferSettings)
    inflight: dict[ReplicaId, int] = field(default_factory=dict)
    records: dict[ReplicaId, ReplicaRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = MemoryState(clock=lambda: 100.0)
        self.reader = self.state.reader(RouterId("me"))
        self.choosing = Choosing(self.reader, self.policy, self.kv_transfer)

    async def add(
        self, name: ReplicaId, *held: range, tier: Tier = Tier.GPU, **changes: object
    ) -> None:
        self.records[name] = record(name, **changes)
        await self.state.register(self.records[name])
        identity = self.records[name].identity
        for number, tokens in enumerate(held, 1):
            batch = ChangeBatch(
                replica=name,
                generation=Generation("g"),
                namespace=namespace_of(identity),
                sequence=number,
                tier=tier,
                stored=chain_for(tokens, identity),
            )
            await self.state.apply([batch])

    def source(self, tokens: range = PROMPT, *, to: ReplicaId = B) -> ReplicaId | None:
        """Return the source that a request gets; the others are too busy to get it."""
        for name, count in self.inflight.items():
            for _ in range(count):
                self.choosing.know.leases.acquire(name, 0, 100.0)
        members = [member_of(one) for one in self.records.values()]
        choice = self.choosing.choose(prompt_for(tokens), members)
        assert choice.member.replica == to
        return None if choice.kv_source is None else choice.kv_source.replica


async def test_a_request_that_leaves_the_warm_replica_names_it() -> None:
    rig = Rig(policy=Weighted())
    await rig.add(A, LONG)
    for name in (B, C, D):
        await rig.add(name)
    members = [member_of(one) for one in rig.records.values()]
    for _ in range(40):
        rig.choosing.know.leases.acquire(A, 0, 100.0)
    choice = rig.choosing.choose(prompt_for(PROMPT), members)
    assert choice.decision.reason is Reason.SPILL
    assert choice.member.replica != A
    assert choice.kv_source == members[0]


async def test_any_policy_gets_a_source() -> None:
    rig = Rig(policy=RoundRobin(), inflight={A: 1})
    await rig.add(A, LONG)
    await rig.add(B)
    assert rig.source() == A


async def test_the_warm_replica_itself_needs_no_source() -> None:
    rig = Rig()
    await rig.add(A)
    await rig.add(B, LONG)
    assert rig.source(to=B) is None


@pytest.mark.parametrize(("min_tokens", "expected"), [(1_024, A), (1_025, None)])
async def test_the_source_holds_so_many_tokens_more(
    min_tokens: int, expected: ReplicaId | None
) -> None:
    """The chosen one has 512 tokens on its GPU and fetches 512 more from its own lower tier."""
    rig = Rig(kv_transfer=KvTransferSettings(min_tokens=min_tokens), inflight={A: 40})
    await rig.add(A, range(2_048))
    await rig.add(B, range(512))
    host = ChangeBatch(
        replica=B,
        generation=Generation("g"),
        namespace=namespace_of(IDENTITY),
        sequence=2,
        tier=Tier.HOST,
        stored=chain_for(range(1_024)),
    )
    await rig.state.apply([host])
    assert rig.source() == expected


async def test_the_longest_holder_is_the_source_and_among_equals_the_least_busy() -> None:
    rig = Rig(inflight={A: 50, C: 40})
    await rig.add(A, LONG)
    await rig.add(B)
    await rig.add(C, range(6_336))
    assert rig.source() == A
    even = Rig(inflight={A: 50, C: 40})
    for name in (A, B, C):
        await even.add(name, *([] if name == B else [LONG]))
    assert even.source() == C


async def test_lower_tiers_of_the_source_count() -> None:
    rig = Rig(inflight={A: 50})
    await rig.add(A, LONG, tier=Tier.DISK)
    await rig.add(B)
    assert rig.source() == A


@pytest.mark.parametrize("name", [A, B])
async def test_both_ends_must_announce_that_they_can(name: ReplicaId) -> None:
    rig = Rig(inflight={A: 50})
    await rig.add(A, LONG, can_fetch=name != A)
    await rig.add(B, can_fetch=name != B)
    assert rig.source() is None


@pytest.mark.parametrize("changed", [{"weights_revision": "2"}, {"kv_parameters": "fp8"}])
async def test_pages_of_another_identity_are_of_no_use(changed: dict[str, str]) -> None:
    other = msgspec.structs.replace(IDENTITY, **changed)
    assert isinstance(other, ModelIdentity)
    rig = Rig(inflight={A: 50})
    await rig.add(A, LONG, identity=other)
    await rig.add(B)
    assert rig.source() is None


async def test_transfers_can_be_off() -> None:
    rig = Rig(kv_transfer=KvTransferSettings(enabled=False), inflight={A: 50})
    await rig.add(A, LONG)
    await rig.add(B)
    assert rig.source() is None


async def test_a_prompt_that_is_still_computed_elsewhere_cannot_be_fetched() -> None:
    rig = Rig(inflight={A: 50})
    await rig.add(A)
    await rig.add(B)
    rig.choosing.know.pending.of("").place(A, chain_for(LONG), 100.0)
    assert rig.source() is None


async def test_a_prompt_of_bytes_has_no_source() -> None:
    rig = Rig()
    await rig.add(A, LONG)
    await rig.add(B)
    members = [member_of(one) for one in rig.records.values()]
    for _ in range(40):
        choice = rig.choosing.choose(prompt_for(PROMPT, is_exact=False), members)
        assert choice.kv_source is None


def test_a_record_of_an_older_sidecar_cannot_fetch() -> None:
    value = msgspec.json.decode(encode_record(record(A)))
    del value["can_fetch"]
    decoded = decode_record(msgspec.json.encode(value), A)
    assert decoded == record(A, can_fetch=False)
    assert decode_record(encode_record(record(A)), A) == record(A)
