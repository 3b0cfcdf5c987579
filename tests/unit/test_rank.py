"""Data-parallel ranks: what of an engine's answers is one rank's, and what all have in common."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.fleet import FleetTable
from router.health import Health
from router.health_setting import HealthSettings
from router.rank import UNPINNED_PATHS, mates, one_of_each_engine
from router.upstream import UpstreamPool, UpstreamSettings
from sidecar.profile import SettingsError, SidecarSettings
from sidecar.rank import offset_endpoint, rank_loads, rank_metrics, rank_settings
from sidecar.scrape import parse_metrics
from sidecar.sglang import parse_loads
from state.memory import MemoryState
from state.model import (
    MAX_RANKS,
    ChangeBatch,
    Generation,
    ReplicaId,
    ReplicaLoad,
    ReplicaRecord,
    RouterId,
)
from state.prefix import namespace_of
from state.schema import decode_record, encode_record
from support.choosing import IDENTITY, Choosing, chain_for, member_of, prompt_for
from support.sidecar import eventually

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:prompt_tokens_total{engine="1",model_name="m"} 70.0
vllm:cache_config_info{engine="0",num_gpu_blocks="190",num_gpu_blocks_override="9"} 1
vllm:cache_config_info{engine="1",num_gpu_blocks="190",num_gpu_blocks_override="9"} 1
process_start_time_seconds 17.5
"""


def test_a_rank_has_the_load_and_the_capacity_of_its_own_label() -> None:
    first, second = (parse_metrics(rank_metrics(VLLM, rank, 2)) for rank in (0, 1))
    assert first.load == ReplicaLoad(running=3, queued=0, kv_used_fraction=0.25)
    assert second.load == ReplicaLoad(running=5, queued=2, kv_used_fraction=0.75)
    assert (first.capacity_pages, second.capacity_pages) == (95, 95)
    assert (first.prompt_tokens, second.prompt_tokens) == (None, 70)
    assert first.started_at_s == second.started_at_s == 17.5


def test_ranks_of_sglang_are_told_by_their_own_label() -> None:
    text = (
        'sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 4.0\n'
        'sglang:num_running_reqs{dp_rank="1",tp_rank="0"} 6.0\n'
    )
    assert parse_metrics(rank_metrics(text, 1, 2)).load.running == 6


def test_a_figure_without_a_rank_is_that_of_none() -> None:
    """The sum over all ranks would make each of them look busy."""
    text = "vllm:num_requests_running 8.0\nsglang:num_running_reqs 8.0\n"
    assert parse_metrics(rank_metrics(text, 0, 2)).load == ReplicaLoad()
    shape = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n'
    assert parse_metrics(rank_metrics(shape, 1, 2)).capacity_pages == 50


def test_loads_of_sglang_are_those_of_the_rank() -> None:
    rows = [
        {"dp_rank": rank, "num_running_reqs": 4 + rank, "num_waiting_reqs": rank, "token_usage": 0}
        for rank in range(2)
    ]
    for body in ({"loads": rows}, rows):
        load = parse_loads(rank_loads(msgspec.json.encode(body), 1))
        assert load == ReplicaLoad(running=5, queued=1, kv_used_fraction=0.0)
    assert parse_loads(rank_loads(msgspec.json.encode(rows), 2)) is None
    assert parse_loads(rank_loads(b"<html>", 0)) is None


def test_ranks_publish_on_the_ports_that_follow() -> None:
    settings = SidecarSettings(
        engine="http://gpu:8000", events="tcp://gpu:5557", replay="tcp://[::1]:6557", ranks=3
    )
    last = rank_settings(settings, "gpu:8000", 2)
    assert (last.events, last.replay) == ("tcp://gpu:5559", "tcp://[::1]:6559")
    assert last.replica == "gpu:8000@dp2"


@pytest.mark.parametrize("endpoint", ["ipc:///run/events", "tcp://gpu", "gpu:5557"])
def test_an_endpoint_without_a_port_cannot_be_that_of_several_ranks(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="expected tcp://host:port"):
        offset_endpoint(endpoint, 1)


