from __future__ import annotations

import pytest

from sidecar.scrape import EngineClient, parse_metrics, reachable_endpoint
from state.model import ReplicaLoad

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.5
process_start_time_seconds 1.79595818921e+09
vllm:cache_config_info{block_size="32",num_gpu_blocks="300",prefix_match_unit="None"} 1.0
"""


def test_the_needed_numbers_are_found() -> None:
    found = parse_metrics(VLLM)
    assert found.load == ReplicaLoad(running=3, queued=2, kv_used_fraction=0.5)
    assert (found.page_tokens, found.capacity_pages) == (32, 300)
    assert found.started_at_s == 1795958189.21


def test_what_is_not_told_is_unknown_and_not_zero() -> None:
    found = parse_metrics("vllm:num_requests_running 0.0\n")
    assert found.load == ReplicaLoad(running=0, queued=None, kv_used_fraction=None)
    assert found.page_tokens is None
    assert parse_metrics("").started_at_s is None


def test_ranks_are_summed() -> None:
    text = (
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.6\n'
    )
    found = parse_metrics(text)
    assert found.load.running == 7
    assert found.load.kv_used_fraction == pytest.approx(0.4)


def test_sglang_tells_the_same_under_other_names() -> None:
    text = 'sglang:num_running_reqs{a="b"} 3.0\nsglang:num_queue_reqs 1\nsglang:token_usage 0.1\n'
    assert parse_metrics(text).load == ReplicaLoad(running=3, queued=1, kv_used_fraction=0.1)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1.0", "x", ""])
def test_numbers_that_make_no_sense_are_unknown(value: str) -> None:
    assert parse_metrics(f"vllm:num_requests_running {value}\n").load.running is None


def test_sizes_that_make_no_sense_are_unknown() -> None:
    text = 'vllm:cache_config_info{block_size="None",num_gpu_blocks="0"} 1.0\n'
    assert parse_metrics(text).page_tokens is None
    assert parse_metrics(text).capacity_pages is None


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:5601", "gpu-7", "tcp://gpu-7:5601"),
        ("tcp://0.0.0.0:5601", "10.0.0.7", "tcp://10.0.0.7:5601"),
        ("tcp://[::]:5601", "::1", "tcp://[::1]:5601"),
        ("tcp://127.0.0.1:5601", "gpu-7", "tcp://127.0.0.1:5601"),
        ("ipc:///run/kv", "gpu-7", "ipc:///run/kv"),
        ("inproc://kv", "gpu-7", None),
        ("tcp://gpu-7", "gpu-7", None),
        ("tcp://:5601", "gpu-7", None),
        ("http://gpu-7:5601", "gpu-7", None),
        ("tcp://gpu-7:0", "gpu-7", None),
        ("tcp://gpu-7:65536", "gpu-7", None),
        ("tcp://gpu-7:²", "gpu-7", None),
        ("", "gpu-7", None),
    ],
)
def test_a_bound_address_becomes_one_to_dial(
    endpoint: str, host: str, expected: str | None
) -> None:
    assert reachable_endpoint(endpoint, host) == expected


def test_the_endpoint_has_neither_path_nor_credentials() -> None:
    client = EngineClient("http://user:secret@gpu-7:8000/v1/?a=b")
    assert client.endpoint == "http://gpu-7:8000"
    assert client.address == "gpu-7:8000"


@pytest.mark.parametrize("url", ["", "gpu-7:8000", "ftp://gpu-7", "http://"])
def test_a_url_that_cannot_be_an_engine_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="engine"):
        EngineClient(url)
