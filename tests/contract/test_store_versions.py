"""Two versions of the layout side by side on one server, as while a deployment is upgraded."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from state.client import run_command
from state.model import LeaseTotals, ModelIdentity, ReplicaLoad
from state.prefix import chain_root, namespace_of
from state.schema import (
    KEY_PREFIX,
    LEASES,
    ROUTER_INDEX,
    ReplicaKeys,
    decode_leases,
    decode_load,
    decode_record,
)
from support.fleet_state import A, B, batch, blocks, record

if TYPE_CHECKING:
    import pytest

    from support.state_backend import RedisBackend
    from support.valkey import ValkeyProcess

_NEXT_VERSION = """
import asyncio, importlib.util, json, pathlib, random, sys, time, types

spec = importlib.util.find_spec("state.schema")
source = pathlib.Path(spec.origin).read_text()
assert source.count('"wr:1"') == 1
module = types.ModuleType("state.schema")
module.__file__ = spec.origin
sys.modules["state.schema"] = module
exec(compile(source.replace('"wr:1"', '"wr:2"'), spec.origin, "exec"), module.__dict__)

from state.client import RedisSettings, command_client
from state.mirror import Mirror
from state.model import LeaseTotals, RouterId
from state.redis_writer import RedisWriter
from support.fleet_state import A, B, batch, blocks, record

async def main():
    settings = RedisSettings(url=sys.argv[1], command_timeout_s=10.0, connect_timeout_s=10.0)
    client = command_client(settings)
    writer = RedisWriter(client, clock=time.monotonic, rng=random.Random(1))
    await writer.register(record(A, generation="next"))
    await writer.apply([batch(1, stored=blocks(7, 8, 9), generation="next")])
    await writer.register(record(B, generation="next"))
    async with Mirror(settings, RouterId("next"), clock=time.monotonic,
                      rng=random.Random(2)) as mirror:
        mirror.publish_leases({A: LeaseTotals(inflight=40)})
        assert await mirror.settle(10)
        print(json.dumps({
            "replicas": {name: one.record.generation for name, one in mirror.replicas().items()},
            "old": len(mirror.overlap(blocks(1, 2))),
            "own": mirror.overlap(blocks(7, 8, 9))[A].gpu_blocks,
            "leases": len(mirror.foreign_leases()),
            "malformed": mirror.malformed_values,
        }), flush=True)
        sys.stdin.readline()
    await client.aclose()

asyncio.run(main())
"""


async def test_versions_side_by_side_see_nothing_of_each_other(
    redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    """R-25: the same replica, the same blocks, another version in the keys."""
    await redis_backend.writer.register(record(A))
    await redis_backend.writer.apply([batch(1, stored=blocks(1, 2))])
    mirror = await redis_backend.mirror()
    mirror.publish_leases({A: LeaseTotals(inflight=3)})
    assert await mirror.settle(30)
    other = subprocess.Popen(  # noqa: ASYNC220 - its pipes are used in threads
        [sys.executable, "-c", _NEXT_VERSION, valkey.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    try:
        assert other.stdout is not None
        told: dict[str, Any] = json.loads(await asyncio.to_thread(other.stdout.readline))
        assert told == {
            "replicas": {"a": "next", "b": "next"},
            "old": 0,
            "own": 3,
            "leases": 0,
            "malformed": 0,
        }
        assert await mirror.settle(30)
        seen = {name: one.record.generation for name, one in mirror.replicas().items()}
        assert seen == {A: "g1"}
        assert mirror.overlap(blocks(1, 2))[A].gpu_blocks == 2
        assert mirror.overlap(blocks(7, 8, 9)) == {}
        assert mirror.foreign_leases() == {}
        assert (mirror.failures, mirror.malformed_values) == (0, 0)
        await redis_backend.writer.deregister(A, record().generation)
        assert await run_command(redis_backend.client, "EXISTS", "wr:2:{a}:record") == 1
    finally:
        await asyncio.to_thread(other.communicate, b"\n")
    assert other.returncode == 0


def test_every_key_carries_the_version() -> None:
    """R-25."""
    keys = ReplicaKeys(A)
    named = [getattr(keys, name) for name in ReplicaKeys.__slots__ if not name.startswith("_")]
    for key in (*named, keys.residency("x"), keys.copy("x"), LEASES, ROUTER_INDEX):
        assert key.startswith(f"{KEY_PREFIX}:")
    assert KEY_PREFIX.rpartition(":")[2].isdecimal()


def test_other_chains_have_other_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """R-25: what makes chains, too, is in the key: a formula that drifted overlaps with nothing."""
    identity = ModelIdentity(model="m")
    others = [
        msgspec.structs.replace(identity, weights_revision="w2"),
        msgspec.structs.replace(identity, block_tokens=128),
    ]
    namespaces = {namespace_of(one) for one in (identity, *others)}
    assert len(namespaces) == 3
    before = namespace_of(identity), chain_root(identity, 0)
    monkeypatch.setattr("state.prefix.CHAIN_VERSION", 2)
    assert namespace_of(identity) != before[0]
    assert chain_root(identity, 0) != before[1]


def test_values_of_the_next_version_with_more_in_them_are_still_read() -> None:
    """R-25: within one version of the keys, values only grow; what is not known is left out."""
    load = msgspec.json.encode({**msgspec.to_builtins(ReplicaLoad(running=3)), "novel": [1]})
    assert decode_load(load) == ReplicaLoad(running=3)
    told = msgspec.json.encode({**msgspec.to_builtins(record(B)), "novel": {"x": 1}})
    assert decode_record(told, B) == record(B)
    row = (2, 100, 1, 5.0, (), "novel")
    leases = decode_leases(msgspec.msgpack.encode({"a": row}))
    assert leases == {A: LeaseTotals(inflight=2, uncached_tokens=100, prefilling=1, backlog_ms=5.0)}
