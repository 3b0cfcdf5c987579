"""Figures beside their budgets: how they are judged, where they come from, how they are shown."""

import json
from pathlib import Path

import pytest

import summary
from budget import CPU_BUDGETS, STREAMS, rows_of
from contender import AIOHTTP, EXACT, RELAY, ROUGH, SGLANG, VLLM
from judgement import Bound, Budget, Row, Verdict, verdict_of
from plan import BENCHES, Mode
from ratio import ratios_of
from report import Report, by_row
from summary_page import page

NAMES = {
    "exact": EXACT,
    "rough": ROUGH,
    "relay": RELAY,
    "aiohttp": AIOHTTP,
    "sglang": SGLANG,
    "vllm": VLLM,
}
AT_MOST = Budget(limit=120)
AT_LEAST = Budget(limit=2, bound=Bound.AT_LEAST)


@pytest.mark.parametrize(
    ("budget", "value", "verdict"),
    [
        (AT_MOST, 120, Verdict.MET),
        (AT_MOST, 120.1, Verdict.MISSED),
        (AT_LEAST, 2, Verdict.MET),
        (AT_LEAST, 1.99, Verdict.MISSED),
    ],
)
def test_a_value_at_its_budget_is_within_it(budget: Budget, value: float, verdict: Verdict) -> None:
    assert verdict_of(budget, value, "") == (verdict, "")


def test_without_a_value_the_reason_is_told() -> None:
    assert verdict_of(AT_MOST, None, "no compiler") == (Verdict.NOT_MEASURED, "no compiler")
    assert verdict_of(AT_MOST, None, "")[1]


def test_a_part_of_the_truth_can_miss_a_budget_and_not_keep_it() -> None:
    assert verdict_of(AT_LEAST, 3, "no vllm-router")[0] is Verdict.NOT_MEASURED
    assert verdict_of(AT_LEAST, 1, "no vllm-router")[0] is Verdict.MISSED


def test_a_share_of_a_budget_is_above_1_where_it_is_missed() -> None:
    assert AT_MOST.share(60) == 0.5
    assert AT_LEAST.share(1) == 2
    assert AT_LEAST.share(4) == 0.5


def reports(**given: Report) -> dict[str, Report]:
    return {name: given.get(name, Report(None, "not run")) for name in BENCHES}


def found(told: dict[str, Report], figure: str, subject: str = "") -> Row:
    [one] = [row for row in rows_of(told) if (row.figure, row.subject) == (figure, subject)]
    return one


def router(**cells: list[float]) -> Report:
    named = {NAMES[key]: values for key, values in cells.items()}
    return Report({"cpu": {"32 KiB": named}})


def test_nothing_is_measured_where_nothing_ran() -> None:
    rows = rows_of(reports())
    assert {row.verdict for row in rows} == {Verdict.NOT_MEASURED}
    assert {row.why for row in rows} == {"not run"}
    assert len({(row.figure, row.subject) for row in rows}) == len(rows)


def test_the_median_of_the_rounds_is_judged() -> None:
    told = reports(router=router(exact=[100, 119, 500], relay=[40, 50, 60]))
    one = found(told, "CPU per request, 32 KiB, us", "exact")
    assert (one.measured, one.verdict) == (119, Verdict.MET)
    assert one.other("bare relay") == "50 (x0.42)"
    assert found(told, "CPU per request, 32 KiB, us", "byte blocks").verdict is Verdict.NOT_MEASURED


def test_the_cheaper_peer_is_the_one_to_beat() -> None:
    told = reports(router=router(exact=[100.0], sglang=[150.0], vllm=[900.0]))
    one = found(told, "peers' CPU per request, 32 KiB, in times the router's", "exact")
    assert (one.measured, one.verdict) == (1.5, Verdict.MISSED)
    assert one.beside == {SGLANG: 1.5, VLLM: 9}


def test_without_one_peer_twice_as_good_is_not_proved() -> None:
    told = reports(router=router(exact=[100.0], vllm=[900.0]))
    one = found(told, "peers' CPU per request, 32 KiB, in times the router's", "exact")
    assert (one.verdict, one.why) == (Verdict.NOT_MEASURED, "no sglang-router")


def test_fewer_streams_than_the_budget_is_for_are_not_judged() -> None:
    figure = "KiB per open stream, 10,000 streams"
    cells = {"KiB per open stream": {EXACT: [25.0]}}
    few = reports(streams=Report({"streams": 9_223, "cells": cells}))
    one = found(few, figure, "exact")
    assert (one.measured, one.verdict) == (25, Verdict.NOT_MEASURED)
    assert "9,223 streams" in one.why
    all_of_them = reports(streams=Report({"streams": STREAMS, "cells": cells}))
    assert found(all_of_them, figure, "exact").verdict is Verdict.MISSED


