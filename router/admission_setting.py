"""How many requests may be in flight or wait, and when the router sheds, as configured."""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta, Struct

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]

DEFAULT_PENDING = 1_024


class Priority(enum.StrEnum):
    """Who goes first where requests wait, and who is shed first; lower values go first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @property
    def rank(self) -> int:
        """0 for the one that goes first."""
        return _RANKS[self]


_RANKS = {priority: rank for rank, priority in enumerate(Priority)}


class RateSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one tenant may ask for on average, over all live routers; None for no bound.

    ``tokens_per_min`` counts prompt and completion tokens. ``burst_s`` is for how many seconds'
    worth a tenant may be ahead.
    """

    requests_per_min: PositiveFloat | None = None
    tokens_per_min: PositiveFloat | None = None
    burst_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0


class LearnSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a limit per replica follows from times to first token.

    It shrinks while first tokens take over ``tolerance`` times as long as they do for the same work
    on the idle replica, and grows otherwise, from ``initial`` on, within ``minimum`` and the cap.
    """

    tolerance: Annotated[float, Meta(gt=1)] = 2.0
    minimum: PositiveInt = 4
    initial: PositiveInt = 32


class MemorySteps(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parts of the memory limit from which on a rung of the overload ladder holds."""

    shed_low: Share = 0.85
    close: Share = 0.92
    refuse: Share = 0.95


class LagSteps(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lags of the event loop, in seconds, from which on a rung holds; None for never."""

    shed_low: PositiveFloat | None = 0.1
    close: PositiveFloat | None = 1.0
    refuse: PositiveFloat | None = 2.0


class OverloadSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the router process itself is overloaded.

    ``memory_bytes`` is what it may take; None: the limit of its control group, where there is one.
    A rung is left ``recover_s`` after its cause ended.
    """

    memory_bytes: Annotated[int, Meta(ge=1 << 20)] | None = None
    memory: MemorySteps = MemorySteps()
    lag_s: LagSteps = LagSteps()
    recover_s: Annotated[float, Meta(ge=0)] = 5.0


class AdmissionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests in flight and requests that wait for a place.

    ``max_inflight`` bounds this router's open leases; None for ``ASSUMED_PLACES`` for each live
    replica. ``max_inflight_per_replica`` bounds those of all routers on one replica. Beyond,
    ``pending`` requests wait for at most ``queue_timeout_s``. ``learned``: each replica also has a
    limit that follows from its latency. ``client_priority``: a header may lower a request's
    priority.
    """

    max_inflight: PositiveInt | None = None
    max_inflight_per_replica: PositiveInt | None = None
    learned: bool = False
    learning: LearnSettings = LearnSettings()
    pending: Annotated[int, Meta(ge=0, le=65_536)] = DEFAULT_PENDING
    queue_timeout_s: PositiveFloat = 30.0
    client_priority: bool = False
    overload: OverloadSettings = OverloadSettings()
