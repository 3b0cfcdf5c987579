"""Conversations as traces: turns, prefixes, times."""

from __future__ import annotations

import json
from statistics import mean
from typing import TYPE_CHECKING

import pytest

from replay.format import ReadOptions, TraceFile, open_trace
from replay.trace import TraceError
from state.prefix import common_blocks

if TYPE_CHECKING:
    from pathlib import Path

    from replay.trace import TraceRequest

LONG = "x" * 1024
AROUND_USER = len("\x1euser\x1f")
AROUND_ASSISTANT = len("\x1eassistant\x1f")


def said(*contents: object, **fields: object) -> dict[str, object]:
    roles = ("user", "assistant")
    messages = [
        {"role": roles[place % 2], "content": content} for place, content in enumerate(contents)
    ]
    return {"messages": messages, **fields}


def opened(
    folder: Path,
    *rows: dict[str, object],
    options: ReadOptions | None = None,
    skip_bad: bool = False,
) -> TraceFile:
    path = folder / "talks"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return open_trace(path, options=options, skip_bad=skip_bad)


def chain_of_first(folder: Path, row: dict[str, object]) -> tuple[bytes, ...]:
    return next(iter(opened(folder, row))).chain


def test_every_answer_is_a_request_whose_prompt_is_all_before_it(tmp_path: Path) -> None:
    first, second = opened(tmp_path, said(LONG, "b" * 9, LONG, "d", "never answered"))
    before = AROUND_USER + 1024 + AROUND_ASSISTANT
    assert first.prompt_tokens == -(-before // 4)
    assert first.output_tokens == 3
    assert second.prompt_tokens == -(-(2 * before + 9) // 4)
    assert second.output_tokens == 1
    assert len(first.chain) == before // 256
    assert len(second.chain) == (2 * before + 9) // 256
    assert second.chain[: len(first.chain)] == first.chain
    assert first.session == second.session == "line 1"


def test_tokens_are_four_bytes_of_utf_8(tmp_path: Path) -> None:
    (request,) = opened(tmp_path, said("ö" * 100, "€" * 4))
    assert request.prompt_tokens == -(-(AROUND_USER + 200 + AROUND_ASSISTANT) // 4)
    assert request.output_tokens == 3


def test_prompts_share_what_their_text_shares(tmp_path: Path) -> None:
    one, two, three = opened(
        tmp_path, said(LONG + "a", "y"), said(LONG + "b" * 600, "y"), said("z" + LONG, "y")
    )
    chains = {request.line: request.chain for request in (one, two, three)}
    assert common_blocks(chains[1], chains[2]) == (AROUND_USER + 1024) // 256
    assert common_blocks(chains[1], chains[3]) == 0


def test_what_follows_another_start_is_another_prefix(tmp_path: Path) -> None:
    rows = (said(start + LONG, "y", LONG, "y") for start in "ab")
    last = {request.session: request.chain for request in opened(tmp_path, *rows)}
    assert {len(chain) for chain in last.values()} == {8}
    assert not {*last["line 1"]} & {*last["line 2"]}


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [{"name": "f"}]},
        {"messages": [{"role": "system", "content": LONG}, {"role": "assistant", "content": "b"}]},
    ],
)
def test_tools_and_roles_are_part_of_the_prefix(tmp_path: Path, change: dict[str, object]) -> None:
    row = said(LONG, "b")
    plain = chain_of_first(tmp_path, row)
    assert plain == chain_of_first(tmp_path, row | {"tools": [], "other": 3})
    assert plain[0] != chain_of_first(tmp_path, row | change)[0]


def test_parts_of_text_are_text_and_other_parts_are_told_apart(tmp_path: Path) -> None:
    def image(name: str) -> dict[str, object]:
        return {"type": "image_url", "image_url": {"url": name}}

    text = {"type": "text", "text": LONG}
    plain = chain_of_first(tmp_path, said(LONG, "b"))
    assert chain_of_first(tmp_path, said([text], "b")) == plain
    cat = chain_of_first(tmp_path, said([image("cat"), text], "b"))
    dog = chain_of_first(tmp_path, said([image("dog"), text], "b"))
    assert cat[0] != dog[0] != plain[0]


def test_calls_of_tools_are_answers_and_part_of_what_follows(tmp_path: Path) -> None:
    calls = [{"id": "c1", "function": {"name": "f", "arguments": "{}" * 200}}]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "result", "tool_call_id": "c1"},
        {"role": "assistant", "content": "done"},
    ]
    first, second = opened(tmp_path, {"messages": messages})
    assert first.output_tokens > 100
    assert second.prompt_tokens > first.prompt_tokens + 100


