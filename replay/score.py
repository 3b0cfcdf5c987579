"""What a replay was worth: hits, latency, goodput and balance as one value.

A request that failed (``error``) is counted and is in no hit ratio, latency or percentile. What is
unknown (None) is left out and counted, never taken for 0. Percentiles interpolate linearly between
the two closest ranks, rank 0 being the smallest and rank n - 1 the largest.
"""

from __future__ import annotations

from collections import Counter
from math import ceil, floor
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from policies.model import Reason
from policies.prefill import PrefillCost
from replay.concentration import Concentration, concentration

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from replay.outcome import Outcome, ReplayRun

Limit = Annotated[float, Meta(gt=0)]


class Slo(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request must keep to count as good; None: no such limit."""

    ttft_s: Limit | None = 2.0
    tpot_s: Limit | None = 0.1


class Spread(Struct, frozen=True, kw_only=True):
    """How a time spreads over the ``known`` requests; None when there are none."""

    known: int
    unknown: int
    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None


class Goodput(Struct, frozen=True, kw_only=True):
    """Requests inside the limits.

    The share is of all whose TTFT is known and of those that failed. A request of one output token
    has no TPOT: its TTFT alone decides.
    """

    ttft_limit_s: float | None
    tpot_limit_s: float | None
    inside_requests: int
    unknown_requests: int
    inside_share: float | None
    inside_requests_per_s: float | None


class Prediction(Struct, frozen=True, kw_only=True):
    """The router's guess beside what the engine had without fetching, where both are known.

    An error is predicted less actual: positive where the router hoped for too much.
    """

    compared_requests: int
    unknown_requests: int
    predicted_tokens: int | None
    actual_tokens: int | None
    exact_request_share: float | None
    mean_error_tokens: float | None
    mean_abs_error_tokens: float | None


class ReplicaShare(Struct, frozen=True, kw_only=True):
    """What one replica got. ``uncached_tokens`` are its prefill work, of the known requests."""

    replica: str
    requests: int
    failed: int
    uncached_tokens: int
    token_hit_ratio: float | None


class Score(Struct, frozen=True, kw_only=True):
    """Every figure of one replay; ratios are from 0 to 1.

    ``hit_unknown_requests`` were answered, but the engine did not tell their cached tokens.
    ``prefill_saved_ms`` is the prefill of whole prompts less that of their uncached rest, at speed
    1; what fetching took is not taken off. ``imbalance_*`` is the number of replicas times the
    largest one's share: 1 is even, the number of replicas is all on one. ``held_bytes_mean`` is
    over all replicas and the whole span.
    """

    trace: str
    policy: str
    seed: int
    span_s: float
    requests: int
    failed: int
    request_hit_ratio: float | None
    token_hit_ratio: float | None
    hit_unknown_requests: int
    prompt_tokens: int
    cached_tokens: int
    fetched_tokens: int
    prediction: Prediction
    prefill_saved_ms: float | None
    prefill_saved_share: float | None
    held_bytes_mean: float | None
    ttft: Spread
    tpot: Spread
    goodput: Goodput
    imbalance_requests: float | None
    imbalance_prefill: float | None
    replicas: tuple[ReplicaShare, ...]
    spills: int
    reasons: dict[str, int]
    reason_unknown_requests: int
    preemptions: int
    evictions: int | None
    held_requests: int
    held_s: float
    hits_by_prefix: Concentration | None
    hit_tokens_by_prefix: Concentration | None
    hits_by_tenant: Concentration | None
    hit_tokens_by_tenant: Concentration | None


class Regret(Struct, frozen=True, kw_only=True):
    """A replay beside a bound, over the requests whose TTFT both know: 1 and 0 s is as good."""

    bound: str
    compared_requests: int
    unknown_requests: int
    mean_ttft_ratio: float | None
    mean_difference_s: float | None


def ratio(part: float, whole: float) -> float | None:
    """Return ``part`` of ``whole``; None where there is no whole."""
    return part / whole if whole else None


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Return the value below which ``share`` of the ascending values lie; None without values."""
    if not ordered:
        return None
    rank = share * (len(ordered) - 1)
    low, high = ordered[floor(rank)], ordered[ceil(rank)]
    return low + (high - low) * (rank - floor(rank))


def spread(times_s: Iterable[float | None]) -> Spread:
    """Return how the known ones of ``times_s`` spread."""
    every = list(times_s)
    known = sorted(time_s for time_s in every if time_s is not None)
    return Spread(
        known=len(known),
        unknown=len(every) - len(known),
        mean_s=ratio(sum(known), len(known)),
        p50_s=percentile(known, 0.5),
        p90_s=percentile(known, 0.9),
        p99_s=percentile(known, 0.99),
    )


def imbalance(amounts: Collection[int], replicas: int) -> float | None:
    """Return ``replicas`` times the largest share of ``amounts``; None when all is 0."""
    return ratio(replicas * max(amounts, default=0), sum(amounts))


def answered(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return those that did not fail."""
    return [outcome for outcome in outcomes if outcome.error is None]


def token_hit_ratio(outcomes: Iterable[Outcome]) -> float | None:
    """Return the cached share of the prompt tokens, over the answered requests that tell."""
    prompt_tokens = cached_tokens = 0
    for outcome in outcomes:
        if outcome.error is None and outcome.cached_tokens is not None:
            prompt_tokens += outcome.prompt_tokens
            cached_tokens += outcome.cached_tokens
    return ratio(cached_tokens, prompt_tokens)


def is_inside(outcome: Outcome, slo: Slo) -> bool | None:
    """Whether a request kept the limits; None when its TTFT is unknown although it was answered."""
    if outcome.error is not None:
        return False
    if outcome.ttft_s is None:
        return None
    tpot_s = outcome.tpot_s
    return (slo.ttft_s is None or outcome.ttft_s <= slo.ttft_s) and (
        slo.tpot_s is None or tpot_s is None or tpot_s <= slo.tpot_s
    )


def goodput(run: ReplayRun, slo: Slo) -> Goodput:
    """Return what of a replay was inside the limits."""
    verdicts = Counter(is_inside(outcome, slo) for outcome in run.outcomes)
    return Goodput(
        ttft_limit_s=slo.ttft_s,
        tpot_limit_s=slo.tpot_s,
        inside_requests=verdicts[True],
        unknown_requests=verdicts[None],
        inside_share=ratio(verdicts[True], verdicts[True] + verdicts[False]),
        inside_requests_per_s=ratio(verdicts[True], run.span_s),
    )


def prediction(outcomes: Collection[Outcome]) -> Prediction:
    """Return the router's guesses beside what became of them."""
    pairs = [
        (outcome.predicted_cached_tokens, outcome.cached_tokens - outcome.fetched_tokens)
        for outcome in outcomes
        if outcome.predicted_cached_tokens is not None and outcome.cached_tokens is not None
    ]
    errors = [predicted - actual for predicted, actual in pairs]
    return Prediction(
        compared_requests=len(pairs),
        unknown_requests=len(outcomes) - len(pairs),
        predicted_tokens=sum(predicted for predicted, _ in pairs) if pairs else None,
        actual_tokens=sum(actual for _, actual in pairs) if pairs else None,
        exact_request_share=ratio(errors.count(0), len(errors)),
        mean_error_tokens=ratio(sum(errors), len(errors)),
        mean_abs_error_tokens=ratio(sum(map(abs, errors)), len(errors)),
    )


def replica_shares(run: ReplayRun) -> tuple[ReplicaShare, ...]:
    """Return what each replica got: the run's own first, then any that was used beside them."""
    sent: dict[str, list[Outcome]] = {replica: [] for replica in run.replicas}
    for outcome in run.outcomes:
        if outcome.replica:
            sent.setdefault(outcome.replica, []).append(outcome)
    return tuple(
        ReplicaShare(
            replica=replica,
            requests=len(outcomes),
            failed=sum(outcome.error is not None for outcome in outcomes),
            uncached_tokens=sum(
                outcome.prompt_tokens - outcome.cached_tokens
                for outcome in answered(outcomes)
                if outcome.cached_tokens is not None
            ),
            token_hit_ratio=token_hit_ratio(outcomes),
        )
        for replica, outcomes in sent.items()
    )


def score_run(run: ReplayRun, slo: Slo | None = None) -> Score:
    """Return every figure of a replay; ``slo`` None stands for 2 s and 0.1 s per token."""
    good = answered(run.outcomes)
    told = [outcome for outcome in good if outcome.cached_tokens is not None]
    replicas = replica_shares(run)
    reasons = Counter(outcome.reason for outcome in run.outcomes if outcome.reason)
    saved_ms, saved_share = _prefill_saved(run, told)
    by_prefix = [(outcome.prefix, outcome.cached_tokens or 0) for outcome in told]
    by_tenant = [(outcome.tenant, outcome.cached_tokens or 0) for outcome in told]
    return Score(
        trace=run.trace,
        policy=run.policy,
        seed=run.seed,
        span_s=run.span_s,
        requests=len(run.outcomes),
        failed=len(run.outcomes) - len(good),
        request_hit_ratio=ratio(sum(tokens > 0 for _, tokens in by_prefix), len(told)),
        token_hit_ratio=token_hit_ratio(told),
        hit_unknown_requests=len(good) - len(told),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in told),
        cached_tokens=sum(tokens for _, tokens in by_prefix),
        fetched_tokens=sum(outcome.fetched_tokens for outcome in told),
        prediction=prediction(good),
        prefill_saved_ms=saved_ms,
        prefill_saved_share=saved_share,
        held_bytes_mean=_held_bytes_mean(run),
        ttft=spread(outcome.ttft_s for outcome in good),
        tpot=spread(outcome.tpot_s for outcome in good),
        goodput=goodput(run, slo or Slo()),
        imbalance_requests=imbalance([r.requests for r in replicas], len(replicas)),
        imbalance_prefill=imbalance([r.uncached_tokens for r in replicas], len(replicas)),
        replicas=replicas,
        spills=reasons[Reason.SPILL],
        reasons=dict(sorted(reasons.items())),
        reason_unknown_requests=len(run.outcomes) - reasons.total(),
        preemptions=sum(outcome.preemptions for outcome in run.outcomes),
        evictions=run.evictions,
        held_requests=sum(outcome.held_s > 0 for outcome in run.outcomes),
        held_s=sum(outcome.held_s for outcome in run.outcomes),
        hits_by_prefix=_concentration((name, int(tokens > 0)) for name, tokens in by_prefix),
        hit_tokens_by_prefix=_concentration(by_prefix),
        hits_by_tenant=_concentration((name, int(tokens > 0)) for name, tokens in by_tenant),
        hit_tokens_by_tenant=_concentration(by_tenant),
    )


def _prefill_saved(run: ReplayRun, told: Collection[Outcome]) -> tuple[float | None, float | None]:
    """Return the prefill that hits saved, in ms and as a share; None where its cost is unknown."""
    if not run.token_ms or not told:
        return None, None
    cost = PrefillCost(token_ms=run.token_ms, attention_pair_ms=run.attention_pair_ms)
    whole_ms = left_ms = 0.0
    for outcome in told:
        cached_tokens = outcome.cached_tokens or 0
        whole_ms += cost.ms(outcome.prompt_tokens, 0)
        left_ms += cost.ms(outcome.prompt_tokens - cached_tokens, cached_tokens)
    return whole_ms - left_ms, ratio(whole_ms - left_ms, whole_ms)


def _held_bytes_mean(run: ReplayRun) -> float | None:
    if run.resident_tokens_s is None or run.kv_bytes_per_token is None or run.span_s <= 0:
        return None
    return run.resident_tokens_s / run.span_s * run.kv_bytes_per_token


def _concentration(amounts: Iterable[tuple[str, int]]) -> Concentration | None:
    sums: dict[str, int] = {}
    for name, amount in amounts:
        sums[name] = sums.get(name, 0) + amount
    return concentration(sums)


def regret(run: ReplayRun, bound: ReplayRun, name: str) -> Regret:
    """Return how much later ``run`` answered than ``bound``, request by request (by ordinal)."""
    best_s = {outcome.ordinal: outcome.ttft_s for outcome in answered(bound.outcomes)}
    pairs = [
        (outcome.ttft_s, bound_s)
        for outcome in answered(run.outcomes)
        if outcome.ttft_s is not None and (bound_s := best_s.get(outcome.ordinal)) is not None
    ]
    own_s, bound_s = sum(own for own, _ in pairs), sum(best for _, best in pairs)
    return Regret(
        bound=name,
        compared_requests=len(pairs),
        unknown_requests=len(run.outcomes) - len(pairs),
        mean_ttft_ratio=ratio(own_s, bound_s),
        mean_difference_s=ratio(own_s - bound_s, len(pairs)),
    )
