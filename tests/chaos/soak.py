"""A long run under load, with a fault every 20 s: ``make soak-router`` tells what grows.

``SOAK_MINUTES`` (60) and ``SOAK_RATE`` (200 requests a second, or what the machine can). No fault
restarts a router, so that both are the same processes from the start to the end.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from chaos.rig import Plan
from chaos.run import FAULTS, drive, strike_all, tell
from warmroute.process import run_loop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chaos.evidence import Evidence, Sample
    from chaos.fault import Fault
    from chaos.rig import Rig
    from chaos.run import Report

PERIOD_S: Final = 20.0
MiB: Final = 1 << 20
WARM_S: Final = 100.0
PER_REQUESTS: Final = 100_000
LEFT_OUT: Final = frozenset({"C-15", "C-16", "C-17", "C-18", "C-20", "C-21", "C-22", "C-24"})
"""Those that restart a router, take the machine away, or set the rate themselves."""


BOUNDED: Final = ("warmroute_prompt_bytes", "warmroute_mirror_bytes", "warmroute_recording_bytes")
"""What routers keep up to a bound, as they tell it."""


def total(sample: Sample, name: str) -> float:
    """Return the sum of a metric's series."""
    return sum(value for key, value in sample.series.items() if key.partition("{")[0] == name)


def soaking() -> list[Fault]:
    """Return the faults of a soak."""
    return [one for one in FAULTS if one.name not in LEFT_OUT]


def slope_bytes(samples: Sequence[Sample]) -> float | None:
    """Return by how many bytes a router grows in 100,000 requests, over the last two thirds."""
    points = [
        (
            sum(v for k, v in one.series.items() if k.startswith("warmroute_requests_total{")),
            float(one.rss_bytes),
        )
        for one in samples[len(samples) // 3 :]
    ]
    if len(points) < 3:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        return None
    return PER_REQUESTS * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


async def soak(directory: Path, seed: int, minutes: float, rate_hz: float) -> Report:
    """Run, and tell at the end what grew."""
    # What is kept up to a bound is full before the run is warm.
    kept = {"decisions_kept": 1_000, "recording": {"max_bytes": MiB}, "prompt_bytes": 4 * MiB}
    plan = Plan(seed=seed, rate_hz=rate_hz, config=kept)

    async def strike(rig: Rig, report: Report) -> None:
        await _strike_for(rig, report, time.monotonic() + 60 * minutes)

    report, evidence = await drive(directory, plan, strike, WARM_S)
    _tell_growth(evidence, report)
    return report


async def _strike_for(rig: Rig, report: Report, until_s: float) -> None:
    rng = random.Random(report.seed)
    order: list[Fault] = []
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        order = order or rng.sample(soaking(), len(soaking()))
        await strike_all(rig, [order.pop()], report, None)
        for router in rig.routers:
            sample = next(one for one in rig.watch.samples[::-1] if one.router == router.index)
            parts = {name: round(total(sample, name) / 2**20, 1) for name in BOUNDED}
            tasks = total(sample, "warmroute_tasks")
            size = f"{sample.rss_bytes / 2**20:.1f} MiB"
            tell(f"         router {router.index}: {size}, {parts}, {tasks:.0f} tasks")
        await asyncio.sleep(max(0.0, PERIOD_S - (time.monotonic() - began_s)))


def _tell_growth(evidence: Evidence, report: Report) -> None:
    tell(f"{report.requests / (WARM_S + report.took_s):.0f} requests a second")
    for rest in evidence.rests:
        samples = [one for one in evidence.samples if one.router == rest.router]
        slope = slope_bytes(samples)
        shown: dict[str, Any] = {
            "RSS when warm, MiB": round(rest.rss_before / 2**20, 1),
            "at rest, MiB": round(rest.rss_bytes / 2**20, 1),
            "slope, MiB per 100,000 requests": None if slope is None else round(slope / 2**20, 2),
            "descriptors when warm": rest.descriptors_before,
            "descriptors at rest": rest.descriptors,
            "CLOSE_WAIT": rest.half_closed,
            "tasks when warm": total(samples[0], "warmroute_tasks"),
            "tasks at rest": total(samples[-1], "warmroute_tasks"),
            "longest /livez, ms": round(max(one.live_ms for one in samples)),
        }
        tell(f"router {rest.router}: {shown}")
    tell(f"faults: {dict(sorted(Counter(step.name for step in report.steps).items()))}")
    tell(f"clients of the store when warm and at rest: {evidence.redis_clients}")


def main() -> int:
    """Run; 1 where something is not as expected."""
    minutes = float(os.environ.get("SOAK_MINUTES", "60"))
    rate_hz = float(os.environ.get("SOAK_RATE", "200"))
    seed = int(os.environ.get("SOAK_SEED", str(int(time.time()) % 100_000)))
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    tell(f"seed {seed}, {minutes:g} minutes, {rate_hz:g} requests a second, logs in {directory}")
    gc.set_threshold(50_000, 50, 1_000)  # what is written down has no cycles, and is much
    report = run_loop(soak(directory, seed, minutes, rate_hz), "uvloop")
    tell(report.markdown())
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
