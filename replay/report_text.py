"""The report as tables of a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from replay import label

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console, RenderableType

    from replay.comparison import Comparison
    from replay.concentration import Concentration
    from replay.report import Report, RunReport
    from replay.score import Score, Spread

MAX_TENANTS = 10
UNBOUND_COLUMNS: Final = 10_000
WHOLE_NAME: Final = 24
"""Names of up to so many letters are not broken: policies' are shorter, foreign ones may not be."""


def print_report(console: Console, report: Report) -> None:
    """Print the whole report; strings of the trace are shown, never taken for markup.

    A table that is wider than the console goes without lines.
    """
    shown = text_report(report)
    unbound = console.options.update(max_width=UNBOUND_COLUMNS)
    tables = [part for part in shown.renderables if isinstance(part, Table)]
    for table in tables:
        if console.measure(table, options=unbound).maximum > console.width:
            table.box, table.padding, table.pad_edge = None, (0, 1), False
    console.print(shown)


def text_report(report: Report) -> Group:
    """Return the report for a console: warnings, the comparison, then a lone replay's tables."""
    parts: list[RenderableType] = [Text(f"Replay of {label.foreign(report.trace)}", style="bold")]
    for run in report.runs:
        parts.extend(
            Text.assemble(("! ", "bold yellow"), f"{label.foreign(run.name)}: {sentence}")
            for sentence in run.warnings
        )
    if report.comparison:
        parts.append(_comparison(report.comparison))
    if len(report.runs) == 1:
        parts.extend(_run(report.runs[0]))
    else:
        parts.append(_costs(report.runs))
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    table.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _comparison(comparison: Comparison) -> Table:
    baseline = label.foreign(comparison.baseline)
    table = _table(
        f"Side by side; in brackets, the ratio to {baseline}",
        "replay",
        "mean TTFT",
        "p50",
        "p99",
        "mean TPOT",
        "in limits",
        "token hits",
        "imbalance",
        "spills",
    )
    for row in comparison.rows:
        table.add_row(
            Text(label.foreign(row.name)),
            _against(label.seconds(row.ttft_mean_s), row.ttft_mean_ratio),
            _against(label.seconds(row.ttft_p50_s), row.ttft_p50_ratio),
            _against(label.seconds(row.ttft_p99_s), row.ttft_p99_ratio),
            _against(label.seconds(row.tpot_mean_s), row.tpot_mean_ratio),
            label.share(row.inside_share),
            _against(label.share(row.token_hit_ratio), row.token_hit_ratio_ratio),
            label.factor(row.imbalance_requests),
            label.count(row.spills),
        )
    _keep_whole(table, (row.name for row in comparison.rows))
    return table


def _costs(runs: Sequence[RunReport]) -> Table:
    table = _table(
        "What stands behind it",
        "replay",
        "request hits",
        "prefill saved",
        "KV held",
        "imbalance of prefill",
        "held",
        "preempted",
        "evictions",
        "failed",
    )
    for run in runs:
        score = run.score
        table.add_row(
            Text(label.foreign(run.name)),
            label.share(score.request_hit_ratio),
            label.share(score.prefill_saved_share),
            label.size(score.held_bytes_mean),
            label.factor(score.imbalance_prefill),
            label.count(score.held_requests),
            label.count(score.preemptions),
            label.count(score.evictions),
            label.count(score.failed),
        )
    _keep_whole(table, (run.name for run in runs))
    return table


def _keep_whole(table: Table, names: Iterable[str]) -> None:
    """Let figures wrap before the names of the first column do, unless those are long."""
    table.columns[0].no_wrap = all(len(name) <= WHOLE_NAME for name in names)


def _against(value: str, times: float | None) -> str:
    return value if times is None else f"{value} ({times:.2f})"


