"""The report of replays of one trace, as one value that JSON, terminal and page show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from replay.caution import warnings
from replay.comparison import Comparison, compare
from replay.concentration import SharingFacts, sharing_facts
from replay.score import Regret, Score, Slo, regret, score_run, token_hit_ratio
from replay.timeline import Bucket, CdfPoint, TenantScore, tenant_scores, timeline, ttft_cdf

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replay.outcome import ReplayRun


class RunReport(Struct, frozen=True, kw_only=True):
    """One replay: its figures, over time, per tenant, and what to beware of."""

    name: str
    warnings: tuple[str, ...]
    score: Score
    regrets: tuple[Regret, ...]
    sharing: SharingFacts
    timeline: tuple[Bucket, ...]
    tenants: tuple[TenantScore, ...]
    ttft_cdf: tuple[CdfPoint, ...]


class Report(Struct, frozen=True, kw_only=True):
    """Replays of one trace by name; ``comparison`` also has the bounds, None for a lone replay."""

    trace: str
    runs: tuple[RunReport, ...]
    comparison: Comparison | None


def report_run(
    name: str,
    run: ReplayRun,
    *,
    slo: Slo | None = None,
    bounds: Mapping[str, ReplayRun] | None = None,
    possible_hit_ratio: float | None = None,
    buckets: int | None = None,
) -> RunReport:
    """Return the report of one replay.

    ``possible_hit_ratio`` is the share of prompt tokens that a cache without limits hits; None
    takes it from a bound that is called "infinite".
    """
    bounds = bounds or {}
    score = score_run(run, slo)
    if possible_hit_ratio is None and "infinite" in bounds:
        possible_hit_ratio = token_hit_ratio(bounds["infinite"].outcomes)
    sharing = sharing_facts(run.outcomes, possible_hit_ratio)
    return RunReport(
        name=name,
        warnings=warnings(run, score, sharing),
        score=score,
        regrets=tuple(regret(run, bound, of) for of, bound in bounds.items()),
        sharing=sharing,
        timeline=timeline(run, buckets),
        tenants=tenant_scores(run),
        ttft_cdf=ttft_cdf(run),
    )


def report(
    runs: Mapping[str, ReplayRun],
    *,
    slo: Slo | None = None,
    bounds: Mapping[str, ReplayRun] | None = None,
    possible_hit_ratio: float | None = None,
    baseline: str | None = None,
    buckets: int | None = None,
) -> Report:
    """Return the report of ``runs`` by name, compared with each other and with ``bounds``.

    Raises ValueError without runs, and for a baseline that is neither a run nor a bound.
    """
    bounds = bounds or {}
    made = tuple(
        report_run(
            name,
            run,
            slo=slo,
            bounds=bounds,
            possible_hit_ratio=possible_hit_ratio,
            buckets=buckets,
        )
        for name, run in runs.items()
    )
    scores = {name: score_run(bound, slo) for name, bound in bounds.items()}
    scores |= {one.name: one.score for one in made}
    comparison = compare(scores, baseline)
    return Report(
        trace=made[0].score.trace if made else "",
        runs=made,
        comparison=comparison if len(scores) > 1 else None,
    )


def report_json(value: Report) -> bytes:
    """Return the report as indented JSON; every name says its unit, unknown is null."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2)
