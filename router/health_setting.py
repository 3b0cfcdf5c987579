"""How replicas are checked, as configured."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class HealthSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Active checks of ``GET /health``: ``fall`` failures take out, ``rise`` bring back.

    Over ``slow_start_s`` a replica that came back gets more and more; 0: all at once. Requests on
    one that is out because its checks ran out of time, and that sent nothing for ``silent_s`` since
    then, are ended or moved; a six times longer wait where most of the fleet is out.
    """

    interval_s: Annotated[float, Meta(gt=0)] = 2.0
    timeout_s: Annotated[float, Meta(gt=0)] = 1.0
    fall: Annotated[int, Meta(ge=1)] = 3
    rise: Annotated[int, Meta(ge=1)] = 2
    slow_start_s: Annotated[float, Meta(ge=0)] = 30.0
    silent_s: Annotated[float, Meta(gt=0)] = 5.0
