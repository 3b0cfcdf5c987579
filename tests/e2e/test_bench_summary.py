"""The commands behind `make bench`, `bench-check` and `bench-profile`, on small amounts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from check import read_reference, write_reference
from figures import BUILT
from regression import Ratio

ROOT = Path(__file__).resolve().parents[2]


def bench(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / script), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_check_passes_the_same_code_and_fails_where_a_ratio_got_worse(tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    words = ["--quick", "--only", "chunk", "--reference", str(path)]
    done = bench("check.py", *words, "--update")
    assert done.returncode == 0, done.stdout + done.stderr
    again = bench("check.py", *words, "--last")
    assert again.returncode == 0, again.stdout
    name = "own code per chunk, exact / relay"
    ratio = read_reference(path)[name]
    write_reference(path, {name: Ratio(ratio.median / 3, 0.0)})
    worse = bench("check.py", *words, "--last")
    assert worse.returncode == 1
    assert f"regressed: {name}: " in worse.stdout


def test_graphs_and_shares_are_those_of_the_router(tmp_path: Path) -> None:
    words = ["--only", "1,chunk", "--samples", "200", "--folder", str(tmp_path)]
    done = bench("flame_bench.py", *words, "--report", "profiles-quick")
    assert done.returncode == 0, done.stderr
    request = (tmp_path / "profile-1kib.svg").read_text()
    assert "router/proxy.py Proxy.handle" in request
    assert str(ROOT) not in request
    assert len(request) < 150_000
    assert "router/chunk.py" in (tmp_path / "profile-chunk.svg").read_text()
    told = json.loads((BUILT / "profiles-quick.json").read_text())
    for by_file in told["files"].values():
        assert sum(by_file.values()) == pytest.approx(1)
    asked = {"read the prompt", "choose a replica", "send it on", "account and record"}
    assert all(told["steps"]["1"][step] > 0 for step in asked)
    assert told["steps"]["chunk"]["the replica's answer, a chunk"] > 0


@pytest.mark.heavy
def test_the_summary_judges_what_its_benches_measure() -> None:
    done = bench("summary.py", "--quick", "--only", "router,request,processes")
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr
    told = json.loads((BUILT / "summary-quick.json").read_text())
    figures = {(row["figure"], row["subject"]): row for row in told["figures"]}
    for subject in ("byte blocks", "exact"):
        row = figures["CPU per request, 32 KiB, us", subject]
        assert row["verdict"] in ("met", "missed")
        assert 0 < row["beside"]["bare relay"] < row["measured"]
    for way in ("kept", "mixed"):
        figure = f"CPU per request, 2 processes against 1, connections {way}"
        assert figures[figure, ""]["measured"] > 0
    assert "<figure>" in (BUILT / "summary-quick.html").read_text()
