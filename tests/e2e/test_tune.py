from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from router.config import load_config
from warmroute.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FLEET = "replicas: 3\ncapacity_tokens: 60000\n"
BLIND = "policy: {kind: weighted, w_prefix: 0.01, w_recent: 0.0}\n"
"""Does not look at prefixes, on a trace where they are all that matters."""
SMALL = ("--vary", "w_prefix=0.01:3", "--seeds", "2", "--check-seeds", "4", "--loads", "1.2")
DEADLINE_S = 200.0


def write_trace(path: Path, *, ends_cold: bool) -> Path:
    """Write conversations of long prompts; with ``ends_cold`` the last part shares nothing."""
    draw = random.Random(5)
    rows: list[dict[str, Any]] = []
    fresh = iter(range(1_000, 100_000))
    for session in range(30):
        at_ms, ids = draw.uniform(0, 40_000), [next(fresh) for _ in range(10)]
        for _ in range(5):
            ids = [*ids, next(fresh)]
            rows.append({"timestamp": at_ms, "hash_ids": ids, "session_id": f"s{session}"})
            at_ms += draw.expovariate(1 / 6_000)
    rows = [row for row in rows if row["timestamp"] < 60_000]
    if ends_cold:
        rows = [row for row in rows if row["timestamp"] < 40_000]
        rows += [
            {
                "timestamp": 42_000 + 300 * place,
                "hash_ids": [next(fresh) for _ in range(12)],
                "session_id": f"cold{place}",
            }
            for place in range(60)
        ]
    rows.sort(key=lambda row: float(row["timestamp"]))
    for row in rows:
        row |= {
            "timestamp": int(row["timestamp"]),
            "input_length": 512 * len(row["hash_ids"]),
            "output_length": 20,
        }
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(name="folder")
def folder_with_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.yaml").write_text(FLEET)
    (tmp_path / "blind.yaml").write_text(BLIND)
    write_trace(tmp_path / "warm.jsonl", ends_cold=False)
    write_trace(tmp_path / "cold.jsonl", ends_cold=True)
    return tmp_path


def tune(trace: str, *flags: str) -> int:
    return main(["tune", trace, "--fleet", "fleet.yaml", "--config", "blind.yaml", *flags])


def test_a_blind_setting_is_improved_and_the_patch_says_why(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = tune("warm.jsonl", *SMALL, "--budget", "6", "--jobs", "2", "--patch", "patch.yaml")
    told = capsys.readouterr().out
    assert code == 0, told
    assert "The held-out part confirms it." in told
    assert "Pareto front" in told
    assert "Winner, held-out part (last 30%), fresh seeds" in told
    patch = (folder / "patch.yaml").read_text()
    policy = yaml.safe_load(patch)["policy"]
    assert policy.keys() == {"kind", "w_prefix", "w_recent"}
    assert policy["kind"] == "weighted"
    assert policy["w_recent"] == 0.0
    assert policy["w_prefix"] > 0.1
    assert load_config(folder / "patch.yaml").policy
    comments = [line for line in patch.splitlines() if line.startswith("#")]
    for fact in (
        "warm.jsonl",
        "seeds",
        "held-out part",
        "present: w_prefix 0.01",
        "mean TTFT x 0.",
    ):
        assert any(fact in line for line in comments), fact


def test_what_the_held_out_part_does_not_show_is_not_written_unless_forced(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*SMALL, "--budget", "4", "--jobs", "1", "--patch", "patch.yaml")
    assert tune("cold.jsonl", *flags) == 1
    told = capsys.readouterr()
    assert "may be no lower than the present one's" in told.out
    assert "does not confirm it: keep what you have" in told.out
    assert "no patch is written" in told.err
    assert not (folder / "patch.yaml").exists()
    assert tune("cold.jsonl", *flags, "--force") == 0
    assert "# NOT CONFIRMED: on the held-out part" in (folder / "patch.yaml").read_text()


def test_a_weight_that_does_nothing_is_left_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vary = ("--vary", "lower_tier_credit", "--seeds", "2", "--loads", "1", "--budget", "4")
    assert tune("warm.jsonl", *vary, "--jobs", "1", "--patch", "patch.yaml") == 0
    told = capsys.readouterr()
    assert "No change is better than chance: keep what you have." in told.out
    assert not (folder / "patch.yaml").exists()


def test_the_report_as_json_has_the_same_facts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*SMALL, "--budget", "4", "--jobs", "1", "--json", "--journal", str(folder / "j"))
    assert tune("warm.jsonl", *flags) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["run"]["trace"] == "warm.jsonl"
    assert whole["run"]["policy"]["w_prefix"] == 0.01
    assert len(whole["report"]["tried"]) == 5
    assert whole["report"]["held_out"]["effect"]["ttft_mean"]["high"] < 1
    assert tune("warm.jsonl", *flags) == 0, "a second time all is known"
    assert json.loads(capsys.readouterr().out) == whole


def test_the_journal_of_another_trace_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--vary", "w_prefix", "--seeds", "2", "--loads", "1", "--budget", "1", "--jobs", "1")
    flags = (*few, "--journal", str(folder / "j"))
    assert tune("warm.jsonl", *flags) == 0
    capsys.readouterr()
    assert tune("cold.jsonl", *flags) == 2
    assert "the journal of another sweep (weighted on warm.jsonl)" in capsys.readouterr().err


@pytest.fixture(name="process")
def running_tune(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "warmroute", "tune", "warm.jsonl", "--fleet", "fleet.yaml"]
    command += ["--budget", "1200", "--jobs", "2", "--journal", "j"]
    # A shell's background job ignores Ctrl-C, and so would its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        command, cwd=folder, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        signal.signal(signal.SIGINT, before)
        yield process
        process.kill()


def recorded(folder: Path) -> int:
    path = folder / "j"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def children_of(pid: int) -> list[str]:
    listed = subprocess.run(
        ["ps", "-ww", "-A", "-o", "pid=,ppid=,command="], check=True, capture_output=True, text=True
    )
    rows = (line.split(None, 2) for line in listed.stdout.splitlines())
    return [row[0] for row in rows if row[1] == str(pid) and "spawn_main" in row[2]]


def until_recorded(process: subprocess.Popen[bytes], folder: Path, lines: int) -> list[str]:
    deadline_s = time.monotonic() + DEADLINE_S
    while recorded(folder) < lines:
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    children = children_of(process.pid)
    assert len(children) == 2
    return children


def gone(pids: list[str]) -> bool:
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        alive = subprocess.run(
            ["ps", "-o", "stat=", "-p", ",".join(pids)], check=False, text=True, capture_output=True
        )
        if not [stat for stat in alive.stdout.split() if not stat.startswith("Z")]:
            return True
        time.sleep(0.05)
    return False


def test_ctrl_c_keeps_the_journal_and_leaves_no_process(
    folder: Path, process: subprocess.Popen[bytes]
) -> None:
    children = until_recorded(process, folder, 6)
    for child in children:  # the first process decides for all
        os.kill(int(child), signal.SIGINT)
    assert until_recorded(process, folder, recorded(folder) + 4) == children
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: everybody gets it
    assert process.wait(DEADLINE_S) == 130
    assert process.stderr is not None
    told = process.stderr.read().decode()
    assert "interrupted: j has what is known" in told
    assert "Traceback" not in told
    assert gone(children)
    assert recorded(folder) >= 6


def test_a_tune_that_is_killed_leaves_no_process(
    folder: Path, process: subprocess.Popen[bytes]
) -> None:
    children = until_recorded(process, folder, 4)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(DEADLINE_S)
    assert gone(children)
