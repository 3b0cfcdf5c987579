"""Several scores side by side, each figure also as a ratio to a baseline's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replay.score import Score

POOLED = "pooled"


class ComparedScore(Struct, frozen=True, kw_only=True):
    """One replay's figures, and ``*_ratio`` of them to the baseline's; None where unknown."""

    name: str
    requests: int
    failed: int
    ttft_mean_s: float | None
    ttft_mean_ratio: float | None
    ttft_p50_s: float | None
    ttft_p50_ratio: float | None
    ttft_p90_s: float | None
    ttft_p90_ratio: float | None
    ttft_p99_s: float | None
    ttft_p99_ratio: float | None
    tpot_mean_s: float | None
    tpot_mean_ratio: float | None
    inside_share: float | None
    inside_requests_per_s: float | None
    inside_requests_per_s_ratio: float | None
    token_hit_ratio: float | None
    token_hit_ratio_ratio: float | None
    imbalance_requests: float | None
    imbalance_prefill: float | None
    spills: int


class Comparison(Struct, frozen=True, kw_only=True):
    """Rows in the order given, and the one that is 1.00 in every ratio."""

    baseline: str
    rows: tuple[ComparedScore, ...]


def compare(scores: Mapping[str, Score], baseline: str | None = None) -> Comparison:
    """Return ``scores`` side by side; None takes "pooled", or the first where that is not there.

    Raises ValueError without scores and for a baseline that is not one of them.
    """
    if not scores:
        msg = "nothing to compare"
        raise ValueError(msg)
    chosen = baseline or (POOLED if POOLED in scores else next(iter(scores)))
    if chosen not in scores:
        msg = f"baseline {chosen!r} is none of {', '.join(scores)}"
        raise ValueError(msg)
    base = scores[chosen]
    return Comparison(
        baseline=chosen,
        rows=tuple(_row(name, score, base) for name, score in scores.items()),
    )


def _row(name: str, score: Score, base: Score) -> ComparedScore:
    ttft, tpot, good = score.ttft, score.tpot, score.goodput
    return ComparedScore(
        name=name,
        requests=score.requests,
        failed=score.failed,
        ttft_mean_s=ttft.mean_s,
        ttft_mean_ratio=_times(ttft.mean_s, base.ttft.mean_s),
        ttft_p50_s=ttft.p50_s,
        ttft_p50_ratio=_times(ttft.p50_s, base.ttft.p50_s),
        ttft_p90_s=ttft.p90_s,
        ttft_p90_ratio=_times(ttft.p90_s, base.ttft.p90_s),
        ttft_p99_s=ttft.p99_s,
        ttft_p99_ratio=_times(ttft.p99_s, base.ttft.p99_s),
        tpot_mean_s=tpot.mean_s,
        tpot_mean_ratio=_times(tpot.mean_s, base.tpot.mean_s),
        inside_share=good.inside_share,
        inside_requests_per_s=good.inside_requests_per_s,
        inside_requests_per_s_ratio=_times(
            good.inside_requests_per_s, base.goodput.inside_requests_per_s
        ),
        token_hit_ratio=score.token_hit_ratio,
        token_hit_ratio_ratio=_times(score.token_hit_ratio, base.token_hit_ratio),
        imbalance_requests=score.imbalance_requests,
        imbalance_prefill=score.imbalance_prefill,
        spills=score.spills,
    )


def _times(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base
