"""What a relayed response says about itself, read beside the stream: usage, errors, its end.

An observer sees the bytes that the client gets and never holds them up, changes them or raises;
what it does not understand it does not report. Most chunks cost it three searches: an event is
only taken apart when it may be the end or an error (WHATWG HTML, 9.2.6).
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

EVENT_LIMIT_BYTES = 1024 * 1024
"""A longer event is relayed like any other and not looked at."""
BODY_LIMIT_BYTES = 8 * 1024 * 1024
"""How much of the end of a plain JSON body is kept."""
USAGE_LIMIT_BYTES = 16 * 1024
"""The largest usage object that is read."""

_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_ERROR = re.compile(rb'\{\s*"error"\s*:\s*[^\sn]')  # not null
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_KEEP_BYTES = 3
"""So much of the end of a searched buffer can be the beginning of a blank line."""

_Tokens = Annotated[int, Meta(ge=0)]


class Usage(Struct, frozen=True):
    """What the engine counted; None is what it did not tell."""

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None


class _Details(Struct, frozen=True):
    cached_tokens: _Tokens | None = None


class _Usage(Struct, frozen=True):
    """All spellings: of completions and chats, of responses, and of Anthropic's messages.

    In the last one ``input_tokens`` leaves out what was read from, or written to, the cache.
    """

    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Tokens | None = None
    cache_creation_input_tokens: _Tokens | None = None


_NOTHING = Usage(None, None, None)
_USAGE_DECODER = msgspec.json.Decoder(_Usage)


def _object_at(data: bytes, start: int) -> bytes:
    """Return the JSON object that begins at ``start``, by its braces; b"" when it has no end."""
    depth, at, limit = 0, start, start + USAGE_LIMIT_BYTES
    while (closing := data.find(b"}", at, limit)) >= 0:
        depth += data.count(b"{", at, closing) - 1
        if depth == 0:
            return data[start : closing + 1]
        at = closing + 1
    return b""


def parse_usage(data: bytes) -> Usage | None:
    """Return the last usage object in ``data``; None when there is none or it is not one."""
    at = data.rfind(b'"usage"')  # much faster than the expression
    if at < 0:
        return None
    last = _USAGE.match(data, at)
    if last is None:  # a text that says so
        for match in _USAGE.finditer(data):
            last = match
    if last is None:
        return None
    start = last.end() - 1
    try:
        told = _USAGE_DECODER.decode(_object_at(data, start))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    usage = _counted(told)
    return None if usage == _NOTHING else usage


def _counted(told: _Usage) -> Usage:
    details = told.prompt_tokens_details or told.input_tokens_details
    prompt = told.prompt_tokens if told.prompt_tokens is not None else told.input_tokens
    done = told.completion_tokens if told.completion_tokens is not None else told.output_tokens
    if details is not None:
        return Usage(prompt, done, details.cached_tokens)
    if told.input_tokens is not None:
        read, written = told.cache_read_input_tokens, told.cache_creation_input_tokens
        return Usage(told.input_tokens + (read or 0) + (written or 0), done, read)
    return Usage(prompt, done, None)


class StreamObserver:
    """Watches a stream of server-sent events, cut anywhere."""

    __slots__ = ("_done", "_is_skipping", "_rest", "_searched", "_usage", "has_error", "is_done")

    def __init__(self, done: bytes | None) -> None:
        self._done = done
        self._rest = bytearray()
        self._searched = 0
        self._is_skipping = False
        self._usage = b""
        self.has_error = False
        """An event said ``{"error": ...}``."""
        self.is_done = False
        """The event that ends a complete stream came."""

    @property
    def is_between_events(self) -> bool:
        """Whether the stream could end here without cutting an event in two."""
        return not self._is_skipping and not bytes(self._rest).strip(b"\r\n")

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        if self._rest or self._is_skipping or not data.endswith(_EVENT_ENDS):
            whole = self._whole_events(data)
            if whole:
                self._look_at(whole)
        else:
            self._look_at(data)

    def close(self) -> None:
        """Note that the stream is over: a last event may lack its blank line."""
        if not self._is_skipping:
            self._look_at(bytes(self._rest))

    def usage(self) -> Usage | None:
        """Return the last usage that the stream told, None when it told none."""
        return parse_usage(self._usage)

    def _whole_events(self, data: bytes) -> bytes:
        """Add ``data`` to what is left and return the events that are complete now."""
        rest = self._rest
        rest += data
        ends = [blank.end() for blank in _BLANK_LINE.finditer(rest, self._searched)]
        whole = b""
        if ends:
            whole = bytes(rest[ends[0] if self._is_skipping else 0 : ends[-1]])
            self._is_skipping = False
            del rest[: ends[-1]]
        if len(rest) > EVENT_LIMIT_BYTES:
            self._is_skipping = True
        if self._is_skipping:
            del rest[:-_KEEP_BYTES]
        self._searched = max(0, len(rest) - _KEEP_BYTES)
        return whole

    def _look_at(self, events: bytes) -> None:
        """Search whole events for what matters; most have none of it."""
        may_end = self._done is not None and self._done in events
        if may_end or b'"error"' in events:
            for event in _BLANK_LINE.split(events):
                self._judge(event)
        if b'"usage"' in events and _USAGE.search(events):
            found = (event for event in reversed(_BLANK_LINE.split(events)) if _USAGE.search(event))
            self._usage = next(found, self._usage)

    def _judge(self, event: bytes) -> None:
        lines = [line[5:] for line in _LINE_END.split(event) if line.startswith(b"data:")]
        if not lines:
            return
        data = b"\n".join(line.removeprefix(b" ") for line in lines)
        if data.strip() == self._done:
            self.is_done = True
        elif _ERROR.match(data):
            self.has_error = True


class BodyObserver:
    """Keeps the end of a plain JSON body for its usage."""

    __slots__ = ("_kept_bytes", "_parts")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._kept_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        self._parts.append(data)
        self._kept_bytes += len(data)
        if self._kept_bytes > BODY_LIMIT_BYTES:
            kept = b"".join(self._parts)[-BODY_LIMIT_BYTES // 2 :]
            self._parts = [kept]
            self._kept_bytes = len(kept)

    def close(self) -> None:
        """Note that the body is over."""

    def body(self) -> bytes:
        """Return what is kept of it: all of a short one."""
        return b"".join(self._parts)

    def usage(self) -> Usage | None:
        """Return the usage that the body told, None when it told none."""
        return parse_usage(b"".join(self._parts))
