"""What can be said of a candidate by now: five figures beside the control's, with intervals.

All five intervals hold together, at every look, with 95 % (``router.confidence``; by Bonferroni
each has a fifth of the 5 %). A guardrail is broken when the whole interval is beyond its limit, so
that of candidates that change nothing at most 5 % are rolled back, wherever the limits are.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from router.canary_sums import PER_OCTAVE, bin_start_s
from router.confidence import (
    LEAST_GROUPS,
    Estimate,
    Interval,
    Known,
    adjusted,
    around,
    difference,
    effective_requests,
    evenness,
    multiplier,
    ratio_of_sums,
    share_error,
    wilson,
)
from router.split import CANDIDATE, CONTROL

if TYPE_CHECKING:
    from router.canary_setting import Guardrails, RatioGuardrail, ShareGuardrail
    from router.canary_sums import CanarySums, Group

ALPHA: Final = 0.05
MEASURES: Final = 5
QUANTILE: Final = 0.95
TTFT_EFFECT: Final = 0.15
"""Sizes of changes that matter; the intervals are tightest for them. Of a logarithm: 15 %."""
IMBALANCE_EFFECT: Final = 0.3
ERROR_EFFECT: Final = 0.02
HIT_EFFECT: Final = 0.05


class Word(enum.StrEnum):
    """The candidate beside the control."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "no difference seen yet"
    UNKNOWN = "too little to tell"


class Measure(Struct, frozen=True, kw_only=True):
    """One figure. ``change`` is a ratio (candidate over control) or a difference of shares.

    That of ``ttft_mean`` leaves out what prompts and the load of the moment explain.

    ``is_broken``: surely beyond ``limit``; ``is_within``: surely within. ``why`` says what is
    missing where there is no interval.
    """

    name: str
    word: Word
    kind: str
    control: float | None
    candidate: float | None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    limit: float | None = None
    is_broken: bool = False
    is_within: bool = False
    why: str = ""


class CanaryVerdict(Struct, frozen=True, kw_only=True):
    """All figures; ``word`` is the worst that can be said: better only where nothing is worse.

    ``confidence`` is that of all intervals together, over all looks. Groups are those of a side
    that had any request, of ``router.split.GROUPS``; None in what an older version wrote.
    """

    word: Word
    control_requests: int
    candidate_requests: int
    measures: tuple[Measure, ...]
    confidence: float = 1.0 - ALPHA
    control_groups: int | None = None
    candidate_groups: int | None = None

    @property
    def carries(self) -> bool:
        """Whether a candidate may be promoted on it: enough was seen, and nothing is worse."""
        return self.word not in {Word.WORSE, Word.UNKNOWN}

    @property
    def broken(self) -> tuple[Measure, ...]:
        """The guardrails that are surely broken."""
        return tuple(one for one in self.measures if one.is_broken)

    @property
    def unsure(self) -> tuple[Measure, ...]:
        """The guardrails within which the candidate is not for sure."""
        return tuple(one for one in self.measures if one.limit is not None and not one.is_within)


def judge(sums: CanarySums, guardrails: Guardrails, alpha: float = ALPHA) -> CanaryVerdict:
    """Return what ``sums`` say; ``alpha`` is what may be wrong of all figures over all looks."""
    each = alpha / MEASURES
    control, candidate = sums.of(CONTROL), sums.of(CANDIDATE)
    measures = (
        _ratio("ttft_mean", _means(control, candidate, each), guardrails.ttft_mean, sums),
        _ratio("ttft_p95", _percentiles(control, candidate, each), guardrails.ttft_p95, sums),
        _share("errors", _errors(control, candidate, each), guardrails.errors, sums),
        _share("token_hits", _hits(control, candidate, each), guardrails.token_hits, sums, sign=-1),
        _ratio("imbalance", _imbalances(control, candidate, each), guardrails.imbalance, sums),
    )
    words = {one.word for one in measures}
    order = (Word.WORSE, Word.BETTER, Word.SAME, Word.UNKNOWN)
    return CanaryVerdict(
        word=next(word for word in order if word in words),
        control_requests=sums.requests(CONTROL),
        candidate_requests=sums.requests(CANDIDATE),
        measures=measures,
        confidence=1.0 - alpha,
        control_groups=sum(group.requests > 0 for group in control),
        candidate_groups=sum(group.requests > 0 for group in candidate),
    )


class _Compared(Struct, frozen=True):
    """Both figures, and the interval of their change; None with too little."""

    control: float | None
    candidate: float | None
    change: Interval | None


