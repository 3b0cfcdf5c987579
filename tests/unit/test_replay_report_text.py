"""The report on a terminal."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from replay.report import Report, report
from replay.report_text import print_report
from support.replayed import outcome, random_run, replayed


def _printed(value: Report, columns: int = 160) -> str:
    console = Console(file=StringIO(), width=columns, force_terminal=True, color_system=None)
    print_report(console, value)
    written = console.file
    assert isinstance(written, StringIO)
    return written.getvalue()


def test_a_lone_replay_shows_its_figures_and_warnings() -> None:
    run = replayed(
        outcome(0, cached_tokens=25, ttft_s=1.5, duration_s=2.5, tenant="acme", prefix="p"),
        evictions=0,
    )
    shown = _printed(report({"ours": run}, bounds={"pooled": run}))
    assert "! ours: Nothing was evicted" in shown
    for part in ("token hit ratio", "25.0 %", "1.50 s", "acme", ", 0 s a request"):
        assert part in shown


def test_several_replays_are_side_by_side() -> None:
    shown = _printed(report({"a": random_run(300), "b": random_run(300, 1)}, baseline="b"))
    assert "the ratio to b" in shown
    assert "(1.00)" in shown
    assert "Tenants" not in shown


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_a_policy_and_its_figures_are_not_cut(columns: int) -> None:
    names = ("expected_ttft", "least_loaded")
    runs = {name: random_run(300, seed) for seed, name in enumerate(names)}
    shown = _printed(report(runs, baseline="expected_ttft"), columns)
    for name in (*names, "(1.00)"):
        assert name in shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_a_foreign_name_is_neither_markup_nor_a_control_sequence() -> None:
    name = "[red]x[/red]\x1b[2J:warning:"
    run = replayed(
        outcome(tenant=name, reason=name, replica=name, error=None), trace=name, policy=name
    )
    clean = "[red]x[/red]\ufffd[2J:warning:"
    for value in (report({name: run}), report({name: run, "b": run}), report({name: replayed()})):
        shown = _printed(value)
        assert "\x1b[2J" not in shown
        assert clean in shown
    alone = _printed(report({name: run}))
    assert f"│ {clean} │        1 │" in alone
    assert f"reason {clean}" in alone
    both = _printed(report({name: run, "b": run}))
    assert both.count(f"│ {clean} │") == 2


def test_many_tenants_are_counted_and_not_all_printed() -> None:
    assert "Tenants; 20 more are in the JSON" in _printed(report({"a": random_run(600)}))


def test_a_trace_without_tenants_has_no_table_of_them_on_a_terminal() -> None:
    assert "Tenants" not in _printed(report({"a": replayed(outcome())}))
