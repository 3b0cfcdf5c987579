"""``warmroute record``: from what a router kept to a trace that every reader of traces takes."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import msgspec
import pytest
import zstandard

from replay.format.file import open_trace
from router.decision_log import LoggedPrompt
from router.recording import Recorded
from support.choosing import chain_for
from warmroute import record
from warmroute.cli import main

if TYPE_CHECKING:
    from pathlib import Path


def kept(at_s: float, tokens: int, block_tokens: int | None = 64, **changes: object) -> Recorded:
    chain = b"".join(chain_for(range(tokens))) if block_tokens == 64 else b""
    if block_tokens == 16:
        chain = b"".join(bytes([number]) * 16 for number in range(tokens // 16))
    one = Recorded(
        arrived_unix_s=1e9 + at_s,
        prompt_tokens=tokens,
        replica="gpu-1",
        reason="prefix",
        predicted_cached_tokens=64,
        status=200,
        outcome="done",
        duration_s=1.5,
        output_tokens=10,
        block_tokens=block_tokens,
        prompts=(LoggedPrompt(tokens, chain),),
    )
    return msgspec.structs.replace(one, **changes)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.zst"])
def test_what_is_written_is_a_trace_plain_and_compressed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    record.write(path, record.trace_of([kept(0, 200), kept(2.5, 130, tenant="acme")]))
    trace = open_trace(path)
    first, second = trace
    assert trace.block_tokens == 64
    assert (first.arrival_s, first.prompt_tokens, first.output_tokens) == (0.0, 200, 10)
    assert first.chain == chain_for(range(200))
    assert (second.arrival_s, second.tenant, second.chain) == (2.5, "acme", first.chain[:2])
    assert (path.read_bytes()[:4] == zstandard.FRAME_HEADER) is name.endswith("zst")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == [name]


def test_each_line_also_tells_the_decision_and_the_outcome(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record.write(path, record.trace_of([kept(0, 200, outcome="failed", status=502, ttft_s=0.25)]))
    header, line = map(msgspec.json.decode, path.read_bytes().splitlines())
    assert header == {
        "warmroute": "trace",
        "version": 1,
        "block_tokens": 64,
        "began_unix_s": 1e9,
    }
    assert line["arrival_s"] == 0.0
    told = ("replica", "reason", "predicted_cached_tokens", "status", "outcome", "ttft_s")
    assert [line[name] for name in told] == ["gpu-1", "prefix", 64, 502, "failed", 0.25]


def test_several_prompts_are_as_many_requests_and_share_the_output(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    two = (LoggedPrompt(128, b"a" * 32), LoggedPrompt(70, b"b" * 16))
    written = record.trace_of([kept(0, 198, prompts=two), kept(1, 64, output_tokens=None)])
    record.write(path, written)
    requests = list(open_trace(path))
    assert written.requests == 2
    assert [one.prompt_tokens for one in requests] == [128, 70, 64]
    assert [one.output_tokens for one in requests] == [5, 5, 10]


def test_chains_of_finer_blocks_are_told_in_coarser_ones() -> None:
    sizes = [(128, 16), (128, 64), (150, 48), (0, None), (130, 64)]
    written = record.trace_of([kept(at, *size) for at, size in enumerate(sizes)])
    assert written.header.block_tokens == 64
    assert written.rows[0].chain == bytes([3]) * 16 + bytes([7]) * 16
    assert [len(row.chain) // 16 for row in written.rows] == [2, 2, 0, 0, 2]
    assert written.unchained == 1
    assert [row.prompt_tokens for row in written.rows] == [128, 128, 150, 1, 130]


@pytest.mark.parametrize(
    ("sizes", "block_tokens"),
    [({}, 64), ({16: 9}, 16), ({16: 9, 64: 1}, 64), ({48: 5, 64: 4}, 48), ({16: 1, 24: 1}, 16)],
)
def test_the_block_is_the_one_that_most_chains_can_be_told_in(
    sizes: dict[int, int], block_tokens: int
) -> None:
    assert record.common_block(sizes) == block_tokens


def test_wrong_flags_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, told in (
        (("--output", str(tmp_path)), "--output"),
        (("--output", str(tmp_path / "t"), "--admin", "ftp://x"), "--admin"),
        (("--output", str(tmp_path / "t"), "--admin", "http://127.0.0.1:1"), "no router answers"),
    ):
        assert main(["record", *flags]) == 2
        assert told in capsys.readouterr().err
