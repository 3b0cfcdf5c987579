"""What an answer that goes on for long lets go of: what only another try would have needed.

A stream stays open for minutes, and its prompt is of no use once the answer has begun: the body,
its tokens, its head, and the parsers of both connections. What the decision was made on is packed
until the end. What may be asked at the end, whether the request is one that replicas die of, is
worked out before the body goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from router.packed_look import pack
from router.request import NO_HEADERS

if TYPE_CHECKING:
    from router.account import Call
    from router.chooser import Choice
    from router.quarantine import Quarantine
    from router.request import Request

MOST_BYTES: Final = 4 * 1024 * 1024
"""Larger bodies stay: to digest one takes a millisecond for each MiB."""


def lighten(
    call: Call, request: Request, choice: Choice, quarantine: Quarantine, *, keeps_ids: bool
) -> None:
    """Let go of what the request has besides its account; the answer of ``choice`` has begun.

    ``keeps_ids``: somebody looks at the prompt's tokens when it has ended.
    """
    if call.body and len(call.body) <= MOST_BYTES:
        call.key = quarantine.key(call.path, call.body)
        call.body = b""
        request.connection.lighten()
    request.headers = NO_HEADERS
    pack(choice)
    if call.routed is not None and not keeps_ids:
        call.routed.prompt = call.routed.prompt.counted()
