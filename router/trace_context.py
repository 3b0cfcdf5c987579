"""The W3C trace context: which trace a request belongs to, by its ``traceparent``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

TRACE_PARENT: Final = b"traceparent"
_PARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE: Final = b"0" * 32
_NO_SPAN: Final = b"0" * 16
_OWN_VERSION: Final = b"00"
_NO_VERSION: Final = b"ff"


class TraceParent(NamedTuple):
    """A trace and the span in it that a request comes from, in lower-case hex."""

    trace_id: str
    span_id: str
    is_sampled: bool


def parent_of(values: Sequence[bytes]) -> TraceParent | None:
    """Return what the lines of ``traceparent`` say; None for none, several, and unfit ones.

    Later versions may have more at the end (Trace Context, 3.2.2); version 00 may not.
    """
    found = _PARENT.fullmatch(values[0]) if len(values) == 1 else None
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == _NO_VERSION or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    if version == _OWN_VERSION and rest is not None:
        return None
    return TraceParent(trace_id.decode(), span_id.decode(), bool(int(flags, 16) & 1))
