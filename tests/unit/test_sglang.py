"""What SGLang tells of itself, and the names that its events give to pages."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from sidecar.event import StoredPages, decode_batch
from sidecar.scrape import reachable_endpoint
from sidecar.sglang import SglangInfo, parse_info, parse_loads
from sidecar.subscriber import EventSource
from state.model import ReplicaLoad, Tier
from state.prefix import pack_tokens, salt_scope
from support.sglang_tree import SglangTree, event_hash, page_digest, salt_digest

BLOCK = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "topic": "kv",
    "block_size": 64,
    "dp_size": 2,
}
CONFIG = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}
NEWEST: dict[str, Any] = {
    "served_model_name": "m",
    "page_size": 64,
    "dp_size": 2,
    "max_total_num_tokens": 128_000,
    "internal_states": [{}, {}],
    "version": "0.5.12",
    "enable_cache_report": False,
    "kv_events_config": json.dumps(CONFIG),
    "kv_events": BLOCK,
}


def info_of(raw: object) -> SglangInfo | None:
    return parse_info(msgspec.json.encode(raw), lambda bound: reachable_endpoint(bound, "10.0.0.7"))


def test_a_descriptor_tells_the_cache_and_where_each_rank_publishes() -> None:
    """The publisher and the replay of rank r are on the configured ports + r."""
    info = info_of(NEWEST)
    assert info is not None
    assert (info.page_tokens, info.capacity_tokens, info.capacity_pages) == (64, 128_000, 2_000)
    assert (info.ranks, info.version, info.does_report_hits) == (2, "0.5.12", False)
    assert info.sources == {
        0: EventSource(events="tcp://10.0.0.7:5557", replay="tcp://10.0.0.7:6557"),
        1: EventSource(events="tcp://10.0.0.7:5558", replay="tcp://10.0.0.7:6558"),
    }


def test_the_replay_is_where_the_block_says() -> None:
    """0.5.23 has its port there; the text of the option need not be shown."""
    block = {**BLOCK, "replay_endpoint_port_base": 7557}
    for config in (json.dumps(CONFIG), None):
        info = info_of({**NEWEST, "kv_events": block, "kv_events_config": config})
        assert info is not None
        replays = [source.replay for source in info.sources.values()]
        assert replays == ["tcp://10.0.0.7:7557", "tcp://10.0.0.7:7558"]


def test_older_servers_tell_only_what_they_were_started_with() -> None:
    raw = {key: value for key, value in NEWEST.items() if key != "kv_events"} | {"dp_size": 1}
    info = info_of(raw)
    assert info is not None
    replay = "tcp://10.0.0.7:6557"
    assert info.sources == {0: EventSource(events="tcp://10.0.0.7:5557", replay=replay)}
    assert info.page_tokens == 64


@pytest.mark.parametrize(
    "config",
    [
        None,
        "",
        "not JSON",
        "[]",
        '{"publisher": "null"}',
        '{"endpoint": "tcp://*:5557"}',
        '{"publisher": "zmq", "endpoint": "inproc://kv"}',
        '{"publisher": "zmq", "endpoint": "tcp://*:0"}',
        '{"publisher": "zmq", "endpoint": "tcp://*:65536"}',
        '{"publisher": "zmq", "endpoint": 7}',
        7,
    ],
)
def test_events_that_are_off_or_out_of_reach_have_no_source(config: object) -> None:
    """B50: a server without events is known as one."""
    info = info_of(NEWEST | {"kv_events": None, "kv_events_config": config})
    assert info is not None
    assert info.sources == {}


@pytest.mark.parametrize(
    "change",
    [
        {"endpoint_port_base": 0},
        {"endpoint_port_base": "5557"},
        {"endpoint_port_base": True},
        {"endpoint_host": ""},
        {"publisher": "nats"},
    ],
)
def test_a_block_that_makes_no_sense_is_not_used(change: dict[str, object]) -> None:
    info = info_of(NEWEST | {"kv_events": BLOCK | change, "kv_events_config": None})
    assert info is not None
    assert info.sources == {}


def test_ports_beyond_the_last_have_no_rank_and_ranks_are_bounded() -> None:
    block = BLOCK | {"endpoint_port_base": 65_535, "dp_size": 10**9}
    info = info_of(NEWEST | {"kv_events": block})
    assert info is not None
    assert list(info.sources) == [0]
    assert info.ranks == 1024


def test_hosts_are_taken_as_they_are_and_wildcards_become_the_engines() -> None:
    for host, dialled in (("10.1.1.1", "10.1.1.1"), ("::", "10.0.0.7"), ("fd00::1", "[fd00::1]")):
        info = info_of(NEWEST | {"kv_events": BLOCK | {"endpoint_host": host, "dp_size": 1}})
        assert info is not None
        assert info.sources[0].events == f"tcp://{dialled}:5557"


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"\xff", b'{"vllm_config": {}}', b"[" * 9999]
)
def test_what_is_no_descriptor_of_sglang_is_none(body: bytes) -> None:
    assert parse_info(body, lambda bound: bound) is None


@pytest.mark.parametrize("size", [0, -1, True, "64", None, 1.5])
def test_sizes_that_make_no_sense_are_unknown(size: object) -> None:
    raw = NEWEST | {"page_size": size, "kv_events": None, "max_total_num_tokens": size}
    info = info_of(raw)
    assert info is not None
    assert (info.page_tokens, info.capacity_tokens, info.capacity_pages) == (None, None, None)


def test_loads_are_summed_over_ranks() -> None:
    """B35: the load of an engine without metrics is its own word."""
    loads = [
        {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.2},
        {"dp_rank": 1, "num_running_reqs": 4, "num_waiting_reqs": 0, "token_usage": 0.6},
    ]
    load = parse_loads(msgspec.json.encode({"loads": loads}))
    assert load is not None
    assert (load.running, load.queued) == (7, 1)
    assert load.kv_used_fraction == pytest.approx(0.4)


def test_the_older_path_counts_waiting_requests_among_all() -> None:
    body = b'[{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 99}]'
    assert parse_loads(body) == ReplicaLoad(running=3, queued=2)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"loads": []}',
        b'{"loads": [7]}',
        b'{"loads": [{"num_running_reqs": 1}]}',
        b'{"loads": [{"num_running_reqs": -1, "num_waiting_reqs": 0}]}',
        b'[{"num_reqs": 5}]',
    ],
)
def test_a_load_that_is_not_told_is_unknown_and_not_zero(body: bytes) -> None:
    assert parse_loads(body) is None


def names_of(tokens: list[int], page_tokens: int, salt: str = "") -> list[int]:
    digest, names = salt_digest(salt), []
    for start in range(0, len(tokens), page_tokens):
        digest = page_digest(digest, tokens[start : start + page_tokens])
        names.append(event_hash(digest))
    return names


@pytest.mark.parametrize(
    ("tokens", "page_tokens", "salt", "names"),
    [
        (
            list(range(1, 49)),
            16,
            "",
            [8635429971592222890, 1256577331724852459, 5689809685380680247],
        ),
        (
            list(range(1, 49)),
            16,
            "tenant-a",
            [3451139630862032982, -5034188771989179167, 5654818732189347756],
        ),
        ([1, 2, 7, 8], 2, "", [3817746824117602890, 863173374788446151]),
        ([1, 2, 7, 8], 2, "tenant-a", [31502315585564397, 4743673046050733608]),
        ([0], 1, "", [-2360060374177730597]),
        (
            [1, 2, 3, 4],
            1,
            "",
            [
                7470307888890966271,
                -1634645291211865391,
                7325169757385981536,
                -4123756397210254169,
            ],
        ),
    ],
)
def test_the_engine_of_these_tests_names_pages_as_sglang_does(
    tokens: list[int], page_tokens: int, salt: str, names: list[int]
) -> None:
    """C45: known answers of SGLang itself."""
    assert names_of(tokens, page_tokens, salt) == names


@pytest.mark.parametrize("encoding", ["array", "map"])
def test_both_encodings_of_a_salted_run_decode_to_the_same(encoding: str) -> None:
    """B12: signed hashes are the same 64 bits. C46: the salt of a store separates its pages."""
    tree = SglangTree(2, 100, "array" if encoding == "array" else "map")
    tree.insert([1, 2, 7, 8, 9], "tenant-a")
    batch = decode_batch(msgspec.msgpack.encode([1.0, tree.take(), 0]))
    first, second = batch.events
    assert isinstance(first, StoredPages)
    assert isinstance(second, StoredPages)
    assert (first.handles, first.parent) == ((31502315585564397,), None)
    assert (second.handles, second.parent) == ((4743673046050733608,), 31502315585564397)
    assert first.packed_tokens == pack_tokens([1, 2])
    assert first.scope == second.scope == salt_scope("tenant-a")
    assert first.tier is Tier.GPU


def test_a_tree_splits_and_evicts_leaf_by_leaf() -> None:
    tree = SglangTree(2, 8, "array")
    tree.insert([1, 1, 2, 2, 3, 3], "")
    tree.insert([1, 1, 4, 4], "")  # splits after the first page
    assert (tree.match([1, 1, 2, 2, 3, 3], ""), tree.match([1, 1, 4, 4, 5], "")) == (4, 4)
    tree.take()
    tree.insert([1, 1, 4, 4, 6, 6, 7, 7], "")  # the other branch is older: both of its pages go
    assert [event[0] for event in tree.take()] == ["BlockRemoved"] * 2 + ["BlockStored"] * 2
    assert tree.match([1, 1, 2, 2, 3, 3], "") == 2
