"""``make grid``: every policy on every workload, load, fleet and cache, beside the pooled bound.

Runs are kept in a journal and not made again: stop it at any time, and go on with the same command.
The traces are read from WARMROUTE_TEST_DATA (default ../shared/data).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from rich.progress import Progress

from grid_table import Runs, page
from replay.grid import (
    CACHES,
    FLEETS,
    INFINITE,
    LOADS,
    POOLED,
    Cell,
    Figures,
    at_load,
    bounds,
    contenders,
    run_one,
    shortened,
)
from replay.router import cost_at_speed_one
from replay.setting import FleetSettings
from replay.workload import WORKLOADS, read_workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replay.trace import TraceRequest

SCENARIOS = (
    "view 50 ms late",
    "view 200 ms late",
    "view 500 ms late",
    "5 % of events lost",
    "2 routers",
    "8 routers",
    "8 routers, 1 s apart",
    "a replica loses its cache",
    "half at half speed",
    "one at 0.3",
    "short prompts",
    "pull at 12.5 GB/s",
)
SHORT_TOKENS = 1_024


class Task(Struct, frozen=True):
    """One run to make."""

    cell: Cell
    policy: str
    seed: int
    requests: int | None


class Entry(Struct, frozen=True):
    """One line of the journal."""

    task: Task
    figures: Figures
    seconds: float


_traces: dict[tuple[str, int | None, int], tuple[list[TraceRequest], int]] = {}
_paced: dict[tuple[object, ...], tuple[list[TraceRequest], int]] = {}


def data_folder() -> Path:
    """Return where the traces are."""
    return Path(os.environ.get("WARMROUTE_TEST_DATA", "../shared/data")) / "traces"


def paced(task: Task) -> tuple[list[TraceRequest], int]:
    """Return the requests of a task at its load; the last workloads are kept."""
    cell = task.cell
    wanted = (cell.workload, task.requests, task.seed)
    if wanted not in _traces:
        _traces.clear()
        _traces[wanted] = read_workload(cell.workload, data_folder(), task.requests, task.seed)
    key = (*wanted, cell.load, cell.replicas, cell.scenario == "short prompts")
    if key not in _paced:
        _paced.clear()
        requests, block_tokens = _traces[wanted]
        if cell.scenario == "short prompts":
            requests = shortened(requests, block_tokens, SHORT_TOKENS)
        _paced[key] = (
            at_load(requests, block_tokens, cell.replicas, LOADS[cell.load]),
            block_tokens,
        )
    return _paced[key]


def run(task: Task) -> Entry:
    """Make one run."""
    requests, block_tokens = paced(task)
    began_s = time.perf_counter()
    figures = run_one(task.cell, requests, block_tokens, task.policy, task.seed)
    return Entry(task, figures, round(time.perf_counter() - began_s, 2))


def tasks_of(arguments: argparse.Namespace) -> Iterator[Task]:
    """Yield the runs that were asked for, those of one cell together."""
    cost = cost_at_speed_one(FleetSettings())
    policies = arguments.policies or list(contenders(cost))
    names = [*bounds(cost), *policies]
    for seed in range(arguments.seeds):
        shapes = product(arguments.workloads, arguments.loads, arguments.fleets, arguments.caches)
        for workload, load, replicas, cache in shapes if not arguments.only_scenarios else ():
            cell = Cell(workload=workload, load=load, replicas=replicas, cache=cache)
            for name in names:
                yield Task(cell, name, seed, arguments.requests)
        for scenario in arguments.scenarios:
            for workload in arguments.scenario_workloads:
                cell = Cell(
                    workload=workload, load="middle", replicas=8, cache="S", scenario=scenario
                )
                for name in names if scenario else ():
                    if name != INFINITE:
                        yield Task(cell, name, seed, arguments.requests)


def read_journal(path: Path) -> dict[Task, Entry]:
    """Return the runs that were made; a torn last line is passed over."""
    found: dict[Task, Entry] = {}
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except msgspec.DecodeError:
                continue
            found[entry.task] = entry
    return found


def main() -> int:
    """Run what is missing, and write the tables."""
    arguments = parsed()
    wanted = list(tasks_of(arguments))
    made = read_journal(arguments.journal)
    missing = [task for task in wanted if task not in made]
    arguments.journal.parent.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + 60 * arguments.minutes if arguments.minutes else None
    if missing:
        make(missing, made, arguments, deadline_s)
    runs = Runs(
        {
            (entry.task.cell, entry.task.policy, entry.task.seed): entry.figures
            for entry in made.values()
            if entry.task.requests == arguments.requests
        },
        POOLED,
    )
    text = page(runs, wanted=len(wanted), requests=arguments.requests, seeds=arguments.seeds)
    print(text)
    if arguments.page:
        arguments.page.write_text(text, encoding="utf-8")
    if arguments.json:
        arguments.json.write_text(json.dumps(runs.summary(), indent=1), encoding="utf-8")
    return 0


def make(
    missing: list[Task],
    made: dict[Task, Entry],
    arguments: argparse.Namespace,
    deadline_s: float | None,
) -> None:
    """Make the missing runs on all cores and append them to the journal."""
    with (
        Progress(transient=True) as progress,
        ProcessPoolExecutor(arguments.jobs) as workers,
        arguments.journal.open("ab") as journal,
    ):
        bar = progress.add_task(f"{len(missing)} runs", total=len(missing))
        waiting = iter(missing)
        running = {workers.submit(run, task) for task in islice(waiting, 2 * arguments.jobs)}
        while running:
            done = next(as_completed(running))
            running.discard(done)
            entry = done.result()
            made[entry.task] = entry
            journal.write(msgspec.json.encode(entry) + b"\n")
            journal.flush()
            progress.advance(bar)
            if deadline_s is None or time.monotonic() < deadline_s:
                task = next(waiting, None)
                if task is not None:
                    running.add(workers.submit(run, task))


def parsed() -> argparse.Namespace:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--journal", type=Path, default=Path("bench/results/grid.jsonl"))
    parser.add_argument("--page", type=Path, help="write the tables to this file")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--requests", type=int, help="only the first so many of each workload")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, help="begin no run after so long")
    parser.add_argument("--policies", nargs="*", help="default: all")
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--loads", nargs="*", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--fleets", nargs="*", type=int, default=list(FLEETS))
    parser.add_argument("--caches", nargs="*", default=list(CACHES), choices=list(CACHES))
    parser.add_argument("--scenarios", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--scenario-workloads", nargs="*", default=["conversation", "synthetic"])
    parser.add_argument("--only-scenarios", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
