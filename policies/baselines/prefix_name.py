"""What a request hashes to, for rules that place by hash and keep no record."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.model import RoutingRequest


def session_name(request: RoutingRequest) -> bytes | None:
    """Return the name of the session that the client stated, None without one."""
    if request.session is None:
        return None
    return b"session:" + request.session.encode("utf-8", "surrogatepass")


def prefix_name(request: RoutingRequest, blocks: int) -> bytes | None:
    """Return the name of the prompt's first ``blocks`` blocks, or of as many as it has.

    None for a prompt shorter than one block.
    """
    if not request.prefix_keys:
        return None
    deepest = min(blocks, len(request.prefix_keys)) - 1
    return b"prefix:%d" % request.prefix_keys[deepest]
