"""Answers of replicas as the router remembers them."""

from __future__ import annotations

from typing import Any, cast

from router.relay import Relayed


def answer(status: int = 200, retry_after_s: int | None = None, **changes: Any) -> Relayed:
    """Return an answer that was passed on whole."""
    told: dict[str, Any] = {
        "response": cast("Any", None),
        "status": status,
        "outcome": "done",
        "reason": "complete",
        "usage": None,
        "body_bytes": 0,
        "first_byte_s": None,
        "is_done_seen": False,
        "retry_after_s": retry_after_s,
    }
    return Relayed(**told | changes)
