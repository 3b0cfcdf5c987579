"""Whether replicas are warmed before requests ask for it, and what that may cost."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

LEAST_KEPT_BYTES = 1 << 20


class WarmUpSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hot prefixes are kept in memory, given to replicas with an empty cache, and handed over.

    ``enabled``: tokens of prompts, which can be read as their text, are kept in this process for
    it; with tenants, of those with ``warm_up`` alone. ``hand_over``: a replica that drains hands
    over where the drain asks for it, or ``always``. The budget of one replica's warm-up, or of one
    hand-over: ``tokens`` that are not there yet, ``prefixes``, and ``seconds``. ``concurrency``: at
    most so many replicas get something at the same time. A request goes on by ``step_tokens`` at
    most, so that a client waits for no more. A prefix is kept from ``min_arrivals`` on (decayed, as
    ``hot_prefix`` has it), for ``kept_s`` after it came last, all in ``kept_bytes``.
    """

    enabled: bool = False
    hand_over: Literal["asked", "always"] = "asked"
    tokens: Annotated[int, Meta(ge=1)] = 200_000
    prefixes: Annotated[int, Meta(ge=1, le=1_024)] = 64
    seconds: Annotated[float, Meta(gt=0, le=3_600)] = 120.0
    concurrency: Annotated[int, Meta(ge=1, le=64)] = 1
    step_tokens: Annotated[int, Meta(ge=64)] = 2_048
    min_arrivals: Annotated[float, Meta(ge=1)] = 3.0
    kept_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0
    kept_bytes: Annotated[int, Meta(ge=LEAST_KEPT_BYTES)] = 16 << 20


def warm_up_fault(settings: WarmUpSettings, lookup: str) -> str | None:
    """Return what is wrong with the settings, beginning with the key; else None."""
    if settings.enabled and lookup == "direct":
        return "enabled: expected state.lookup mirror, which tells who holds what"
    return None
