"""One trial of a sweep: a setting on one part of a trace, at one load, with one seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import Struct

from replay.space import Point

if TYPE_CHECKING:
    from collections.abc import Callable

    from policies.union import AnyPolicy

Part: TypeAlias = Literal["tuning", "held_out"]


class Cell(Struct, frozen=True, kw_only=True):
    """The traffic of a trial, the same for every setting.

    ``load`` 1.3 is the trace 1.3 times as fast.
    """

    part: Part
    load: float
    seed: int


class Trial(Struct, frozen=True, kw_only=True):
    """A setting and the traffic that it is tried on."""

    point: Point
    cell: Cell


class Figures(Struct, frozen=True, kw_only=True):
    """What a trial showed. ``imbalance`` is 1 when every replica computes as many tokens.

    ``ttft_growth`` is by how many seconds TTFT grows per second of arrivals; None where it settles.
    """

    ttft_mean_s: float
    ttft_p99_s: float
    hit_ratio: float
    imbalance: float
    requests: int = 0
    failed: int = 0
    ttft_growth: float | None = None


Evaluate: TypeAlias = "Callable[[AnyPolicy, Cell], Figures]"
"""Pure: the same policy and cell give the same figures, in every process."""

Build: TypeAlias = "Callable[[], Evaluate]"
"""Makes an evaluation, once per process; it is pickled, the evaluation is not."""


class TrialError(Exception):
    """A trial cannot be judged; the text says why."""
