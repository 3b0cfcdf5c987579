"""The report as one HTML page: charts, tables and style inside, no scripts, nothing fetched."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined
from msgspec import Struct

from replay import label
from replay.chart import (
    Axis,
    Bar,
    Caption,
    Line,
    bar_chart,
    line_chart,
    linear_axis,
    log_axis,
    span_axis,
)
from replay.report import RunReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replay.report import Report
    from replay.score import Score
    from replay.timeline import Bucket

MAX_ROWS = 20
"""Tenants of the table; the JSON has all."""
MAX_BARS = 24
LOG_FROM = 50
"""An axis is logarithmic where its largest value is so many times its least."""
CDF_SHARES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


class Card(Struct, frozen=True, kw_only=True):
    """One key figure: its name, its value, and what explains it."""

    name: str
    value: str
    note: str = ""


def page(report: Report) -> str:
    """Return the whole page; every string of the trace is escaped."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["label"] = label
    environment.filters["foreign"] = label.foreign
    template = environment.from_string(
        files("replay").joinpath("report_page.html").read_text(encoding="utf-8")
    )
    everywhere = _common_warnings(report.runs)
    return template.render(
        report=report,
        warnings=everywhere,
        own_warnings=[
            (run, own)
            for run in report.runs
            if (own := [text for text in run.warnings if text not in everywhere])
        ],
        overlays=overlays(report.runs) if len(report.runs) > 1 else [],
        sections=[_section(index, run) for index, run in enumerate(report.runs)],
        max_rows=MAX_ROWS,
    )


class Section(Struct, frozen=True, kw_only=True):
    """One replay's part of the page."""

    run: RunReport
    cards: list[Card]
    charts: list[str]
    cdf: list[tuple[float, float]]


def _section(index: int, run: RunReport) -> Section:
    return Section(
        run=run,
        cards=cards(run),
        charts=run_charts(f"run{index}", run),
        cdf=[(point.share, point.time_s) for point in run.ttft_cdf if point.share in CDF_SHARES],
    )


def _common_warnings(runs: Sequence[RunReport]) -> list[str]:
    if not runs:
        return []
    return [text for text in runs[0].warnings if all(text in run.warnings for run in runs)]


def cards(run: RunReport) -> list[Card]:
    """Return the key figures of one replay."""
    score = run.score
    good = score.goodput
    found = [
        Card(
            name="Token hit ratio",
            value=label.share(score.token_hit_ratio),
            note=f"{label.share(score.request_hit_ratio)} of requests hit",
        ),
        Card(
            name="Mean TTFT",
            value=label.seconds(score.ttft.mean_s),
            note=f"p50 {label.seconds(score.ttft.p50_s)} · p99 {label.seconds(score.ttft.p99_s)}",
        ),
        Card(
            name="Mean TPOT",
            value=label.seconds(score.tpot.mean_s),
            note=f"p50 {label.seconds(score.tpot.p50_s)} · p99 {label.seconds(score.tpot.p99_s)}",
        ),
        Card(
            name="Inside the limits",
            value=label.share(good.inside_share),
            note=f"{label.rate(good.inside_requests_per_s)} · {_limits(score)}",
        ),
        Card(
            name="Prefill saved",
            value=label.share(score.prefill_saved_share),
            note=_saved(score),
        ),
        Card(
            name="Imbalance",
            value=label.factor(score.imbalance_requests),
            note=f"of prefill work {label.factor(score.imbalance_prefill)} · 1 is even",
        ),
        Card(
            name="KV held, mean",
            value=label.size(score.held_bytes_mean),
            note=f"{label.count(score.evictions)} evictions",
        ),
    ]
    found += [
        Card(
            name=f"Mean TTFT against {label.foreign(regret.bound)}",
            value=label.times(regret.mean_ttft_ratio),
            note=f"{label.difference(regret.mean_difference_s)} a request",
        )
        for regret in run.regrets
    ]
    return found


def _limits(score: Score) -> str:
    good = score.goodput
    limits = [
        f"{name} ≤ {label.seconds(limit_s)}"
        for name, limit_s in (("TTFT", good.ttft_limit_s), ("TPOT", good.tpot_limit_s))
        if limit_s is not None
    ]
    return ", ".join(limits) or "no limit"


def _saved(score: Score) -> str:
    if score.prefill_saved_ms is None:
        return "the cost of prefill is unknown"
    return f"{label.seconds(score.prefill_saved_ms / 1000)} in all"