_NOTHING: Final = _Compared(None, None, None)


def _means(control: list[Group], candidate: list[Group], alpha: float) -> _Compared:
    means = adjusted([[_known(group) for group in side] for side in (control, candidate)])
    if means is None:
        return _NOTHING
    compared = _log_ratio(means[0], means[1], TTFT_EFFECT, alpha)
    plain = [
        sum(g.ttft_s for g in side) / sum(g.ttfts for g in side) for side in (control, candidate)
    ]
    return _Compared(plain[0], plain[1], compared.change)


def _known(group: Group) -> Known:
    return Known(group.ttft_s, group.ttfts, group.usual_s, group.ttft_prompt_tokens)


def _imbalances(control: list[Group], candidate: list[Group], alpha: float) -> _Compared:
    old = evenness([group.replicas for group in control])
    new = evenness([group.replicas for group in candidate])
    return _log_ratio(old, new, IMBALANCE_EFFECT, alpha)


def _log_ratio(
    old: Estimate | None, new: Estimate | None, effect: float, alpha: float
) -> _Compared:
    """Return the ratio of two means by the delta method, on the logarithm's scale."""
    if old is None or new is None:
        return _Compared(old.value if old else None, new.value if new else None, None)
    if min(old.value, new.value) <= 0:
        return _Compared(old.value, new.value, None)
    error = math.hypot(old.error / old.value, new.error / new.value)
    if not math.isfinite(error):
        return _Compared(old.value, new.value, None)
    z = multiplier(error, effect, alpha, old.groups + new.groups - 2)
    change = around(Estimate(math.log(new.value / old.value), error, 0), z)
    return _Compared(old.value, new.value, Interval(*map(_exp, change)))


def _percentiles(control: list[Group], candidate: list[Group], alpha: float) -> _Compared:
    old, new = _Times(control), _Times(candidate)
    if not old.total or not new.total:
        return _NOTHING
    if min(old.groups, new.groups) < LEAST_GROUPS:
        return _Compared(old.time_s(QUANTILE), new.time_s(QUANTILE), None)
    error = math.hypot(old.log_error(), new.log_error())
    if not math.isfinite(error):
        return _Compared(old.time_s(QUANTILE), new.time_s(QUANTILE), None)
    z = multiplier(error, TTFT_EFFECT, alpha, old.groups + new.groups - 2)
    change = difference(new.log_interval(z), old.log_interval(z))
    return _Compared(old.time_s(QUANTILE), new.time_s(QUANTILE), Interval(*map(_exp, change)))


class _Times:
    """The times to first token of a side, and how sure a percentile of them is (Woodruff, 1952)."""

    def __init__(self, groups: list[Group]) -> None:
        self._bins: dict[int, int] = {}
        for group in groups:
            for at, number in group.bins.items():
                self._bins[at] = self._bins.get(at, 0) + number
        self._order = sorted(self._bins)
        self.total = sum(self._bins.values())
        self.groups = sum(group.ttfts > 0 for group in groups)
        self._error = math.inf
        if self.total:
            cut = self._bin_of(QUANTILE)
            below = [
                (float(sum(n for at, n in group.bins.items() if at <= cut)), float(group.ttfts))
                for group in groups
            ]
            share = ratio_of_sums(below)
            if share is not None:
                # A bin holds many: within it, the share is that of the percentile itself.
                least = math.sqrt(QUANTILE * (1 - QUANTILE) / self.total)
                self._error = max(least, share.error)

    def _bin_of(self, share: float) -> int:
        seen = 0
        for at in self._order:
            seen += self._bins[at]
            if seen >= share * self.total:
                return at
        return self._order[-1]

    def time_s(self, share: float) -> float:
        """Return the time within which this share began; infinite beyond all of them."""
        if share <= 0.0:
            return 0.0
        if share > 1.0 - 0.5 / self.total:
            return math.inf
        seen, wanted = 0, share * self.total
        for at in self._order:
            here = self._bins[at]
            if seen + here >= wanted:
                return bin_start_s(at) * math.exp2((wanted - seen) / here / PER_OCTAVE)
            seen += here
        return math.inf

    def log_error(self) -> float:
        """Return the standard error of the percentile's logarithm: half of what one reaches."""
        low, high = self.time_s(QUANTILE - self._error), self.time_s(QUANTILE + self._error)
        middle = self.time_s(QUANTILE)
        if not math.isfinite(high) or low <= 0.0:
            return math.inf if low <= 0.0 else math.log(middle / low)
        return max(math.log(high / low) / 2, 1 / (4 * PER_OCTAVE) * math.log(2))

    def log_interval(self, z: float) -> Interval:
        """Return the logarithm of the percentile, and of its ends."""
        ends = (QUANTILE - z * self._error, QUANTILE + z * self._error)
        return Interval(
            _log(self.time_s(QUANTILE)), _log(self.time_s(ends[0])), _log(self.time_s(ends[1]))
        )


