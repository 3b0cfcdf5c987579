"""The example of a replay: its fleet says every key, and its trace can tell policies apart."""

from __future__ import annotations

from pathlib import Path

import msgspec
import yaml

from replay.format.file import open_trace
from replay.setting import FleetSettings
from warmroute.cli import build_parser
from warmroute.replay_fleet import fleet_of

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = {"replicas": 4, "capacity_tokens": 60_000}
"""What the file marks as an example and no default."""


def test_the_annotated_fleet_lists_every_key_with_its_default() -> None:
    raw = yaml.safe_load((EXAMPLES / "fleet.yaml").read_text(encoding="utf-8"))
    known = msgspec.to_builtins(FleetSettings())
    assert set(raw) == set(known)
    for section in ("hot", "hold"):
        assert set(raw[section]) == set(known[section])
    words = ["replay", "trace", "--fleet", str(EXAMPLES / "fleet.yaml")]
    fleet = fleet_of(build_parser("replay").parse_args(words))
    assert fleet == msgspec.structs.replace(FleetSettings(), **EXAMPLE)


def test_the_trace_shares_prefixes_and_is_larger_than_a_cache() -> None:
    trace = open_trace(EXAMPLES / "trace.jsonl")
    requests = list(trace)
    blocks = [block for request in requests for block in request.chain]
    distinct_tokens = len(set(blocks)) * trace.block_tokens
    assert len(blocks) > 2 * len(set(blocks))
    assert distinct_tokens > EXAMPLE["capacity_tokens"]
    assert max(request.prompt_tokens for request in requests) < EXAMPLE["capacity_tokens"]
