"""Lines that cannot be used: what is wrong with them, and how many there were."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec

from replay.trace import TraceError

if TYPE_CHECKING:
    from collections.abc import Mapping

Row = TypeVar("Row", bound=msgspec.Struct)
_SHOWN_CHARACTERS: Final = 60
_REMEMBERED: Final = 3
_PATH: Final = re.compile(r"`\$(.*)`$")
_STEP: Final = re.compile(r"\[(\d+)\]|\.([^.\[]+)")


class BadLineError(Exception):
    """This line cannot be used; the text names the field and what was expected."""


class Faults:
    """Ends the reading at the first bad line, or counts them where they may be skipped."""

    def __init__(self, *, skip_bad: bool) -> None:
        self._skip_bad = skip_bad
        self.skipped = 0
        self.first: list[str] = []

    def add(self, line: int, problem: str) -> None:
        """Take note of a bad line; raises TraceError where none may be skipped."""
        message = f"line {line}: {problem}"
        if not self._skip_bad:
            raise TraceError(message)
        self.skipped += 1
        if len(self.first) < _REMEMBERED:
            self.first.append(message)


def shown(value: Any) -> str:
    """Return ``value`` as it may stand in a message: JSON where it has one, and short."""
    if isinstance(value, bytes):
        text = repr(value[: _SHOWN_CHARACTERS + 1].decode("utf-8", "replace"))
    else:
        try:
            text = msgspec.json.encode(value).decode()
        except (msgspec.MsgspecError, OverflowError, RecursionError):
            text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def decoded(decoder: msgspec.json.Decoder[Row], line: bytes, expected: Mapping[str, str]) -> Row:
    """Return the row that ``line`` is.

    Raises BadLineError; ``expected`` says of each field what it should be.
    """
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        pass
    raise BadLineError(_problem(line, cast(type[msgspec.Struct], decoder.type), expected))


def _problem(line: bytes, row: type[msgspec.Struct], expected: Mapping[str, str]) -> str:
    """Return what is wrong with ``line``: it is decoded again, a field at a time."""
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        return f"expected a JSON object, got {shown(line)} ({error})"
    if not isinstance(fields, dict):
        return f"expected a JSON object, got {shown(fields)}"
    for field in msgspec.structs.fields(row):
        name = field.encode_name
        if name not in fields:
            if field.required:
                return f"{name}: expected {expected[name]}, but it is missing"
            continue
        try:
            msgspec.convert(fields[name], field.type)
        except msgspec.ValidationError as error:
            place, value = _found(str(error), fields[name])
            return f"{name}{place}: expected {expected[name]}, got {shown(value)}"
    return f"expected a usable JSON object, got {shown(line)}"


def _found(message: str, value: Any) -> tuple[str, Any]:
    """Return the place inside ``value`` that ``message`` names, and what stands there."""
    path = _PATH.search(message)
    if path is None:
        return "", value
    try:
        for index, key in _STEP.findall(path[1]):
            value = value[int(index)] if index else value[key]
    except (LookupError, TypeError):
        return "", value
    return path[1], value
