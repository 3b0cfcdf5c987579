"""What ``warmroute calibrate`` learns of an engine, and what it writes."""

from __future__ import annotations

import msgspec
import pytest
import yaml

from policies.prefill import PrefillCost
from replay.fit import StepFit
from replay.probe import EngineFacts
from sidecar.clock import StepCost
from sidecar.scrape import ModelCard
from sidecar.setting import WorkerSettings
from warmroute.calibrate import Calibration, cost_file
from warmroute.cli import UsageError
from warmroute.engine_facts import Limits, choose_model, facts_of, is_loopback, parse_limits

COST = StepCost(
    step_ms=6.0,
    prefill_token_ms=1 / 30,
    attention_pair_ms=1.0603e-6,
    decode_sequence_ms=0.0,
    kv_token_read_ms=4e-5,
)
METRICS = """\
vllm:cache_config_info{block_size="32",enable_prefix_caching="True",num_gpu_blocks="100"} 1.0
"""
VLLM_INFO = """{"vllm_config": {"scheduler_config": {"max_num_batched_tokens": 2048,
"max_num_seqs": 16, "policy": "fcfs"}, "model_config": {}}, "vllm_env": {}}"""


def found(cost: StepCost = COST) -> Calibration:
    fit = StepFit(
        cost=cost, overhead_ms=3.25, overhead_token_ms=0.0, error=0.01, rows=90, outliers=2
    )
    return Calibration(
        engine="http://127.0.0.1:1",
        facts=EngineFacts(model="m"),
        fit=fit,
        prefill=PrefillCost(token_ms=0.03, attention_pair_ms=1e-6),
        shares={},
        typical_tokens=(1, 1),
        runs=(),
        warnings=(),
    )


def test_the_file_has_the_cost_model_and_nothing_else() -> None:
    read = yaml.safe_load(cost_file(found()))
    assert set(read) == {field.name for field in msgspec.structs.fields(StepCost)}
    assert all(isinstance(value, float | int) for value in read.values()), read
    cost = msgspec.convert(read, StepCost)
    for name in read:
        assert getattr(cost, name) == pytest.approx(getattr(COST, name), rel=1e-5), name


@pytest.mark.parametrize("value", [0.0, 1e-7, 4e-5, 1.0, 123456.7, 1e9, 5e20])
def test_numbers_of_any_size_are_read_as_numbers(value: float) -> None:
    cost = StepCost(**dict.fromkeys(msgspec.structs.asdict(COST), value))
    read = yaml.safe_load(cost_file(found(cost)))
    assert msgspec.convert(read, StepCost).step_ms == pytest.approx(value, rel=1e-5)


def test_the_suggestion_is_a_line_of_configuration() -> None:
    comments = [line for line in cost_file(found()).splitlines() if "prefill:" in line]
    read = yaml.safe_load(comments[0].removeprefix("# "))
    assert msgspec.convert(read["prefill"], PrefillCost) == found().prefill


@pytest.mark.parametrize(
    ("url", "is_local"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.9.9.9:8000", True),
        ("http://localhost:8000", True),
        ("http://[::1]:8000", True),
        ("http://10.0.0.1:8000", False),
        ("http://localhost.example.com:8000", False),
        ("http://127.0.0.1@10.0.0.1:8000", False),
        ("http://0.0.0.0:8000", False),
        ("8000", False),
    ],
)
def test_only_this_machine_is_loopback(url: str, *, is_local: bool) -> None:
    assert is_loopback(url) is is_local


def test_limits_come_from_vllm_or_the_worker_where_they_tell() -> None:
    assert parse_limits(VLLM_INFO) == Limits(step_tokens=2048, max_sequences=16)
    clock, arithmetic = WorkerSettings(compute="synthetic", max_num_seqs=9), WorkerSettings()
    for settings, step_tokens, sequences in ((clock, 8192, 9), (arithmetic, 512, 256)):
        body = msgspec.json.encode({"worker_settings": settings}).decode()
        assert parse_limits(body) == Limits(step_tokens=step_tokens, max_sequences=sequences)
    for other in ("", "no", "[]", '{"vllm_config": "text"}', '{"worker_settings": {"pages": -1}}'):
        assert parse_limits(other) == Limits()


def test_what_the_user_says_counts_before_what_the_engine_tells() -> None:
    card = ModelCard(id="m", max_model_len=4096)
    told = Limits(step_tokens=2048, max_sequences=16)
    facts = facts_of(card, METRICS, Limits(step_tokens=512), told)
    assert (facts.step_tokens, facts.max_sequences) == (512, 16)
    assert (facts.page_tokens, facts.capacity_tokens, facts.context_tokens) == (32, 3200, 4096)
    assert facts.is_caching is None
    assert "step_tokens" in facts.told
    silent = facts_of(ModelCard(id="m"), "", Limits(), Limits())
    assert (silent.step_tokens, silent.told) == (8192, frozenset())


def test_an_engine_without_a_prefix_cache_is_known() -> None:
    without = METRICS.replace("True", "False")
    assert facts_of(ModelCard(id="m"), without, Limits(), Limits()).is_caching is False


def test_the_model_is_the_only_base_or_the_named_one() -> None:
    base, adapter = ModelCard(id="base"), ModelCard(id="adapter", parent="base")
    assert choose_model([base, adapter], None) == base
    assert choose_model([base, adapter], "adapter") == adapter
    with pytest.raises(UsageError, match="absent is not found: the engine serves base, adapter"):
        choose_model([base, adapter], "absent")
    with pytest.raises(UsageError, match="one of those that the engine serves: base, other"):
        choose_model([base, ModelCard(id="other")], None)
    with pytest.raises(UsageError, match="no model"):
        choose_model([], None)
