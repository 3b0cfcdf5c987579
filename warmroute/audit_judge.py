"""What the samples of a timing audit say: passed, leak or void. Pure."""

from __future__ import annotations

import enum
from statistics import median
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from warmroute.two_sample import ks_distance, ks_p_value, rejections_allowed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIGNIFICANCE: Final = 0.01


class Verdict(enum.Enum):
    """The values are exit codes."""

    PASSED = 0
    LEAK = 1
    VOID = 3


class Samples(Struct):
    """Times to first token in ms.

    ``probes``: the attacker's, of what the victim had sent; ``fresh``: the attacker's, of what
    nobody had sent. ``hits`` and ``misses`` are the same, both by the victim.
    """

    probes: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    misses: list[float] = field(default_factory=list)


class Comparison(Struct, frozen=True, kw_only=True):
    """Times of prompts that were sent before beside those of fresh ones."""

    known_count: int
    fresh_count: int
    known_median_ms: float
    fresh_median_ms: float
    distance: float
    p_value: float


class Repeat(Struct, frozen=True, kw_only=True):
    """One repeat: across tenants, and the positive control within one."""

    across: Comparison
    control: Comparison


class Report(Struct, frozen=True, kw_only=True):
    """The audit. ``pooled`` takes all repeats as one; it shows more, and does not decide."""

    verdict: str
    rejections: int
    rejections_allowed: int
    controls_missed: int
    significance: float
    repeats: tuple[Repeat, ...]
    pooled: Repeat


def compared(known: Sequence[float], fresh: Sequence[float]) -> Comparison:
    """Return the test of two samples of times."""
    distance = ks_distance(known, fresh)
    return Comparison(
        known_count=len(known),
        fresh_count=len(fresh),
        known_median_ms=median(known),
        fresh_median_ms=median(fresh),
        distance=distance,
        p_value=ks_p_value(distance, len(known), len(fresh)),
    )


def is_detected(control: Comparison, significance: float) -> bool:
    """Return whether a known prompt of the same tenant was seen to be faster."""
    is_faster = control.known_median_ms < control.fresh_median_ms
    return is_faster and control.p_value <= significance


def judge(samples: Sequence[Samples], significance: float = SIGNIFICANCE) -> Report:
    """Return the verdict on the samples of each repeat.

    Void as soon as one repeat did not see the cache within one tenant: then seeing nothing across
    tenants says nothing.
    """
    repeats = tuple(_repeat(one) for one in samples)
    rejections = sum(one.across.p_value <= significance for one in repeats)
    missed = sum(not is_detected(one.control, significance) for one in repeats)
    allowed = rejections_allowed(len(repeats), significance)
    verdict = Verdict.LEAK if rejections > allowed else Verdict.PASSED
    return Report(
        verdict=(Verdict.VOID if missed else verdict).name.lower(),
        rejections=rejections,
        rejections_allowed=allowed,
        controls_missed=missed,
        significance=significance,
        repeats=repeats,
        pooled=_repeat(_pooled(samples)),
    )


def _repeat(samples: Samples) -> Repeat:
    return Repeat(
        across=compared(samples.probes, samples.fresh),
        control=compared(samples.hits, samples.misses),
    )


def _pooled(samples: Sequence[Samples]) -> Samples:
    def joined(pick: Callable[[Samples], list[float]]) -> list[float]:
        return [value for one in samples for value in pick(one)]

    return Samples(
        probes=joined(lambda one: one.probes),
        fresh=joined(lambda one: one.fresh),
        hits=joined(lambda one: one.hits),
        misses=joined(lambda one: one.misses),
    )
