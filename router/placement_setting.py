"""How long what a router itself sent counts as residency."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class PlacementSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long this router's own placements count as residency, in seconds.

    ``pending_s``: on replicas with KV events, until the events tell. ``guess_s``: on replicas
    without, bounded by their capacity.
    """

    pending_s: Annotated[float, Meta(gt=0)] = 2.0
    guess_s: Annotated[float, Meta(gt=0)] = 600.0
