"""A slice of the chaos schedule for every run of the tests; all of it: ``make chaos``."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from chaos.rig import Plan
from chaos.run import FAULTS, plan_of, run

SEED = int(os.environ.get("WARMROUTE_CHAOS_SEED", "20"))
CASES = {f"C-{number:02d}" for number in range(1, 27)}
OURS = {"router", "policies", "state", "prompt", "sidecar", "replay", "warmroute"}


def test_every_case_is_in_the_schedule_and_the_seed_decides_its_order() -> None:
    """C-01 to C-26."""
    assert {fault.name[:4] for fault in FAULTS} == CASES
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert plan_of(1, (), None) == plan_of(1, (), None) != plan_of(2, (), None)
    assert sorted(one.name for one in plan_of(1, (), None)) == sorted(one.name for one in FAULTS)
    assert {one.name for one in plan_of(1, ("C-11", "C-26"), 3.0)} == {
        "C-26",
        *(one.name for one in FAULTS if one.name.startswith("C-11")),
    }


@pytest.mark.parametrize("module", ["checker", "evidence", "speech", "replica", "wire"])
def test_who_judges_knows_nothing_of_what_is_judged(module: str) -> None:
    """The invariants are independent of the router's own code."""
    tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text())
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not imported & OURS


@pytest.mark.timeout(600)
async def test_a_slice_of_all_faults_breaks_no_invariant(tmp_path: Path) -> None:
    """C-01, C-02, C-03, C-09, C-11, C-12, C-20, C-21, C-24, C-25, C-26; I-1 to I-12."""
    names = [fault.name for fault in FAULTS if fault.in_slice]
    report = await run(tmp_path, Plan(seed=SEED, rate_hz=12.0), plan_of(SEED, names, None), None)
    assert report.is_good, f"make chaos CHAOS='--seed {SEED} --slice'\n{report.markdown()}"
