"""Reading a router's decision log: header and record lines, over its rotated files, oldest first.

A header line begins every file, every life of the router and, where settings were changed while it
ran, what was decided by them; its policy made the decisions that follow. Every field has to be one
that this version knows: a value that was left out would make a replay differ without a word. A line
that a crash has torn stands last, or before a header.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from policies.model import Candidate, Decision, Heat, ReplicaView, RoutingRequest
from policies.union import AnyPolicy
from replay.format.packed import UNPACK_ERRORS, unpacked
from replay.trace import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VERSION: Final = 1
HEADER_START: Final = b'{"warmroute"'
PROCESS: Final = ".p"
"""What the name of one process's log ends in, before its number."""
PACKED: Final = ".zst"
"""What the name of an older file ends in, once it is compressed."""


# What the policies work with, but without a field that this version would pass over in silence.


class SeenHeat(Heat, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hot prefix of a logged request."""


class SeenRequest(RoutingRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request of a logged decision."""

    heat: SeenHeat | None = None


class SeenView(ReplicaView, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replica as a logged decision saw it."""


class SeenCandidate(Candidate, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A candidate of a logged decision."""


class SeenDecision(Decision, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A logged decision."""

    candidates: tuple[SeenCandidate, ...]


class LogHeader(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose decisions follow. ``policy`` is data: another version may not know it."""

    warmroute: str
    version: int
    router: str
    policy: dict[str, Any]
    sample: float
    chains: bool
    started_unix_s: float
    settings_version: int = 0


class LoggedPrompt(Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt of a request: its tokens, and the 16-byte ids of its full blocks, joined."""

    tokens: int
    chain: bytes


class LoggedResult(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request ended; tokens as the engine counted them. Unknown is None.

    ``held_s`` of the time it waited in the router.
    """

    status: int
    outcome: str
    ttft_s: float | None
    held_s: float
    duration_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None


class LoggedDecision(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One decision. Only the last one of a request has a ``result``: that of the whole request.

    ``ended`` and ``error`` tell of this attempt. ``block_tokens`` are those of one id in a chain.
    """

    id: str
    arrived_unix_s: float
    attempt: int
    model: str | None
    is_exact: bool
    unroutable: str | None
    request: SeenRequest
    views: tuple[SeenView, ...]
    decision: SeenDecision
    ended: str
    error: str | None
    kv_source: str | None
    result: LoggedResult | None = None
    block_tokens: int | None = None
    prompts: tuple[LoggedPrompt, ...] | None = None
    settings_version: int = 0
    side: str | None = None


class Place(NamedTuple):
    """Where a line stands."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


class LoggedLine(NamedTuple):
    """One record, and the policy of the header above it."""

    place: Place
    header: LogHeader
    policy: AnyPolicy
    decision: LoggedDecision


class DecisionLogReader:
    """The records of ``path`` and of the older files beside it: ``path.1``, ``path.2`` and so on.

    ``torn_lines`` counts, of the last reading, the lines that a crash has torn.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decoder = msgspec.json.Decoder(LoggedDecision)
        self.torn_lines = 0

    def __iter__(self) -> Iterator[LoggedLine]:
        """Yield the records as they were written; raises TraceError at a line of no use."""
        self.torn_lines = 0
        for path in log_files(self._path):
            yield from self._read(path)

    def _read(self, path: Path) -> Iterator[LoggedLine]:
        life: tuple[LogHeader, AnyPolicy] | None = None
        torn: TraceError | None = None
        line = b""
        try:
            with unpacked(_as_it_is(path)) as file:
                for number, line in enumerate(file, 1):
                    place = Place(path.name, number)
                    try:
                        if line.startswith(HEADER_START):
                            life, torn = read_header(line, place), None
                            continue
                        if life is not None and torn is None:
                            yield LoggedLine(place, *life, self._decoder.decode(line))
                            continue
                    except msgspec.ValidationError as error:
                        raise TraceError(explained(error, place)) from None
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                        torn = TraceError(f"{place}: not JSON: {error}")
                        self.torn_lines += 1
                        continue
                    raise torn or TraceError(f"{place}: not the header of a decision log")
        except UNPACK_ERRORS as error:
            message = f"{path}: {getattr(error, 'strerror', None) or error}"
            raise TraceError(message) from None
        if torn is not None and line.endswith(b"\n"):
            raise torn


def log_files(path: Path) -> list[Path]:
    """Return the files of the log at ``path``, oldest first; the newest may be just rotated away.

    Of a router of several processes these are the logs ``path.p0``, ``path.p1`` and so on, one
    after the other. Raises TraceError where there are none.
    """
    files = _rotated(path)
    for number in sorted(map(int, _processes(path))):
        files += _rotated(path.with_name(f"{path.name}{PROCESS}{number}"))
    if not files:
        message = f"{path}: no such file"
        raise TraceError(message)
    return files


def _rotated(path: Path) -> list[Path]:
    files = [path] if path.exists() else []
    number = 1
    while (older := _as_it_is(path.with_name(f"{path.name}.{number}"))).exists():
        files.append(older)
        number += 1
    return files[::-1]


def _processes(path: Path) -> set[str]:
    """Return the numbers of the processes that logged, each beside ``path``."""
    start = path.name + PROCESS
    found = (one.name.removeprefix(start).split(".")[0] for one in _beside(path, start))
    return {number for number in found if number.isdecimal()}


def _beside(path: Path, start: str) -> list[Path]:
    folder = path.parent
    return (
        [one for one in folder.iterdir() if one.name.startswith(start)] if folder.is_dir() else []
    )


def _as_it_is(path: Path) -> Path:
    """Return the path of an older file: the router may have compressed it a moment ago."""
    return path if path.exists() else path.with_name(path.name + PACKED)


def read_header(line: bytes, place: Place) -> tuple[LogHeader, AnyPolicy]:
    """Return the header and its policy; raises TraceError for what this version does not know."""
    kind = msgspec.json.decode(line, type=dict[str, object])
    for field, known in (("warmroute", "decisions"), ("version", VERSION)):
        if kind.get(field) != known:
            message = f"{place}: {field}: expected {known!r}, got {kind.get(field)!r}"
            raise TraceError(message)
    try:
        header = msgspec.convert(kind, LogHeader)
    except msgspec.ValidationError as error:
        raise TraceError(explained(error, place, "the header")) from None
    try:
        policy: AnyPolicy = msgspec.convert(header.policy, AnyPolicy)
    except msgspec.ValidationError as error:
        raise TraceError(explained(error, place, "policy")) from None
    return header, policy


def explained(error: msgspec.ValidationError, place: Place, root: str = "") -> str:
    """Return place, field and what is wrong with it."""
    text, _, where = str(error).partition(" - at `$")
    field = root + where.rstrip("`")
    if "unknown field" in text:
        text += "; a newer version wrote it"
    elif "got `null`" in text:
        text += "; a number that is not finite is logged as null"
    return f"{place}: {field.lstrip('.') or 'the record'}: {text}"