def run_charts(key: str, run: RunReport) -> list[str]:
    """Return the figures of one replay; there are none without requests."""
    if not run.timeline:
        return []
    mean, p99, hits, rate, balance = TRACKS
    both = [_line("mean", run, mean), _line("p99", run, p99)]
    named = [("", run)]
    return [
        _over_time(f"{key}-ttft", "TTFT over time: mean and p99", both, [run], mean),
        _track_chart(key, named, hits),
        _cdf_chart(key, named),
        _replica_chart(key, run),
        _track_chart(key, named, rate),
        _track_chart(key, named, balance),
    ]


def overlays(runs: Sequence[RunReport]) -> list[str]:
    """Return the figures that show all replays at once."""
    named = [(run.name, run) for run in runs if run.timeline]
    if not named:
        return []
    return [*(_track_chart("all", named, track) for track in TRACKS[:3]), _cdf_chart("all", named)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Track:
    """A figure of every stretch of time, and the axis on which it is drawn."""

    key: str
    title: str
    unit: str = ""
    of: Callable[[Bucket], float | None]
    axis: Callable[[Sequence[float]], Axis]


def _time_axis(times_s: Sequence[float]) -> Axis:
    positive = [time_s for time_s in times_s if time_s > 0]
    is_wide = bool(positive) and max(positive) > LOG_FROM * min(positive)
    return (log_axis if is_wide else linear_axis)(positive, label.tick_seconds)


def _share_axis(_shares: Sequence[float]) -> Axis:
    return linear_axis([1.0], label.tick_share)


TRACKS = (
    Track(key="mean", title="Mean TTFT over time", of=lambda b: b.ttft_mean_s, axis=_time_axis),
    Track(key="p99", title="p99 of TTFT over time", of=lambda b: b.ttft_p99_s, axis=_time_axis),
    Track(
        key="hit",
        title="Token hit ratio over time",
        of=lambda b: b.token_hit_ratio,
        axis=_share_axis,
    ),
    Track(
        key="rate",
        title="Arrivals over time",
        unit="per second",
        of=lambda b: b.rate_per_s,
        axis=lambda rates: linear_axis(rates, label.tick),
    ),
    Track(
        key="imbalance",
        title="Imbalance over time",
        unit="1 is even",
        of=lambda b: b.imbalance_requests,
        axis=lambda factors: linear_axis(factors, label.tick, low=1.0),
    ),
)


def _track_chart(key: str, named: Sequence[tuple[str, RunReport]], track: Track) -> str:
    lines = [_line(name, run, track) for name, run in named]
    runs = [run for _, run in named]
    return _over_time(f"{key}-{track.key}", track.title, lines, runs, track)


def _line(name: str, run: RunReport, track: Track) -> Line:
    points = (((bucket.start_s + bucket.end_s) / 2, track.of(bucket)) for bucket in run.timeline)
    return Line(name=name, points=tuple(points))


def _over_time(
    key: str, title: str, lines: Sequence[Line], runs: Sequence[RunReport], track: Track
) -> str:
    caption = Caption(
        key=key,
        title=title,
        description=f"{title}, by arrival. The table of figures over time has the values.",
        x_label="time of arrival",
        y_label=track.unit,
    )
    end_s = max(bucket.end_s for run in runs for bucket in run.timeline)
    values = [y for line in lines for _, y in line.points if y is not None]
    return line_chart(caption, lines, span_axis(end_s, label.tick_seconds), track.axis(values))


def _cdf_chart(key: str, named: Sequence[tuple[str, RunReport]]) -> str:
    lines = [
        Line(name=name, points=tuple((point.time_s, point.share) for point in run.ttft_cdf))
        for name, run in named
    ]
    caption = Caption(
        key=f"{key}-cdf",
        title="Share of requests answered within a TTFT",
        description="Cumulative distribution of TTFT. The table of its percentiles has the values.",
        x_label="TTFT (logarithmic)",
    )
    times_s = [point.time_s for _, run in named for point in run.ttft_cdf]
    return line_chart(caption, lines, log_axis(times_s, label.tick_seconds), _share_axis([]))


def _replica_chart(key: str, run: RunReport) -> str:
    replicas = run.score.replicas
    sent = sum(replica.requests for replica in replicas)
    largest = sorted(replicas, key=lambda replica: -replica.requests)[:MAX_BARS]
    shown = [replica for replica in replicas if replica in largest]
    note = f"; the {MAX_BARS} busiest of {len(replicas)}" if len(shown) < len(replicas) else ""
    return bar_chart(
        Caption(
            key=f"{key}-replica",
            title="Requests per replica",
            y_label=f"dashed: an even share{note}",
            description="Requests sent to each replica. The table of replicas has the values.",
        ),
        [
            Bar(name=one.replica, amount=one.requests, text=label.count(one.requests))
            for one in shown
        ],
        sent / len(replicas) if replicas else None,
    )