def _run(run: RunReport) -> Iterator[RenderableType]:
    yield Text(f"\n{label.foreign(run.name)}", style="bold underline")
    figures = _table("Figures", "what", "value")
    for name, value in _figures(run):
        figures.add_row(Text(name), value)
    yield figures
    times = _table("Times", "", "mean", "p50", "p90", "p99", "known", "unknown")
    for name, spread in (("TTFT", run.score.ttft), ("TPOT", run.score.tpot)):
        times.add_row(name, *_spread(spread))
    yield times
    yield from _concentrations(run.score)
    if any(tenant.tenant for tenant in run.tenants):
        yield _tenants(run)


def _figures(run: RunReport) -> Iterator[tuple[str, str]]:
    score = run.score
    good, guess = score.goodput, score.prediction
    saved_s = None if score.prefill_saved_ms is None else score.prefill_saved_ms / 1000
    yield "requests (failed)", f"{label.count(score.requests)} ({label.count(score.failed)})"
    yield "request hit ratio", label.share(score.request_hit_ratio)
    yield "token hit ratio", label.share(score.token_hit_ratio)
    yield "possible token hit ratio", label.share(run.sharing.possible_hit_ratio)
    yield "hits unknown", label.count(score.hit_unknown_requests)
    yield (
        "predicted / actual cached tokens",
        f"{label.count(guess.predicted_tokens)} / {label.count(guess.actual_tokens)}",
    )
    yield (
        "prefill saved",
        f"{label.seconds(saved_s)} ({label.share(score.prefill_saved_share)})",
    )
    yield "KV held, mean", label.size(score.held_bytes_mean)
    yield (
        f"inside TTFT {label.seconds(good.ttft_limit_s)}, TPOT {label.seconds(good.tpot_limit_s)}",
        f"{label.share(good.inside_share)}, {label.rate(good.inside_requests_per_s)}",
    )
    yield (
        "imbalance of requests / prefill",
        f"{label.factor(score.imbalance_requests)} / {label.factor(score.imbalance_prefill)}",
    )
    for reason, requests in score.reasons.items():
        yield f"reason {label.foreign(reason)}", label.count(requests)
    yield "held in the router", f"{label.count(score.held_requests)}, {label.seconds(score.held_s)}"
    yield "preemptions", label.count(score.preemptions)
    yield "evictions", label.count(score.evictions)
    for regret in run.regrets:
        more = f"{label.difference(regret.mean_difference_s)} a request"
        yield (
            f"mean TTFT against {label.foreign(regret.bound)}",
            f"{label.times(regret.mean_ttft_ratio)}, {more}",
        )


def _spread(spread: Spread) -> tuple[str, ...]:
    times_s = (spread.mean_s, spread.p50_s, spread.p90_s, spread.p99_s)
    return (*map(label.seconds, times_s), label.count(spread.known), label.count(spread.unknown))


def _concentrations(score: Score) -> Iterator[Table]:
    rows: tuple[tuple[str, Concentration | None], ...] = (
        ("requests, by prefix", score.hits_by_prefix),
        ("tokens, by prefix", score.hit_tokens_by_prefix),
        ("requests, by tenant", score.hits_by_tenant),
        ("tokens, by tenant", score.hit_tokens_by_tenant),
    )
    table = _table("Hits", "hits", "groups", "top 1", "top 10", "top 100", "Gini")
    for name, spread in rows:
        if spread is not None:
            table.add_row(
                name,
                label.count(spread.groups),
                label.share(spread.top_1_share),
                label.share(spread.top_10_share),
                label.share(spread.top_100_share),
                label.factor(spread.gini),
            )
    if table.row_count:
        yield table


def _tenants(run: RunReport) -> Table:
    more = len(run.tenants) - MAX_TENANTS
    table = _table(
        "Tenants" + (f"; {label.count(more)} more are in the JSON" if more > 0 else ""),
        "tenant",
        "requests",
        "failed",
        "token hits",
        "mean TTFT",
        "p99 TTFT",
    )
    for tenant in run.tenants[:MAX_TENANTS]:
        table.add_row(
            Text(label.foreign(tenant.tenant) or "(not named)"),
            label.count(tenant.requests),
            label.count(tenant.failed),
            label.share(tenant.token_hit_ratio),
            label.seconds(tenant.ttft_mean_s),
            label.seconds(tenant.ttft_p99_s),
        )
    return table