def test_the_worst_hold_of_both_forms_counts() -> None:
    held = {"no prompt": [2.0, 1.0], "one message": [4.0, 11.0], "messages of 250 tokens": [5.0]}
    hold = {row: {"exact, watched": values} for row, values in held.items()}
    told = reports(history=Report({"hold": hold}))
    one = found(told, "loop held by a cold prompt of 128k tokens, worst, ms", "exact")
    assert (one.measured, one.told()) == (11, "missed (without a prompt 2.0)")


def test_the_worst_case_of_the_index_counts_where_all_were_measured() -> None:
    figure = "index, MB per million resident blocks, worst case"
    cases = ("random", "churned", "agents 1", "agents 3")
    rows = [
        [f"memory per million, {case}", "compiled", f"{50 + at} MB", "", ""]
        for at, case in enumerate(cases)
    ]
    rows.append(["memory per million, churned", "dict", "171 MB", "", ""])
    assert found(reports(index=Report(by_row(rows))), figure).measured == 53
    assert found(reports(index=Report(by_row(rows[1:]))), figure).measured is None


def test_ratios_are_taken_round_by_round() -> None:
    told = reports(router=router(exact=[200, 100, 300], relay=[50, 25, 75]))
    [(name, one)] = ratios_of(told).items()
    assert name == "CPU per request, 32 KiB, exact / relay"
    assert (one.median, one.spread) == (4, 0)


def test_what_the_relay_itself_costs_is_seen_beside_aiohttp() -> None:
    told = reports(router=router(relay=[50, 60], aiohttp=[100, 100]))
    [(name, one)] = ratios_of(told).items()
    assert (name, one.median) == ("CPU per request, 32 KiB, relay / aiohttp", 0.55)


def test_instructions_of_requests_and_chunks_are_ratios_too() -> None:
    cells = {"bare relay": 200.0, "byte blocks": 800.0}
    told = reports(counts=Report({"1 KiB": cells, "a chunk": cells}))
    assert {name: one.median for name, one in ratios_of(told).items()} == {
        "instructions per request, 1 KiB, byte blocks / relay": 4,
        "instructions per chunk, byte blocks / relay": 4,
    }


def test_a_slope_is_told_as_the_growth_that_it_means() -> None:
    lengths = (2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000)
    slope = {
        str(tokens): {RELAY: [50.0, 90.0], EXACT: [50 + 100 * (tokens / 2_000) ** 0.5, 0.0]}
        for tokens in lengths
    }
    [(name, one)] = ratios_of(reports(history=Report({"slope": slope}))).items()
    assert name == "cost above the relay, 128k / 2k tokens, exact"
    assert one.median == pytest.approx(8)


def test_the_table_has_every_figure_and_the_page_its_charts() -> None:
    told = reports(router=router(exact=[130.0], rough=[90.0], relay=[50.0], vllm=[900.0]))
    rows = rows_of(told)
    text = summary.summary_text(rows, told, Mode.FULL)
    assert len([line for line in text.splitlines() if line.startswith("|")]) == len(rows) + 2
    line = next(line for line in text.splitlines() if "32 KiB, us" in line and "exact" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:5] == ["exact", "130", "<= 120", "**missed**"]
    assert "900 (x6.92)" in cells
    html = page(rows, told, Mode.FULL)
    assert html.count("<tr>") == len(rows) + 1
    assert html.count("<figure>") == 1
    assert "vllm-router 900 (x6.92)" in html
    assert "quick" in page(rows, told, Mode.QUICK)


def test_a_bench_that_fails_is_told_and_leaves_no_old_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("plan", "figures"):
        monkeypatch.setattr(f"{module}.BUILT", tmp_path)
    old = {"a chunk": {"exact": [1.0]}}
    (tmp_path / "chunk.json").write_text(json.dumps(old))
    (tmp_path / "chunk_bench.py").write_text("raise SystemExit('the machine is on fire')")
    monkeypatch.setattr("plan.HERE", tmp_path)
    assert summary.main(["--only", "chunk"]) == 1
    assert "failed: chunk_bench.py ended with status 1: the machine" in capsys.readouterr().out
    told = json.loads((tmp_path / "summary.json").read_text())
    assert "on fire" in told["benches"]["chunk"][1]
    assert not (tmp_path / "chunk.json").exists()
    assert len(told["figures"]) > 2 * len(CPU_BUDGETS)
    assert (tmp_path / "summary.html").exists()
