"""Mooncake traces: chains, arrivals, and what is wrong with a line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from replay.format import IdsKind, ReadOptions, TraceFile, open_trace
from replay.trace import TraceError
from state.prefix import common_blocks

if TYPE_CHECKING:
    from pathlib import Path

ANY = 1_000


def row(ids: list[int] | object, **changes: object) -> str:
    blocks = len(ids) if isinstance(ids, list) else 1
    fields = {
        "timestamp": ANY,
        "input_length": 512 * blocks,
        "output_length": 2,
        "hash_ids": ids,
    }
    return json.dumps(fields | changes)


def opened(folder: Path, *rows: str, options: ReadOptions | None = None) -> TraceFile:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(rows))
    return open_trace(path, options=options)


def test_a_line_becomes_a_request(tmp_path: Path) -> None:
    (request,) = opened(tmp_path, row([5, 6], output_length=9, session_id=44))
    assert request.prompt_tokens == 1024
    assert request.output_tokens == 9
    assert request.session == "44"
    assert [len(block) for block in request.chain] == [16, 16]


def test_the_id_of_a_partial_last_block_is_no_part_of_the_chain(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        row([1, 2], input_length=1023),
        row([1, 2], input_length=1024),
        row([1], input_length=513),
        row([1], input_length=511),
        row([], input_length=100),
    )
    assert [len(request.chain) for request in trace] == [1, 2, 1, 0, 0]


@pytest.mark.parametrize(("ids", "length"), [(3, 1024), (1, 1024), (0, 512), (33, 521)])
def test_as_many_ids_as_blocks_are_expected(tmp_path: Path, ids: int, length: int) -> None:
    with pytest.raises(
        TraceError, match=r"^line 1: hash_ids: expected \d+ ids for \d+ tokens in b"
    ):
        list(opened(tmp_path, row(list(range(ids)), input_length=length)))


def test_the_size_of_blocks_can_be_told(tmp_path: Path) -> None:
    trace = opened(
        tmp_path, row(list(range(33)), input_length=521), options=ReadOptions(block_tokens=16)
    )
    assert trace.block_tokens == 16
    assert [len(request.chain) for request in trace] == [32]


def test_ids_of_prefixes_share_what_they_did(tmp_path: Path) -> None:
    trace = opened(tmp_path, row([1, 2, 3]), row([1, 2, 4, 5]), row([6]))
    first, second, third = (request.chain for request in trace)
    assert common_blocks(first, second) == 2
    assert len({*first, *second, *third}) == 6
    assert trace.ids_kind is IdsKind.PREFIX


def test_an_id_of_content_behind_other_content_is_no_hit(tmp_path: Path) -> None:
    trace = opened(tmp_path, row([1, 2, 9]), row([3, 2, 9]), row([1, 2, 8]))
    first, second, third = (request.chain for request in trace)
    assert not {*first} & {*second}
    assert common_blocks(first, third) == 2
    assert trace.ids_kind is IdsKind.CONTENT


def test_ids_have_64_bits_of_any_sign(tmp_path: Path) -> None:
    trace = opened(tmp_path, row([-1]), row([2**64 - 1]), row([-(2**63)]), row([0]))
    chains = [request.chain for request in trace]
    assert chains[0] == chains[1]
    assert len(set(chains)) == 3


@pytest.mark.parametrize("wide", [2**64, -(2**63) - 1, 2**64 + 3])
def test_wider_ids_are_an_error(tmp_path: Path, wide: int) -> None:
    with pytest.raises(TraceError, match=rf"hash_ids: expected integers of 64 bits, got {wide}"):
        list(opened(tmp_path, row([4, wide])))


def test_arrivals_count_from_the_first_line(tmp_path: Path) -> None:
    times = [1_700_000_000_123, 1_700_000_000_123, 1_700_000_000_124, 1_700_000_003_123.5]
    trace = opened(tmp_path, *(row([1], timestamp=time) for time in times))
    assert [request.arrival_s for request in trace] == [0, 0, 0.001, 3.0005]


def test_a_time_that_goes_back_is_an_error(tmp_path: Path) -> None:
    trace = opened(tmp_path, row([1], timestamp=5), row([1], timestamp=4))
    with pytest.raises(TraceError, match=r"^line 2: timestamp: expected at least 5, got 4"):
        list(trace)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("input_length", -3, "input_length: expected an integer of at least 1, got -3"),
        ("input_length", 0, "input_length: expected an integer of at least 1, got 0"),
        ("input_length", "7", 'input_length: expected an integer of at least 1, got "7"'),
        ("output_length", True, "output_length: expected an integer of at least 1, got true"),
        ("output_length", 1.5, "output_length: expected an integer of at least 1, got 1.5"),
        ("output_length", None, "output_length: expected an integer of at least 1, got null"),
        ("timestamp", True, "timestamp: expected a number of milliseconds, got true"),
        ("timestamp", "x" * 99, 'timestamp: expected a number of milliseconds, got "xxx'),
        ("hash_ids", None, "hash_ids: expected a list of integers, got null"),
        ("hash_ids", [1, False], "hash_ids[1]: expected a list of integers, got false"),
        ("timestamp", float("nan"), 'expected a JSON object, got \'{"timestamp": NaN'),
        ("timestamp", float("inf"), 'expected a JSON object, got \'{"timestamp": Infinity'),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected(
    tmp_path: Path, field: str, value: object, problem: str
) -> None:
    trace = opened(tmp_path, row([1]), row([1], **{field: value}))
    with pytest.raises(TraceError) as raised:
        list(trace)
    assert str(raised.value).startswith(f"line 2: {problem}")
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize(
    "number", ["1e999", "-1e999", "9" * 5000], ids=["above", "below", "long integer"]
)
def test_a_number_out_of_range_is_an_error(tmp_path: Path, number: str) -> None:
    trace = opened(tmp_path, row([1]).replace(str(ANY), number))
    with pytest.raises(TraceError, match="line 1: "):
        list(trace)


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    fields = json.loads(row([1]))
    del fields[field]
    with pytest.raises(TraceError, match=rf"^line 1: {field}: expected an? .*, but it is missing"):
        list(opened(tmp_path, json.dumps(fields)))


def test_other_fields_are_passed_over_however_deep(tmp_path: Path) -> None:
    assert len(list(opened(tmp_path, row([1], extra={"a": [1, None]})))) == 1
    deep = row([1]).replace("}", ', "extra": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(TraceError, match="line 2: expected a JSON object"):
        list(opened(tmp_path, row([1]), deep))
