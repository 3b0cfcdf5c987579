"""The traces and conversations of the shared test data, as they are: compressed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from replay.format import Format, IdsKind, open_trace, write_trace
from replay.transform import held_out, limit, with_arrivals_of, with_jitter
from support.data import data_file

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from replay.trace import TraceRequest

pytestmark = pytest.mark.data

CONVERSATION = "traces/mooncake_conversation_trace.jsonl.zst"
SYNTHETIC = "traces/mooncake_synthetic_trace.jsonl.zst"
AZURE = "traces/azure2023_conv.csv.zst"
CALLS = "traces/miniswe_agent_calls.jsonl.zst"
SHAPES = {
    CONVERSATION: (Format.MOONCAKE, 512, 12_031, 3536.999),
    SYNTHETIC: (Format.MOONCAKE, 512, 3_993, 1022.025),
    AZURE: (Format.AZURE, 64, 19_366, 3501.721937),
    CALLS: (Format.AGENT, 64, 402, 552.13151),
}
TALKS = {"oasst1_en": (964, 1_645), "taubench_airline": (200, 2_454), "glaive_tools": (600, 1_897)}
"""Conversations, and answers in them that are no greeting."""


def hit_ratio(requests: Iterable[TraceRequest], block_tokens: int) -> float:
    """Return the part of all prompt tokens that a cache without bounds would have."""
    seen: set[bytes] = set()
    hits = prompt_tokens = 0
    for request in requests:
        for block in request.chain:
            if block not in seen:
                break
            hits += block_tokens
        seen.update(request.chain)
        prompt_tokens += request.prompt_tokens
    return hits / prompt_tokens


@pytest.mark.parametrize("name", SHAPES)
def test_a_trace_is_read_to_its_end(name: str) -> None:
    trace = open_trace(data_file(name))
    count, last_s = 0, 0.0
    for request in trace:
        assert request.arrival_s >= last_s
        assert len(request.chain) * trace.block_tokens <= request.prompt_tokens
        last_s = request.arrival_s
        count += 1
    assert (trace.format, trace.block_tokens, count, last_s) == SHAPES[name]
    assert trace.skipped == 0


@pytest.mark.parametrize(("name", "ratio"), [(CONVERSATION, 0.3734), (SYNTHETIC, 0.6504)])
def test_ids_of_mooncake_name_prefixes(name: str, ratio: float) -> None:
    trace = open_trace(data_file(name))
    assert hit_ratio(trace, trace.block_tokens) == pytest.approx(ratio, abs=1e-4)
    assert trace.ids_kind is IdsKind.PREFIX


def test_calls_of_agents_share_nearly_all_of_their_prompts() -> None:
    trace = open_trace(data_file(CALLS))
    assert hit_ratio(trace, 64) == pytest.approx(0.9318, abs=1e-4)
    assert len({request.session for request in trace}) == 20


@pytest.mark.parametrize("name", TALKS)
def test_conversations_become_requests(name: str) -> None:
    trace = open_trace(data_file(f"text/{name}.jsonl.zst"))
    requests = list(trace)
    assert (len({request.session for request in requests}), len(requests)) == TALKS[name]
    assert requests == list(trace)


def test_a_recording_of_a_trace_has_all_that_the_trace_has(tmp_path: Path) -> None:
    trace = open_trace(data_file(SYNTHETIC))
    write_trace(tmp_path / "recorded", trace, trace.block_tokens)
    recorded = open_trace(tmp_path / "recorded")
    for before, after in zip(trace, recorded, strict=True):
        assert after.line == before.line + 1
        assert (after.arrival_s, after.prompt_tokens, after.output_tokens, after.chain) == (
            before.arrival_s,
            before.prompt_tokens,
            before.output_tokens,
            before.chain,
        )


def test_jitter_takes_the_steps_of_three_seconds_out_of_mooncake() -> None:
    trace = open_trace(data_file(CONVERSATION))
    assert len({request.arrival_s for request in trace}) < 1_300
    spread = with_jitter(trace, 3.0, 1)
    assert len({request.arrival_s for request in spread}) > 12_000
    assert [request.line for request in spread] == [request.line for request in trace]


def test_azure_on_mooncake_keeps_arrivals_and_lengths_and_fewer_hits() -> None:
    chains, timed = open_trace(data_file(CONVERSATION)), open_trace(data_file(AZURE))
    made = list(with_arrivals_of(chains, timed, 512))
    assert len(made) == 12_031
    for one, arrival in zip(made, limit(timed, 12_031), strict=True):
        assert (one.arrival_s, one.prompt_tokens) == (arrival.arrival_s, arrival.prompt_tokens)
    assert 0.0 < hit_ratio(made, 512) < 1.0


def test_mooncake_can_be_split_by_time() -> None:
    trace = open_trace(data_file(CONVERSATION))
    before, after = held_out(trace, 0.3)
    assert sum(1 for _ in before) + sum(1 for _ in after) == 12_031
    assert next(iter(after)).arrival_s == 0
