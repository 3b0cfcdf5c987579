"""Whether a request that waits for long is sent to a second replica as well, as configured."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class HedgeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Off unless ``enabled``: the same prompt is computed twice.

    A streamed request without a byte of its answer after ``delay_s``, or where that is null after
    the ``percentile`` of what the last ones took, but at least ``least_s``, goes to another replica
    as well; whoever answers first is passed on. At most ``share`` of the requests do, over any
    time.
    """

    enabled: bool = False
    share: Annotated[float, Meta(gt=0, le=0.2)] = 0.02
    percentile: Annotated[float, Meta(ge=50, lt=100)] = 95.0
    delay_s: Annotated[float, Meta(gt=0)] | None = None
    least_s: Annotated[float, Meta(gt=0)] = 0.1
