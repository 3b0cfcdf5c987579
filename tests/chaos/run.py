"""Runs a schedule of faults against the rig: ``python -m chaos.run --seed 7 --minutes 10``.

The seed decides the order of the faults, their victims and their dice, and what clients ask. The
report has the timeline, each expectation with what was seen, and what broke an invariant.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from chaos.checker import check
from chaos.fault import Finding
from chaos.fault_replica import REPLICA_FAULTS
from chaos.fault_router import ROUTER_FAULTS
from chaos.fault_state import STATE_FAULTS
from chaos.fault_traffic import TRAFFIC_FAULTS
from chaos.rig import Plan, Rig
from warmroute.process import run_loop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from chaos.evidence import Evidence
    from chaos.fault import Fault

FAULTS: Final = (*REPLICA_FAULTS, *TRAFFIC_FAULTS, *STATE_FAULTS, *ROUTER_FAULTS)
WARM_S: Final = 3.0
STEP_S: Final = 150.0


@dataclass(slots=True)
class Step:
    """One fault of the timeline; times since the start of the run."""

    name: str
    title: str
    from_s: float
    until_s: float
    findings: list[Finding]
    settled_s: float | None = None


@dataclass(slots=True)
class Report:
    """What a run was and what came of it."""

    seed: int
    steps: list[Step] = field(default_factory=list)
    broken: dict[str, list[str]] = field(default_factory=dict)
    requests: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    attempts: int = 0
    began_s: float = 0.0
    took_s: float = 0.0
    live_ms: float = 0.0
    rss_mib: dict[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether faults struck, every expectation was met and every invariant held."""
        met = all(one.is_met for step in self.steps for one in step.findings)
        return bool(self.steps) and met and not any(self.broken.values())

    def sum_up(self, evidence: Evidence) -> None:
        """Count what was asked and how it ended."""
        self.requests = len(evidence.clients)
        ends = Counter(f"{line.end} {line.status or ''}".strip() for line in evidence.clients)
        self.ends = dict(ends)
        self.attempts = sum(line["event"] == "begin" for line in evidence.replicas)
        self.live_ms = max((sample.live_ms for sample in evidence.samples), default=0.0)
        self.rss_mib = {
            rest.router: (rest.rss_before / 2**20, rest.rss_bytes / 2**20)
            for rest in evidence.rests
        }

    def markdown(self) -> str:
        """Return the report as a page."""
        head = f"Seed {self.seed}: {len(self.steps)} faults in {self.took_s:.0f} s"
        lines = [
            f"{head}, {self.requests} requests, {self.attempts} attempts; ends: {self.ends}",
            "",
            "| at | fault | expectation | met | seen |",
            "|---|---|---|---|---|",
        ]
        for step in self.steps:
            for one in step.findings:
                met = "yes" if one.is_met else "**NO**"
                at = f"{step.from_s:.0f} s"
                lines.append(f"| {at} | {step.name} | {one.text} | {met} | {one.seen} |")
        lines += ["", "| invariant | broken |", "|---|---|"]
        for name, found in self.broken.items():
            lines.append(f"| {name} | {'; '.join(found[:5]) or 'no'} |")
        return "\n".join(lines)


def plan_of(seed: int, names: Sequence[str], minutes: float | None) -> list[Fault]:
    """Return the faults in the seed's order; with ``minutes`` again and again, to be cut off."""
    rng = random.Random(seed)
    chosen = [one for one in FAULTS if not names or one.name in names or one.name[:4] in names]
    rounds = 1 if minutes is None else 1 + int(minutes)
    return [one for _ in range(rounds) for one in rng.sample(chosen, len(chosen))]


def tell(text: str) -> None:
    """Print for whoever watches."""
    print(text, flush=True)  # noqa: T201


async def strike_all(
    rig: Rig, faults: Sequence[Fault], report: Report, until_s: float | None
) -> None:
    """Strike one after another; the fleet comes back in between."""
    report.began_s = report.began_s or time.monotonic()
    for fault in faults:
        if until_s is not None and time.monotonic() > until_s:
            return
        rig.crowd.phase = fault.name
        rng = random.Random(f"{report.seed} {len(report.steps)} {fault.name}")
        from_s = time.monotonic() - report.began_s
        try:
            async with asyncio.timeout(STEP_S):
                findings = await fault.strike(rig, rng)
        except Exception as error:  # noqa: BLE001 - a step that breaks is a finding
            findings = [Finding("the step comes to its end", is_met=False, seen=repr(error))]
            await rig.restore()
        until = time.monotonic() - report.began_s
        step = Step(fault.name, fault.title, from_s, until, findings)
        report.steps.append(step)
        tell(f"{from_s:6.1f} s {fault.name}: {fault.title}")
        for one in findings:
            tell(f"         {'ok ' if one.is_met else 'NOT'} {one.text}: {one.seen}")
        rig.crowd.phase = "calm"
        try:
            step.settled_s = await rig.settle()
        except TimeoutError as error:
            findings.append(Finding("the fleet comes back", is_met=False, seen=str(error)))
            tell(f"         NOT the fleet comes back: {error}")
            return


async def drive(
    directory: Path,
    plan: Plan,
    strike: Callable[[Rig, Report], Awaitable[None]],
    warm_s: float = WARM_S,
) -> tuple[Report, Evidence]:
    """Build the rig, let clients ask for ``warm_s``, strike, judge."""
    report = Report(plan.seed)
    async with Rig(directory, plan) as rig:
        stop = asyncio.Event()
        watching = asyncio.create_task(rig.watch.run())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(rig.crowd.run(tasks, stop))
            await asyncio.sleep(warm_s)
            await rig.watch.warm()
            began_s = time.monotonic()
            try:
                await strike(rig, report)
            finally:
                stop.set()
            report.took_s = time.monotonic() - began_s
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # one that broke raises what broke it
            await watching
        await rig.watch.rest()
        evidence = rig.evidence()
    report.broken = check(evidence)
    report.sum_up(evidence)
    return report, evidence


async def run(
    directory: Path, plan: Plan, faults: Sequence[Fault], until_s: float | None
) -> Report:
    """Strike with each of the faults."""

    async def strike(rig: Rig, report: Report) -> None:
        await strike_all(rig, faults, report, until_s)

    report, _ = await drive(directory, plan, strike)
    return report


def main() -> int:
    """Run what the command line asks for; 1 where something is not as expected."""
    parser = argparse.ArgumentParser(prog="make chaos")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--minutes", type=float, help="again and again for so long; default: once")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--only", default="", help="faults by name, with commas")
    parser.add_argument("--slice", action="store_true", help="the faults of make test")
    parser.add_argument("--report", type=Path, help="where report.json and report.md go")
    told = parser.parse_args()
    names = [name for name in told.only.split(",") if name]
    if told.slice:
        names = [one.name for one in FAULTS if one.in_slice]
    faults = plan_of(told.seed, names, told.minutes)
    until_s = None if told.minutes is None else time.monotonic() + 60 * told.minutes
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    tell(f"seed {told.seed}, logs in {directory}")
    plan = Plan(seed=told.seed, rate_hz=told.rate)
    report = run_loop(run(directory, plan, faults, until_s), "uvloop")
    page = report.markdown()
    tell(page)
    if told.report:
        told.report.mkdir(parents=True, exist_ok=True)
        (told.report / "report.md").write_text(page + "\n")
        (told.report / "report.json").write_text(json.dumps(asdict(report), indent=1) + "\n")
    if not report.is_good:
        words = f"--seed {told.seed}" + (f" --only {','.join(names)}" if names else "")
        tell(f'not as expected; once more: make chaos CHAOS="{words}"')
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
