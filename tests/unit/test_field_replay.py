"""The same trace, seed and policy make the same decisions, in whatever process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support import decision_log

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = 250


@pytest.fixture(name="trace", scope="module")
def small_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    decision_log.write_trace(path, REQUESTS, seed=5)
    return path


def decided(trace: Path, policy: str, seed: int, hash_seed: str) -> bytes:
    """Return the log that a fresh process makes; ``hash_seed`` orders its sets."""
    words = [str(trace), f'{{"kind":"{policy}"}}', str(seed)]
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, decision_log.__file__, *words],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def decisions(log: bytes) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in log.splitlines()]


def test_a_trace_replayed_in_another_process_is_decided_byte_for_byte_alike(trace: Path) -> None:
    """A95, B58: same Mooncake lines, seed and configuration, with a virtual clock, twice."""
    first = decided(trace, "weighted", 1, "1")
    assert decided(trace, "weighted", 1, "2") == first
    log = decisions(first)
    assert len(log) == REQUESTS
    reasons = Counter(decision["reason"] for decision in log)
    assert reasons["prefix"] > REQUESTS / 4
    assert reasons["spill"] + reasons["load"] > 0
    assert len({decision["replica"] for decision in log}) == decision_log.REPLICAS


@pytest.mark.parametrize("policy", ["random", "power_of_two", "weighted"])
def test_what_is_drawn_follows_from_the_seed(trace: Path, policy: str) -> None:
    """A95: chance comes from the seed alone: another seed decides otherwise."""
    logs = {decided(trace, policy, seed, "0") for seed in (1, 2)}
    assert len(logs) == 2
