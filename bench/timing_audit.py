"""Can one tenant see by the clock what another one sent? The whole audit, against real processes.

    python bench/timing_audit.py [--only engines] [--samples 250] [--repeats 20] [--trials 160]

``warmroute audit`` looks for it in the engines' caches, in the router's own memory of prompts, and
in the tokens that it asked engines for; a prompt reader alone shows microseconds. Then many guesses
at once, of which one is right: does the order of their answers tell which? Exit codes: 0 passed, 1
leak, 3 void.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "tests"))

from meter import Noise
from support.guess_order import GUESSES, p_value, places
from support.reader_rounds import read_rounds
from support.timing_stand import (
    ATTACKER,
    VICTIM,
    asked_engines,
    audit,
    engines,
    predicted_tokens,
    reading_router,
)
from support.tokenizer import write_tokenizer
from warmroute.audit_judge import SIGNIFICANCE, Verdict, judge

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from support.fleet import LocalFleet
    from warmroute.audit_judge import Comparison, Report

TRIALS: Final = 160
CONTROL_TRIALS: Final = 40
ORDER: Final = "order"
READER: Final = "reader"


class Case(NamedTuple):
    """One audit by ``warmroute audit``; ``words`` make the prompt."""

    name: str
    title: str
    words: int
    open: Callable[[Path], AbstractAsyncContextManager[LocalFleet]]


CASES: Final = (
    Case("engines", "two workers, some 1,300 tokens, 50 ms of prefill", 155, engines),
    Case("reading", "replicas that answer at once, some 100,000 tokens", 12_000, reading_router),
    Case("asking", "a router that asks engines for some 8,500 tokens", 1_000, asked_engines),
)
READINGS: Final = (
    ("reader, 1.8 KB", 200, True),
    ("reader, 7 KB", 800, True),
    ("reader, 7 KB, salt behind", 800, False),
)


async def run_case(case: Case, samples: int, repeats: int, directory: Path) -> Verdict:
    """Run one audit and print its table."""
    flags = ("--samples", str(samples), "--repeats", str(repeats), "--words", str(case.words))
    async with case.open(directory) as fleet:
        ended = await audit(fleet, *flags, stderr=None)
        own, others = [await predicted_tokens(fleet, name) for name in (VICTIM, ATTACKER)]
    if ended.report is None:
        return Verdict.VOID
    print(f"\n| {case.name} | {row_of(ended.report)} | {sum(others)} of {len(others)} |")
    if not any(own):
        return Verdict.VOID
    return Verdict.LEAK if any(others) else Verdict[ended.report.verdict.upper()]


def row_of(report: Report) -> str:
    """Return the figures of all repeats as cells of a table."""
    least = min(one.across.p_value for one in report.repeats)
    across, control = (_cells(one) for one in (report.pooled.across, report.pooled.control))
    rejected = f"{report.rejections} of {len(report.repeats)} (at most {report.rejections_allowed})"
    return f"{across} | {rejected} | {least:.2g} | {control} | {report.verdict}"


def _cells(one: Comparison) -> str:
    return f"{one.known_median_ms:.4g} / {one.fresh_median_ms:.4g} | {one.p_value:.2g}"


async def run_reader(samples: int, repeats: int, directory: Path) -> Verdict:
    """Run the audit of reading alone, on bodies of three kinds; return the worst verdict."""
    tokenizer = write_tokenizer(directory / "tokenizer")
    verdicts = []
    for title, words, salt_first in READINGS:
        times = await read_rounds(tokenizer, words, samples, repeats, salt_first=salt_first)
        report = judge(times)
        print(f"| {title} | {row_of(report)} | |", flush=True)
        verdicts.append(Verdict[report.verdict.upper()])
    return worst_of(verdicts)


async def run_order(trials: int, directory: Path) -> Verdict:
    """Run the test of the order of answers: with a queue in the router, shortest prefill first."""
    async with engines(directory, hold={"enabled": True}) as fleet:
        across = await places(fleet, VICTIM, ATTACKER, trials)
        predicted = await predicted_tokens(fleet, ATTACKER)
        within = await places(fleet, VICTIM, VICTIM, CONTROL_TRIALS)
    for name, found in (("across tenants", across), ("within one", within)):
        mean = sum(found) / len(found)
        print(f"{name}: {len(found)} trials, mean place {mean:.1f}, p = {p_value(found):.3g}")
    print(f"predicted cached tokens across: {sum(predicted)} of {len(predicted)} requests")
    if p_value(within) > SIGNIFICANCE:
        return Verdict.VOID
    return Verdict.LEAK if any(predicted) or p_value(across) <= SIGNIFICANCE else Verdict.PASSED


async def run(options: argparse.Namespace, names: list[str]) -> int:
    """Run the audits of these names; returns the exit code."""
    verdicts: list[Verdict] = []
    noise = Noise()
    with tempfile.TemporaryDirectory() as root:
        for name in names:
            directory = Path(root) / name
            directory.mkdir()
            began_s = time.monotonic()
            if name == READER:
                print("\n== reader: one prompt reader, no process, no socket", flush=True)
                verdicts.append(await run_reader(options.samples, options.repeats, directory))
                continue
            case = next((one for one in CASES if one.name == name), None)
            title = case.title if case is not None else f"{GUESSES} guesses at once, one right"
            print(f"\n== {name}: {title}", flush=True)
            if case is None:
                verdicts.append(await run_order(options.trials, directory))
            else:
                ended = await run_case(case, options.samples, options.repeats, directory)
                verdicts.append(ended)
            took_s = time.monotonic() - began_s
            print(f"{verdicts[-1].name.lower()}; took {took_s:.0f} s", flush=True)
    print(noise.told())
    worst = worst_of(verdicts)
    print(worst.name.lower())
    return worst.value


def worst_of(verdicts: list[Verdict]) -> Verdict:
    """Return leak before void before passed."""
    return next((one for one in (Verdict.LEAK, Verdict.VOID) if one in verdicts), Verdict.PASSED)


def main() -> int:
    """Read the flags and run."""
    every = [*(case.name for case in CASES), READER, ORDER]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=every, help="this one; repeatable")
    parser.add_argument("--samples", type=int, default=250)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--trials", type=int, default=TRIALS)
    options = parser.parse_args()
    return asyncio.run(run(options, options.only or every))


if __name__ == "__main__":
    sys.exit(main())
