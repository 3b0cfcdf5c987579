"""A whole life of a fleet on a cluster, as the cluster's own error counts saw it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from state.model import Fence, Generation, LeaseTotals, ReplicaId, ReplicaLoad, Tier
from state.schema import ReplicaKeys
from support.fleet_state import NAMESPACE, batch, blocks, record

if TYPE_CHECKING:
    from support.state_backend import RedisBackend
    from support.valkey_cluster import ValkeyCluster

NAMES = [ReplicaId(f"r{number}") for number in range(12)]
CHAIN = blocks(1, 2, 3)


async def errors(cluster: ValkeyCluster) -> set[str]:
    """Return the kinds of errors that any node answered."""
    kinds: set[str] = set()
    for address in cluster.addresses:
        info = (await cluster.command_on(address, "INFO", "errorstats")).decode()
        lines = [line for line in info.splitlines() if line.startswith("errorstat_")]
        kinds |= {line.removeprefix("errorstat_").partition(":")[0] for line in lines}
    return kinds


async def live(backend: RedisBackend, name: ReplicaId) -> None:
    """Let one replica do whatever a sidecar does."""
    writer = backend.writer
    await writer.register(record(name))
    assert await writer.heartbeat(record(name), ReplicaLoad(running=1)) is Fence.HELD
    stored = [batch(1, stored=blocks(8, 9), replica=name)]
    stored += [batch(2, stored=CHAIN[:2], replica=name, is_clear=True)]
    stored += [batch(3, stored=CHAIN[2:], replica=name, tier=Tier.HOST)]
    await writer.apply([*stored, batch(4, removed=blocks(9), replica=name)])
    copies = {(NAMESPACE, Tier.GPU): 2, (NAMESPACE, Tier.HOST): 1}
    await writer.copy([batch(5, stored=CHAIN[:2], replica=name, is_clear=True)])
    again = batch(6, stored=CHAIN[2:], replica=name, tier=Tier.HOST, is_clear=True)
    await writer.copy([again])
    assert await writer.swap(name, Generation("g1"), copies)


async def test_no_command_of_a_whole_life_has_keys_of_two_slots(
    cluster_backend: RedisBackend, valkey_cluster: ValkeyCluster
) -> None:
    """A86: registration, events, tiers, copies, leases, both readers; no CROSSSLOT anywhere."""
    for address in valkey_cluster.addresses:
        await valkey_cluster.command_on(address, "CONFIG", "RESETSTAT")
    mirror = await cluster_backend.mirror("r1")
    direct = await cluster_backend.direct("r2")
    for name in NAMES:
        await live(cluster_backend, name)
    owners = {await valkey_cluster.owner(ReplicaKeys(name).record) for name in NAMES}
    assert owners == set(valkey_cluster.addresses)
    mirror.publish_leases(dict.fromkeys(NAMES, LeaseTotals(inflight=2)))
    for reader in (mirror, direct, mirror):
        assert await reader.settle(30)
        found = await cluster_backend.overlap(reader, CHAIN)
        runs = {name: (run.gpu_blocks, run.any_tier_blocks) for name, run in found.items()}
        assert runs == dict.fromkeys(NAMES, (2, 3))
    assert direct.foreign_leases() == dict.fromkeys(NAMES, LeaseTotals(inflight=2))
    for name in NAMES:
        await cluster_backend.writer.register(record(name, "g2"))
        await cluster_backend.writer.deregister(name, Generation("g2"))
    for reader in (mirror, direct):
        assert await reader.settle(30)
        assert reader.replicas() == {}
    assert (mirror.failures, mirror.malformed_values) == (0, 0)
    assert not await errors(valkey_cluster) - {"NOSCRIPT", "MOVED"}
