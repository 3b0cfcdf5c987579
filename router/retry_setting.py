"""When a request that failed on one replica may go to another, as configured."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

AfterSend = Literal["never", "dead", "always"]


class RetrySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a request that failed on one replica goes to another.

    ``after_send``: whether one is tried again that a replica had when it closed the connection
    without an answer: never, where the replica is dead (it refuses connections now), or always. At
    most ``ratio`` of the open requests, but ``reserve`` at least, are second tries at a time, and
    ``per_s`` begin in a second. Where a replica was lost, a request waits for its turn for up to
    ``patience_s``. Nothing is tried again ``deadline_s`` after a request came.
    """

    after_send: AfterSend = "dead"
    ratio: Annotated[float, Meta(ge=0, le=1)] = 0.2
    reserve: Annotated[int, Meta(ge=0)] = 3
    per_s: Annotated[float, Meta(ge=1)] = 100.0
    patience_s: Annotated[float, Meta(ge=0)] = 10.0
    deadline_s: Annotated[float, Meta(gt=0)] = 330.0