def _errors(control: list[Group], candidate: list[Group], alpha: float) -> _Compared:
    sides, shares, errors = [], [], []
    for groups in (control, candidate):
        share = ratio_of_sums([(group.failed, group.requests) for group in groups])
        if share is None:
            return _NOTHING
        requests = sum(group.requests for group in groups)
        shares.append(share)
        sides.append(effective_requests(share, requests))
        errors.append(share_error(share, requests))
    old, new = shares
    if min(old.groups, new.groups) < LEAST_GROUPS:
        return _Compared(old.value, new.value, None)
    z = multiplier(math.hypot(*errors), ERROR_EFFECT, alpha, old.groups + new.groups - 2)
    ends = [
        Interval(one.value, *wilson(one.value, n, z)) for one, n in zip(shares, sides, strict=True)
    ]
    return _Compared(old.value, new.value, difference(ends[1], ends[0]))


def _hits(control: list[Group], candidate: list[Group], alpha: float) -> _Compared:
    old = ratio_of_sums([(group.cached_tokens, group.told_tokens) for group in control])
    new = ratio_of_sums([(group.cached_tokens, group.told_tokens) for group in candidate])
    if old is None or new is None:
        return _Compared(old.value if old else None, new.value if new else None, None)
    error = math.hypot(old.error, new.error)
    if not math.isfinite(error):
        return _Compared(old.value, new.value, None)
    z = multiplier(error, HIT_EFFECT, alpha, old.groups + new.groups - 2)
    change = around(Estimate(new.value - old.value, error, 0), z)
    return _Compared(old.value, new.value, change)


def _ratio(name: str, seen: _Compared, rail: RatioGuardrail, sums: CanarySums) -> Measure:
    return _measure(name, "ratio", seen, rail, sums, same=1.0, sign=1)


def _share(
    name: str, seen: _Compared, rail: ShareGuardrail, sums: CanarySums, *, sign: int = 1
) -> Measure:
    return _measure(name, "difference", seen, rail, sums, same=0.0, sign=sign)


def _measure(
    name: str,
    kind: str,
    seen: _Compared,
    rail: RatioGuardrail | ShareGuardrail,
    sums: CanarySums,
    *,
    same: float,
    sign: int,
) -> Measure:
    """Return the figure with its word; ``sign`` is -1 where more is better."""
    limit = rail.limit * sign if rail.enabled else None
    change, why = seen.change, ""
    fewest = min(sums.requests(CONTROL), sums.requests(CANDIDATE))
    if fewest < rail.min_requests:
        change, why = None, f"{fewest} of {rail.min_requests} requests on the side with fewer"
    elif seen.control is None or seen.candidate is None:
        why = "nothing was reported"
    elif change is None:
        why = f"expected requests in {LEAST_GROUPS} groups of conversations, or tenants, on a side"
    if name == "imbalance" and None in {seen.control, seen.candidate}:
        lacking = "2 groups of conversations, or tenants, are needed for a side's figure"
        why = f"{why}; {lacking}" if fewest < rail.min_requests else lacking
    if change is None or math.isnan(change.low + change.high):
        return Measure(
            name=name, word=Word.UNKNOWN, kind=kind, control=seen.control,
            candidate=seen.candidate, limit=limit, why=why,
        )  # fmt: skip
    bad, good = (change.low, change.high) if sign > 0 else (change.high, change.low)
    word = Word.SAME
    if sign * bad > sign * same:
        word = Word.WORSE
    elif sign * good < sign * same:
        word = Word.BETTER
    return Measure(
        name=name,
        word=word,
        kind=kind,
        control=seen.control,
        candidate=seen.candidate,
        change=change.value,
        low=_finite(change.low),
        high=_finite(change.high),
        limit=limit,
        is_broken=limit is not None and sign * bad > sign * limit,
        is_within=limit is not None and sign * good <= sign * limit,
    )


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0)) if value < math.inf else math.inf


def _log(value: float) -> float:
    return math.log(value) if 0.0 < value < math.inf else (math.inf if value else -math.inf)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