def record_of(name: str, port: int, rank: int | None) -> ReplicaRecord:
    return ReplicaRecord(
        replica=ReplicaId(name),
        endpoint=f"http://127.0.0.1:{port}",
        generation=Generation("g"),
        identity=IDENTITY,
        page_tokens=16,
        sidecar="s",
        rank=rank,
    )


def test_a_record_names_its_rank_and_nothing_else() -> None:
    record = record_of("gpu@dp1", 1, 1)
    assert decode_record(encode_record(record), record.replica) == record
    for wrong in (b'"1\\r\\nX-Evil: 1"', b"-1", b"1.5", str(MAX_RANKS).encode()):
        value = encode_record(record).replace(b'"rank":1', b'"rank":' + wrong)
        assert decode_record(value, record.replica) is None


async def state_of(*records: ReplicaRecord) -> MemoryState:
    state = MemoryState(clock=lambda: 100.0)
    for record in records:
        await state.register(record)
    return state


async def test_ranks_of_one_engine_are_mates_and_other_replicas_are_not() -> None:
    records = [record_of("a@dp0", 1, 0), record_of("a@dp1", 1, 1), record_of("b@dp0", 2, 0)]
    state = await state_of(*records, record_of("c", 1, None))
    members = FleetTable(state.reader(RouterId("me")), ()).members()
    of = {name: set(mates(members.values(), member)) for name, member in members.items()}
    assert of == {
        "a@dp0": {"a@dp0", "a@dp1"},
        "a@dp1": {"a@dp0", "a@dp1"},
        "b@dp0": {"b@dp0"},
        "c": {"c"},
    }
    names = [member.replica for member in one_of_each_engine(members.values())]
    assert names == ["a@dp0", "b@dp0", "c"]


async def test_where_the_engine_chooses_the_rank_nothing_is_predicted_of_one() -> None:
    """On /v1/responses vLLM does not read the header; its ranks are told apart by load only."""
    assert "/v1/responses" in UNPINNED_PATHS
    warm, cold = record_of("a@dp0", 1, 0), record_of("a@dp1", 1, 1)
    state = await state_of(warm, cold)
    batch = ChangeBatch(
        replica=warm.replica,
        generation=warm.generation,
        namespace=namespace_of(IDENTITY),
        sequence=1,
        stored=chain_for(range(6_400)),
    )
    await state.apply([batch])
    choosing = Choosing(state.reader(RouterId("me")))
    members = [member_of(warm), member_of(cold)]
    for can_pin, tokens in ((True, 6_400), (False, 0)):
        routed = choosing.chooser.route(prompt_for(range(6_450)))
        routed.can_pin = can_pin
        choice = choosing.chooser.choose(routed, members)
        assert choice is not None
        assert choice.decision.predicted_cached_tokens == tokens
        assert choice.is_told is can_pin


async def test_all_ranks_are_up_and_down_together_by_one_check() -> None:
    checks: list[str] = []
    is_well = True

    async def health_of(request: web.Request) -> web.Response:
        checks.append(request.path)
        return web.Response(status=200 if is_well else 500)

    app = web.Application()
    app.router.add_get("/health", health_of)
    server = TestServer(app)
    await server.start_server()
    records = [record_of(f"a@dp{n}", server.port or 0, n) for n in range(4)]
    names = [record.replica for record in records]
    state = await state_of(*records)
    fleet, pool = FleetTable(state.reader(RouterId("me")), ()), UpstreamPool(UpstreamSettings())
    health = Health(fleet, pool, HealthSettings(interval_s=60.0), random.Random(1))
    task = asyncio.create_task(health.run())
    try:
        await eventually(lambda: bool(checks))
        await asyncio.sleep(0.3)
        assert len(checks) == 1
        assert all(health.is_up(name) for name in names)
        is_well = False
        health.refused(names[2])
        assert not any(health.is_up(name) for name in names)
        await state.deregister(names[0], records[0].generation)
        is_well = True
        await eventually(lambda: all(health.is_up(name) for name in names[1:]))
        assert not health.is_up(names[0])
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await pool.close()
        await server.close()
