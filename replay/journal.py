"""The journal of a live replay: a line of JSON for what is replayed, then one per outcome.

A request that was under way when the replay stopped has no line, and is sent again on resuming. A
last line without an end was being written then: it is dropped.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, Self

import msgspec
from msgspec import Struct

from replay.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

    from replay.trace import TraceRequest

VERSION: Final = 1
Setting = str | int | float | bool | None


class JournalError(Exception):
    """The journal cannot be used: it is another replay's, no journal, or cannot be written."""


class JournalHead(Struct, frozen=True, kw_only=True):
    """What is replayed. ``digest`` is of all requests, ``settings`` of how they are sent."""

    warmroute_replay: int = VERSION
    trace: str
    requests: int
    digest: str
    settings: dict[str, Setting]


class Record(Struct, frozen=True, kw_only=True):
    """One outcome, and how much later than it was due the request was sent."""

    outcome: Outcome
    late_s: float = 0.0


def digest_of(requests: Iterable[TraceRequest]) -> str:
    """Return a digest of everything about ``requests`` that a replay depends on."""
    digest = hashlib.blake2b(digest_size=16)
    for one in requests:
        about = (one.arrival_s, one.prompt_tokens, one.output_tokens, len(one.chain), one.line)
        digest.update(repr(about).encode())
        for block in one.chain:
            digest.update(len(block).to_bytes(1, "little") + block)
    return digest.hexdigest()


class Journal:
    """Appends records to a file as they come; ``with`` closes it."""

    def __init__(self, path: Path, head: JournalHead) -> None:
        """Begin a journal; raises JournalError where there is one."""
        self._path = path
        try:
            self._file = path.open("xb", buffering=0)
        except FileExistsError:
            message = f"{path}: there is one already: go on with it by --resume, or name another"
            raise JournalError(message) from None
        except OSError as error:
            raise _failure(path, error) from None
        self._write(msgspec.json.encode(head))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @classmethod
    def resume(cls, path: Path, head: JournalHead) -> tuple[Self, tuple[Record, ...]]:
        """Return the journal at ``path`` and what it has, or a new one where there is none.

        Raises JournalError where it is of another replay than ``head`` says.
        """
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return cls(path, head), ()
        except OSError as error:
            raise _failure(path, error) from None
        whole = raw[: raw.rfind(b"\n") + 1]
        if not whole:
            message = f"{path}: not a journal of a replay"
            raise JournalError(message)
        records = _records(path, whole.splitlines(), head)
        journal = cls.__new__(cls)
        journal._path = path  # noqa: SLF001 - the other way to make one
        try:
            journal._file = path.open("r+b", buffering=0)  # noqa: SLF001 - the same
            journal._file.truncate(len(whole))  # noqa: SLF001 - the same
            journal._file.seek(len(whole))  # noqa: SLF001 - the same
        except OSError as error:
            raise _failure(path, error) from None
        return journal, records

    def append(self, record: Record) -> None:
        """Write one record through to the file; raises JournalError."""
        self._write(msgspec.json.encode(record))

    def _write(self, line: bytes) -> None:
        try:
            self._file.write(line + b"\n")
        except OSError as error:
            raise _failure(self._path, error) from None


def _records(path: Path, lines: list[bytes], head: JournalHead) -> tuple[Record, ...]:
    """Return the records of a journal that is ``head``'s, by ordinal; raises JournalError."""
    try:
        found = msgspec.json.decode(lines[0], type=JournalHead)
    except msgspec.MsgspecError:
        message = f"{path}: not a journal of a replay"
        raise JournalError(message) from None
    difference = _difference(found, head)
    if difference is not None:
        message = f"{path}: it is of another replay: {difference}"
        raise JournalError(message)
    records: dict[int, Record] = {}
    decoder = msgspec.json.Decoder(Record)
    for number, line in enumerate(lines[1:], start=2):
        try:
            record = decoder.decode(line)
        except msgspec.MsgspecError as error:
            message = f"{path}: line {number}: {error}"
            raise JournalError(message) from None
        records[record.outcome.ordinal] = record
    return tuple(records[ordinal] for ordinal in sorted(records))


def _difference(found: JournalHead, wanted: JournalHead) -> str | None:
    """Return in what two replays differ."""
    for name in ("warmroute_replay", "trace", "requests"):
        there, here = getattr(found, name), getattr(wanted, name)
        if there != here:
            return f"{name} was {there!r}, is {here!r}"
    if found.digest != wanted.digest:
        return "the trace's requests differ"
    for name in sorted(found.settings.keys() | wanted.settings.keys()):
        there, here = found.settings.get(name), wanted.settings.get(name)
        if there != here:
            return f"{name} was {there!r}, is {here!r}"
    return None


def _failure(path: Path, error: OSError) -> JournalError:
    return JournalError(f"{path}: {error.strerror}")
