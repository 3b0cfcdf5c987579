"""What a tenant may take of what all tenants share, as the configuration says it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class QuotaSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds for one tenant on one router; None for no bound.

    ``max_inflight``: requests at a time. ``new_blocks_per_s``: prompt blocks that no cache has, on
    average; ``burst_s`` is for how many seconds' worth a tenant may be ahead. ``index_bytes``: the
    router's memory for what it placed where; tenants that share prefixes also share the sum.
    """

    max_inflight: Annotated[int, Meta(ge=1)] | None = None
    new_blocks_per_s: Annotated[float, Meta(gt=0)] | None = None
    burst_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    index_bytes: Annotated[int, Meta(ge=1 << 16)] | None = None
