"""``warmroute top``: one frame of it, and what it refuses."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from rich.console import Console

from router.canary_row import CanaryRow
from router.replica_view import RouterView
from router.snapshot import DiagnosisRow, ReplicaRow, Snapshot
from router.sums import Minute
from state.model import Rung
from warmroute import top
from warmroute.cli import UsageError, build_parser

if TYPE_CHECKING:
    import argparse

LAST = Minute(
    span_s=60.0,
    requests=600,
    failed=6,
    shed=3,
    spills=30,
    retries=1,
    predicted_share=0.8,
    measured_share=0.75,
    hit_share=0.9,
    ttft_p50_s=0.125,
    ttft_p95_s=0.8,
    ttft_p99_s=1.5,
)


def row(name: str, **changes: Any) -> ReplicaRow:
    base = ReplicaRow(
        replica=name,
        endpoint="http://127.0.0.1:9",
        state="up",
        why="",
        left_s=None,
        models=("m",),
        model_count=1,
        rank=None,
        has_sidecar=True,
        has_events=True,
        inflight=2,
        inflight_elsewhere=1,
        limit=None,
        running=3,
        queued=4,
        kv_used_fraction=0.5,
        resident_blocks=1_234,
        block_tokens=64,
        capacity_tokens=64_000,
        credit=1.0,
        precision=1.0,
        generation="g",
        generation_age_s=7_500.0,
        is_age_least=True,
        last=LAST,
        notes=(),
    )
    return msgspec.structs.replace(base, **changes)


def snapshot(*rows: ReplicaRow, rung: Rung = Rung.LIVE, **changes: Any) -> Snapshot:
    base = Snapshot(
        unix_s=10_000.0,
        started_unix_s=9_000.0,
        version="9.9",
        is_draining=False,
        open_requests=5,
        held_requests=1,
        replica_connections=4,
        loop_lag_s=0.001,
        viewers=0,
        router=RouterView(rung=rung, state_age_s=12.0, state=None, lookup="mirror", policy="p"),
        last=LAST,
        rates=(0, 5, 10),
        replicas=rows,
        hot_prefixes=(),
        tenants=(),
        diagnoses=(),
    )
    return msgspec.structs.replace(base, **changes)


def drawn(
    shown: Snapshot, *, sort: str = "name", height: int | None = None, width: int = 160
) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(top.frame(shown, sort, height, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_a_narrow_terminal_has_fewer_columns_and_no_half_ones(width: int) -> None:
    rows = [row(f"gpu-{number}", state="slow_start", left_s=29.0) for number in range(3)]
    lines = drawn(snapshot(*rows), width=width)
    assert max(map(len, lines)) <= width
    (head,) = [line for line in lines if line.startswith("replica ")]
    shown = [name for name in top.COLUMNS if name in head]
    table = lines[lines.index(head) + 1 :][:3]
    for line, one in zip(table, rows, strict=True):
        assert "…" not in line
        cells = dict(zip(top.COLUMNS, top.cells(one), strict=True))
        assert all(cells[name].rstrip() in line for name in shown)
    left_out = [name for name in top.COLUMNS if name not in shown]
    told = " ".join(line.strip() for line in lines[lines.index(head) + 4 :])
    assert all(name in told for name in left_out)
    assert bool(left_out) is (width < 150)
    if width >= 80:
        assert {"in flight", "kv", "req/min", "hits", "p95"} <= set(shown)


def test_a_frame_has_the_router_the_last_minute_and_every_replica() -> None:
    lines = drawn(snapshot(row("a"), row("b", state="down", kv_used_fraction=None, queued=None)))
    text = "\n".join(lines)
    assert "1 of 2 replicas up · runs for 16 min" in lines[0]
    assert "10.0/s" in lines[1]
    assert "open 5, held 1" in lines[1]
    assert "p50 125 ms · p95 800 ms · p99 1.50 s" in lines[2]
    assert "tokens 75.0 % (predicted 80.0 %)" in lines[3]
    assert "failed 1.0 %" in lines[4]
    assert "! down: b" in text
    (one,) = [line for line in lines if line.startswith("a ")]
    for cell in ("● up", "3", "50.0 %", "1,234", "600", "≥ 2 h 5 min"):
        assert cell in one
    (two,) = [line for line in lines if line.startswith("b ")]
    assert "✕ down" in two
    assert "unknown" in two


def test_a_state_that_ends_by_itself_says_when_and_a_limit_is_beside_the_load() -> None:
    lines = drawn(snapshot(row("a", state="ejected", left_s=12.3, limit=16), row("b", state="new")))
    assert "0 of 2" not in lines[0]
    assert any("⊘ ejected 12 s  " in line and "3/16" in line for line in lines)
    assert any("○ new" in line for line in lines)
    assert "! ejected: a" in "\n".join(lines)


def test_an_empty_fleet_says_what_to_do() -> None:
    assert top.NO_REPLICA in drawn(snapshot())


def test_what_needs_attention_is_said_in_words() -> None:
    found = DiagnosisRow(
        kind="no_hits",
        replica="a",
        model="m",
        since_unix_s=1.0,
        times=1,
        finding="Nothing \x1b[31mhits.",
        advice="",
    )
    lines = drawn(
        snapshot(row("a"), rung=Rung.STALE, is_draining=True, loop_lag_s=0.5, diagnoses=(found,))
    )
    marked = [line for line in lines if line.startswith("!")]
    assert len(marked) == 4
    assert "12.0 s old" in marked[1]
    assert "\x1b" not in "".join(lines), "what comes from elsewhere moves no cursor"


CANARY = CanaryRow(
    id="c1a2b3",
    state="running",
    candidate="weighted w_queue=2.0",
    split="hash",
    percent=10.0,
    tenants=(),
    control_requests=1_081,
    candidate_requests=120,
    word="no difference seen yet",
)


def test_a_canary_is_one_line_and_none_is_none() -> None:
    lines = drawn(snapshot(row("a"), canary=CANARY))
    [found] = [line.rstrip() for line in lines if line.startswith("canary")]
    assert found == (
        "canary    c1a2b3 running · weighted w_queue=2.0 · 10 % of conversations · requests 120"
        " against 1,081 · no difference seen yet"
    )
    assert len(lines) == len(drawn(snapshot(row("a")))) + 1
    assert not [line for line in drawn(snapshot(row("a"))) if "canary" in line]


def test_a_canarys_line_says_whose_requests_it_gets_and_whose_figures_they_are() -> None:
    named = msgspec.structs.replace(
        CANARY, split="tenant", percent=None, tenants=("acme", "\x1bblue"), is_alone=True, word=None
    )
    [line] = top.canary_line(named)
    assert "· acme, " in line
    assert "\x1b" not in line
    assert "against 1,081 (of one process alone) · no verdict" in line
    [line] = top.canary_line(msgspec.structs.replace(CANARY, split="tenant"))
    assert "10 % of tenants" in line


def test_a_frame_with_a_canary_is_no_higher_than_the_terminal_either() -> None:
    rows = [row(f"r{number:03}") for number in range(100)]
    assert len(drawn(snapshot(*rows, canary=CANARY), height=24)) == 24


def test_a_frame_is_no_higher_than_the_terminal_and_says_what_is_missing() -> None:
    rows = [row(f"r{number:03}") for number in range(100)]
    lines = drawn(snapshot(*rows), height=24)
    assert len(lines) <= 24
    assert "and 84 more" in lines[-1]
    assert len(drawn(snapshot(*rows))) == 107


@pytest.mark.parametrize(
    ("sort", "first"),
    [("name", "a"), ("state", "b"), ("load", "c"), ("kv", "d"), ("hits", "e"), ("ttft", "f")],
)
def test_rows_are_sorted_by_what_is_asked_for(sort: str, first: str) -> None:
    rows = [
        row("f", last=msgspec.structs.replace(LAST, ttft_p95_s=9.0)),
        row("e", last=msgspec.structs.replace(LAST, measured_share=0.99)),
        row("d", kv_used_fraction=0.99),
        row("c", inflight=50),
        row("b", state="down"),
        row("a", kv_used_fraction=None, last=None),
    ]
    lines = drawn(snapshot(*rows), sort=sort)
    (head,) = [at for at, line in enumerate(lines) if line.startswith("replica")]
    assert lines[head + 1].split()[0] == first


def test_a_row_of_bars_is_as_long_as_its_numbers_and_flat_for_nothing() -> None:
    assert top.sparks((0, 5, 10)) == "▁▄█"
    assert top.sparks((0, 0)) == "··"
    assert top.sparks(()) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0 s"), (59.0, "59 s"), (61.0, "1 min"), (3_700.0, "1 h 1 min"), (90_000.0, "1 d 1 h")],
)
def test_a_duration_has_two_units(seconds: float, text: str) -> None:
    assert top.duration(seconds) == text


def options(*words: str) -> argparse.Namespace:
    return build_parser("top").parse_args(["top", *words])


@pytest.mark.parametrize("interval", ["0", "0.1", "-1", "nan", "1e9"])
def test_an_interval_out_of_range_is_refused(interval: str) -> None:
    with pytest.raises(UsageError, match="--interval: expected"):
        top.run(options("--interval", interval))


def test_into_a_pipe_goes_one_frame_and_json_is_the_snapshot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = snapshot(row("a"))
    monkeypatch.setattr(top, "ask", lambda *_: shown)
    assert top.run(options()) == 0
    assert capsys.readouterr().out.count("warmroute 9.9") == 1
    assert top.run(options("--json")) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Snapshot) == shown


def test_a_router_that_is_away_is_a_wrong_address() -> None:
    with pytest.raises(UsageError, match="no router answers"):
        top.run(options("--admin", "127.0.0.1:1"))
