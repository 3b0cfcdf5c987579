"""The router-side queue: hold a request briefly where waiting for its replica beats moving."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class HoldSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The router-side queue: a request waits while its replica's backlog is over ``release_ms``.

    Shortest uncached prefill first; a waiting second is worth ``ageing`` seconds of it. After
    ``max_wait_s`` it goes whatever the backlog. ``is_fair``: tenants take turns by what they used.
    """

    enabled: bool = False
    release_ms: Annotated[float, Meta(gt=0)] = 300.0
    ageing: Annotated[float, Meta(ge=0)] = 0.1
    max_wait_s: Annotated[float, Meta(gt=0)] = 10.0
    is_fair: bool = True
