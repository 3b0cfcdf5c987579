"""What a virtual fleet is made of."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from policies.hold import HoldSettings
from policies.hot import HotSettings
from policies.prefill import PrefillCost
from sidecar.clock import LLAMA_70B_FP8_2XH100, StepCost

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At ``at_s`` replica number ``replica`` restarts with an empty cache; its requests go again.

    It takes none for ``down_s``.
    """

    at_s: Seconds
    replica: Annotated[int, Meta(ge=0)]
    down_s: Seconds = 0.0


class FleetSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fleet in virtual time.

    ``cost`` is the step model of an engine at speed 1; ``speeds`` scales replicas, 1 where absent.
    ``capacity_tokens`` and ``host_tokens`` are one replica's KV memory per tier; ``fetch_token_ms``
    is what a token costs from host memory. ``pull_token_ms``: from another replica, None where
    engines cannot. ``event_delay_s`` and ``event_loss`` spoil the router's view of caches,
    ``load_delay_s`` that of engine-reported queues. ``routers`` share one fleet and see each
    other's leases every ``lease_interval_s``; None: never. ``is_pooled``: all replicas share one
    memory of their common size, as no real fleet does: the bound that policies are compared with.
    """

    replicas: Count = 8
    cost: StepCost = LLAMA_70B_FP8_2XH100
    speeds: tuple[Annotated[float, Meta(gt=0)], ...] = ()
    capacity_tokens: Count = 440_000
    host_tokens: Annotated[int, Meta(ge=0)] = 0
    fetch_token_ms: Annotated[float, Meta(ge=0)] = 0.0066
    pull_token_ms: Annotated[float, Meta(ge=0)] | None = None
    kv_bytes_per_token: Count = 327_680
    step_tokens: Count = 8_192
    max_sequences: Count = 256
    event_delay_s: Seconds = 0.0
    event_loss: Annotated[float, Meta(ge=0, le=1)] = 0.0
    load_delay_s: Seconds = 0.1
    routers: Count = 1
    lease_interval_s: Seconds | None = 0.05
    hot: HotSettings | None = HotSettings()
    hold: HoldSettings = HoldSettings()
    prefill: PrefillCost | None = None
    """What the router believes a prefill costs; None: what it does cost at speed 1."""
    faults: tuple[Fault, ...] = ()
    is_pooled: bool = False
    seed: int = 0
