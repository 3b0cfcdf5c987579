from __future__ import annotations

import io
from typing import TYPE_CHECKING

import msgspec
import pytest
import yaml
from rich.console import Console

from policies.weighted import Weighted
from replay.evidence import Effect, LoadRatio
from replay.interval import Ratio
from replay.space import space_of
from replay.trial import Cell, Figures
from replay.tune import Judged, Tried, TunePlan, TuneReport
from warmroute.cli import main
from warmroute.tune_patch import patch_text
from warmroute.tune_report import TuneRun, ratio_text, show

if TYPE_CHECKING:
    from pathlib import Path

LINE = '{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n'


@pytest.fixture(name="folder", autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jsonl").write_text(LINE)
    (tmp_path / "bad.yaml").write_text("replicas: none\n")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["missing.jsonl"], "missing.jsonl: no such file"),
        (["bad.yaml"], "bad.yaml: line 1: expected a Mooncake line"),
        (
            ["t.jsonl", "--policy", "weighted", "--vary", "w_x"],
            "--vary: w_x: not a number of policy weighted",
        ),
        (
            ["t.jsonl", "--policy", "weighted", "--vary", "w_queue=2:1"],
            "--vary: w_queue: expected LOW below HIGH",
        ),
        (
            ["t.jsonl", "--policy", "weighted", "--vary", "w_queue=0:2000"],
            "--vary: w_queue: expected `float` <= 1000.0",
        ),
        (["t.jsonl", "--loads", "1,a"], "--loads: expected different numbers above 0"),
        (["t.jsonl", "--loads", "0"], "--loads: expected"),
        (["t.jsonl", "--loads", "1,1"], "--loads: expected"),
        (["t.jsonl", "--budget", "0"], "--budget: expected `int` >= 1"),
        (["t.jsonl", "--seeds", "1"], "--seeds: expected `int` >= 2"),
        (["t.jsonl", "--hold-out", "1"], "--hold-out: expected `float` <= 0.9"),
        (["t.jsonl", "--policy", "best"], "--policy"),
        (["t.jsonl", "--policy", "random"], "policy random has no numbers to tune"),
        (["t.jsonl", "--fleet", "bad.yaml"], "--fleet: bad.yaml: replicas: "),
        (["t.jsonl", "--fleet", "broken.yaml"], "broken.yaml: not YAML"),
        (["t.jsonl", "--fleet", "none.yaml"], "none.yaml: No such file"),
        (["t.jsonl", "--config", "none.yaml"], "--config: none.yaml: No such file"),
        (["t.jsonl", "--patch", "no/patch.yaml"], "--patch: no/patch.yaml: not a file that can be"),
    ],
)
def test_wrong_usage_is_told_by_its_flag(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert main(["tune", *flags]) == 2
    assert told in capsys.readouterr().err
    assert not list(folder.glob("tune-*")), "nothing was begun"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--minutes", "0"], "--minutes: expected a number above 0"),
        (["--minutes", "soon"], "--minutes: expected a number above 0"),
        (["--jobs", "-1"], "--jobs"),
        (["--limit", "x"], "--limit: expected a whole number"),
        (["--objective", "hits"], "--objective: invalid choice"),
    ],
)
def test_a_wrong_number_is_told_by_its_flag(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "t.jsonl", *flags])
    assert told in capsys.readouterr().err


def test_a_trace_too_short_to_split_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "t.jsonl", "--jobs", "1"]) == 1
    assert "the tuning part has no requests" in capsys.readouterr().err


def test_a_ratio_is_shown_with_its_interval() -> None:
    assert ratio_text(Ratio(ratio=0.9, low=0.85, high=0.951)) == "0.900 (0.850-0.951)"
    assert ratio_text(Ratio(ratio=0.9)) == "0.900"
    assert ratio_text(None) == "-"


def report_of(policy: Weighted, trace: str) -> tuple[TuneRun, TuneReport]:
    times = Ratio(ratio=0.8, low=0.7, high=0.9)
    effect = Effect(
        ttft_mean=times,
        ttft_p99=times,
        hit_ratio=None,
        imbalance=times,
        more_failed=0,
        loads=(LoadRatio(load=1.0, ttft_mean=times, ttft_p99=times),),
    )
    figures = Figures(ttft_mean_s=1.0, ttft_p99_s=2.0, hit_ratio=0.0, imbalance=1.0)
    cells = (Cell(part="held_out", load=1.0, seed=7),)
    judged = Judged(effect=effect, cells=cells, present=(figures,), changed=(figures,))
    space = space_of(policy)
    about = TuneRun(
        trace=trace, requests=5, policy=policy, space=space, plan=TunePlan(), hold_out=0.3
    )
    report = TuneReport(
        verdict="confirmed",
        reason="",
        present=(1.0, 0.2),
        best=(3.0, 0.2),
        tried=(),
        sensitivities=(),
        check=judged,
        held_out=judged,
    )
    return about, report


def test_a_patch_has_what_was_varied_and_what_was_set_before() -> None:
    text = patch_text(*report_of(Weighted(tie_margin=0.5), "t.jsonl"))
    assert yaml.safe_load(text) == {
        "policy": {"kind": "weighted", "w_prefix": 3.0, "w_recent": 0.2, "tie_margin": 0.5}
    }


def test_a_name_with_a_line_end_stays_inside_its_comment() -> None:
    text = patch_text(*report_of(Weighted(), "a\nlisten: 0.0.0.0:1"))
    assert yaml.safe_load(text).keys() == {"policy"}
    assert "a?listen" in text


def shown(about: TuneRun, report: TuneReport) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    show(about, report, console)
    return console.export_text()


def test_the_report_shows_the_winner_and_the_present_setting_beside_a_long_front() -> None:
    about, report = report_of(Weighted(), "t.jsonl")
    assert report.check is not None
    effect = report.check.effect
    tried = [Tried(point=(1.0, 0.2), origin="present", effect=effect)]
    tried += [
        Tried(point=(1.0 + place, 0.5), origin="search", effect=effect, is_on_front=True)
        for place in range(1, 20)
    ]
    tried.append(Tried(point=(3.0, 0.2), origin="search", effect=effect, is_on_front=True))
    text = shown(about, msgspec.structs.replace(report, tried=tuple(tried)))
    assert "winner" in text
    assert "present" in text
    assert "and 8 more" in text
    assert max(map(len, text.splitlines()[5:])) <= 100


def test_a_saturated_load_is_told() -> None:
    about, report = report_of(Weighted(), "t.jsonl")
    tried = (Tried(point=(1.0, 0.2), origin="present", effect=report.check.effect),)  # type: ignore[union-attr]
    saturated = msgspec.structs.replace(report, tried=tried, saturated_loads=(1.3,))
    assert "Saturated at load 1.3" in shown(about, saturated)
    assert "Saturated" not in shown(about, msgspec.structs.replace(report, tried=tried))
