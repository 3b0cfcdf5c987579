"""How the use of caches is counted, as the configuration says it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class BillingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often held blocks are counted, and what one token takes, by model (``kv size`` tells)."""

    interval_s: Annotated[float, Meta(ge=0.1, le=3600)] = 10.0
    kv_bytes_per_token: dict[str, Annotated[int, Meta(ge=1)]] = {}
