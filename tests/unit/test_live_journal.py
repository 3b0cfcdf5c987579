"""The journal of a live replay: what it takes to go on with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from replay.journal import Journal, JournalError, JournalHead, Record, digest_of
from replay.outcome import Outcome
from replay.trace import TraceRequest
from state.model import BlockId

if TYPE_CHECKING:
    from pathlib import Path

HEAD = JournalHead(
    trace="t.jsonl", requests=3, digest="d", settings={"seed": 1, "endpoint": "chat"}
)


def record(ordinal: int) -> Record:
    return Record(
        outcome=Outcome(
            ordinal=ordinal,
            line=ordinal + 1,
            arrival_s=0.5,
            prompt_tokens=10,
            output_tokens=2,
            replica="w0",
            ttft_s=0.25,
            error=None,
        ),
        late_s=0.125,
    )


@pytest.fixture(name="path")
def journal_path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def write(path: Path, *ordinals: int) -> None:
    with Journal(path, HEAD) as journal:
        for ordinal in ordinals:
            journal.append(record(ordinal))


def test_what_was_appended_is_there_at_once(path: Path) -> None:
    with Journal(path, HEAD) as journal:
        journal.append(record(0))
        assert len(path.read_bytes().splitlines()) == 2


def test_resuming_gives_back_every_record_by_ordinal_and_appends_behind(path: Path) -> None:
    write(path, 2, 0)
    journal, records = Journal.resume(path, HEAD)
    with journal:
        assert records == (record(0), record(2))
        journal.append(record(1))
    journal, records = Journal.resume(path, HEAD)
    with journal:
        assert records == (record(0), record(1), record(2))


def test_a_line_that_was_being_written_is_dropped_and_overwritten(path: Path) -> None:
    write(path, 0, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    journal, records = Journal.resume(path, HEAD)
    assert records == (record(0),)
    with journal:
        journal.append(record(1))
    assert path.read_bytes() == whole


def test_nothing_of_a_long_torn_line_is_left_behind(path: Path) -> None:
    write(path, 0, 1)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + b"{" + b"x" * 5_000)
    journal, records = Journal.resume(path, HEAD)
    with journal:
        assert records == (record(0),)
        journal.append(record(1))
    assert path.read_bytes() == whole


def test_resuming_without_a_journal_begins_one(path: Path) -> None:
    journal, records = Journal.resume(path, HEAD)
    with journal:
        assert records == ()
    assert msgspec.json.decode(path.read_bytes(), type=JournalHead) == HEAD


def test_a_journal_is_never_overwritten(path: Path) -> None:
    write(path, 0)
    before = path.read_bytes()
    with pytest.raises(JournalError, match=r"run\.jsonl: there is one already: .*--resume"):
        Journal(path, HEAD)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trace": "u.jsonl"}, "trace was 't.jsonl', is 'u.jsonl'"),
        ({"requests": 4}, "requests was 3, is 4"),
        ({"digest": "e"}, "the trace's requests differ"),
        ({"settings": {"seed": 2, "endpoint": "chat"}}, "seed was 1, is 2"),
        ({"settings": {"seed": 1}}, "endpoint was 'chat', is None"),
    ],
)
def test_another_replay_is_refused_and_says_what_differs(
    path: Path, change: dict[str, object], said: str
) -> None:
    write(path, 0)
    other = msgspec.structs.replace(HEAD, **change)
    with pytest.raises(JournalError, match=rf"it is of another replay: {said}"):
        Journal.resume(path, other)


@pytest.mark.parametrize("content", [b"", b"no journal", b"no journal\n", b'{"trace":"t"}\n'])
def test_what_is_no_journal_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(JournalError, match="not a journal of a replay"):
        Journal.resume(path, HEAD)
    assert path.read_bytes() == content


def test_a_bad_line_in_the_middle_is_named(path: Path) -> None:
    write(path, 0)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"outcome":1}\n' + lines[1])
    with pytest.raises(JournalError, match="line 2: Expected `object`"):
        Journal.resume(path, HEAD)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no/such: No such file or directory"):
        Journal(tmp_path / "no" / "such", HEAD)
    with pytest.raises(JournalError, match="Is a directory"):
        Journal.resume(tmp_path, HEAD)


def test_the_digest_tells_traces_apart_by_all_that_is_sent() -> None:
    base = TraceRequest(
        arrival_s=1.0, prompt_tokens=5, output_tokens=2, chain=(BlockId(b"a" * 16),)
    )
    changes: list[dict[str, object]] = [
        {},
        {"arrival_s": 2.0},
        {"prompt_tokens": 6},
        {"output_tokens": 3},
        {"chain": ()},
        {"chain": (BlockId(b"b" * 16),)},
    ]
    digests = [digest_of([msgspec.structs.replace(base, **change)]) for change in changes]
    assert len(set(digests)) == len(changes)
    assert digest_of([base]) == digests[0]
    assert digest_of([base, base]) != digests[0]