def test_a_greeting_is_no_request(tmp_path: Path) -> None:
    greeting = {"role": "assistant", "content": LONG}
    row = said("a", "b")
    row["messages"] = [greeting, *row["messages"]]  # type: ignore[misc]
    (request,) = opened(tmp_path, row)
    assert request.prompt_tokens > 256


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (said("a"), "messages: expected an assistant message behind another one, got none"),
        (said(), "messages: expected an assistant message behind another one, got none"),
        ({"messages": 3}, "messages: expected a list of messages with role and content, got 3"),
        (said("a", 7), "messages[1].content: expected a list of messages with role and co"),
        (said("a", "b", arrival_s=True), "arrival_s: expected a number of seconds, got true"),
        (said("a", "b", timestamp="noon"), "timestamp: expected a number of milliseconds or a da"),
        (said("a", "b", timestamp="12"), "timestamp: expected a number of milliseconds or a da"),
        (said("a", "b", session_id=[]), "session_id: expected a string or an integer, got []"),
        (said("a", "b", arrival_s=4), "arrival_s or timestamp: expected none, as before"),
    ],
)
def test_a_wrong_line_is_named_with_what_was_expected(
    tmp_path: Path, row: dict[str, object], problem: str
) -> None:
    with pytest.raises(TraceError) as raised:
        list(opened(tmp_path, said("a", "b"), row))
    assert str(raised.value).startswith(f"line 2: {problem}")


def test_times_are_on_all_lines_or_on_none(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 2: .* expected a time as in the first line"):
        list(opened(tmp_path, said("a", "b", arrival_s=4), said("a", "b")))


def times(trace: TraceFile) -> list[tuple[float, str]]:
    return [(request.arrival_s, request.session) for request in trace]


def test_sessions_that_overlap_come_by_arrival(tmp_path: Path) -> None:
    rows = [
        said("a", "b", "c", "d", arrival_s=start_s, session_id=name)
        for start_s, name in ((100.0, "late"), (90.0, "early"), (95.0, "between"))
    ]
    trace = opened(tmp_path, *rows, options=ReadOptions(think_s=20.0))
    found = times(trace)
    assert [one for one in found if one in {(0, "early"), (5, "between"), (10, "late")}] == [
        (0, "early"),
        (5, "between"),
        (10, "late"),
    ]
    assert found == sorted(found, key=lambda one: one[0])
    assert len(found) == 6


@pytest.mark.parametrize(
    "stamps",
    [
        ({"timestamp": 1_700_000_000_000}, {"timestamp": 1_700_000_001_500}),
        ({"timestamp": "2024-05-10T00:00:00Z"}, {"timestamp": "2024-05-10 02:00:01.5+02:00"}),
        ({"arrival_s": 7}, {"arrival_s": 8.5}),
    ],
)
def test_times_are_milliseconds_dates_or_seconds(
    tmp_path: Path, stamps: tuple[dict[str, object], ...]
) -> None:
    trace = opened(tmp_path, *(said("a", "b", id=3, **stamp) for stamp in stamps))
    assert times(trace) == [(0, "3"), (1.5, "3")]


def test_without_times_they_are_drawn_at_the_rate_and_thinking_time_asked_for(
    tmp_path: Path,
) -> None:
    rows = [said("a", "b", "c", "d") for _ in range(4_000)]
    options = ReadOptions(sessions_per_s=4.0, think_s=3.0, seed=5)
    trace = opened(tmp_path, *rows, options=options)
    starts: dict[str, float] = {}
    thought = []
    for request in trace:
        if request.session in starts:
            thought.append(request.arrival_s - starts[request.session])
        else:
            starts[request.session] = request.arrival_s
    assert 4_000 / max(starts.values()) == pytest.approx(4.0, rel=0.05)
    assert mean(thought) == pytest.approx(3.0, rel=0.05)
    assert times(trace) == times(trace)
    assert times(trace) == sorted(times(trace), key=lambda one: one[0])
    other = opened(tmp_path, *rows, options=ReadOptions(sessions_per_s=4.0, think_s=3.0, seed=6))
    assert times(trace) != times(other)


def test_one_start_too_late_for_the_window_is_an_error_or_skipped(tmp_path: Path) -> None:
    rows = [said("a", "b", arrival_s=start_s) for start_s in (5, 6, 7, 8, 1)]
    options = ReadOptions(window=2)
    with pytest.raises(TraceError, match=r"^line 5: its time is before that of line 2"):
        list(opened(tmp_path, *rows, options=options))
    trace = opened(tmp_path, *rows, options=options, skip_bad=True)
    assert [request.arrival_s for request in trace] == [0, 1, 2, 3]
    assert trace.skipped == 1


def test_no_text_is_kept_in_a_request(tmp_path: Path) -> None:
    request: TraceRequest
    (request,) = opened(tmp_path, said("a secret" * 99, "b", session_id="s"))
    assert "secret" not in repr(request)
