"""The benches that figures and ratios come from: how each is run, and what it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from figures import BUILT
from report import Report, read_report

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

HERE = Path(__file__).resolve().parent
DATA = os.environ.get("WARMROUTE_TEST_DATA") or HERE.parents[1] / "shared" / "data"


class Mode(StrEnum):
    """How much is run; its files below build/bench end in it."""

    FULL = "full"
    CHECK = "check"
    """What ratios need: no peers but aiohttp, and more rounds."""
    QUICK = "quick"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A script and its words by mode; without words for a mode it is left out there."""

    script: str
    words: Mapping[Mode, str]
    needs_stub: bool = False
    needs_compiler: bool = False
    needs_data: bool = False
    needs_valgrind: bool = False

    def missing(self) -> str:
        """Return what this machine lacks for it, an empty text when nothing."""
        if self.needs_stub and not all((BUILT / name).exists() for name in ("stub", "load")):
            return "no stub and load generator: `make bench-native` (Linux and a C compiler)"
        if self.needs_compiler and not has_compiler():
            return "no C compiler"
        if self.needs_data and not Path(DATA).exists():
            return "no shared data (WARMROUTE_TEST_DATA)"
        if self.needs_valgrind and shutil.which("valgrind") is None:
            return "no valgrind"
        return ""


BENCHES = {
    "router": Bench(
        script="router_bench.py",
        words={
            Mode.FULL: "",
            Mode.CHECK: "--rounds 7 --only cpu,chunk,memory --without sglang,vllm,nginx",
            Mode.QUICK: "--quick",
        },
        needs_stub=True,
    ),
    "history": Bench(
        script="history_bench.py",
        words={Mode.FULL: "", Mode.CHECK: "--only slope", Mode.QUICK: "--quick"},
        needs_stub=True,
    ),
    "streams": Bench(
        script="streams_bench.py",
        words={Mode.FULL: "", Mode.QUICK: "--quick"},
        needs_stub=True,
    ),
    "processes": Bench(
        script="process_bench.py",
        words={Mode.FULL: "", Mode.CHECK: "", Mode.QUICK: "--quick"},
        needs_stub=True,
    ),
    "prompt": Bench(
        script="prompt_bench.py",
        words=dict.fromkeys(Mode, "--speeds"),
        needs_data=True,
    ),
    "request": Bench(
        script="request_bench.py",
        words={
            Mode.FULL: "--sizes 1,32,256",
            Mode.CHECK: "--sizes 1,32,256",
            Mode.QUICK: "--sizes 1,32,256 --bursts 10 --requests 8",
        },
    ),
    "chunk": Bench(
        script="chunk_bench.py",
        words={Mode.FULL: "", Mode.CHECK: "", Mode.QUICK: "--bursts 10"},
    ),
    "counts": Bench(
        script="count_bench.py",
        words={Mode.FULL: "", Mode.CHECK: "", Mode.QUICK: "--quick"},
        needs_valgrind=True,
    ),
    "index": Bench(
        script="index_bench.py",
        words={
            Mode.FULL: "0.5 --parts memory,lookups,server",
            Mode.CHECK: "0.5 --parts memory,lookups,server",
            Mode.QUICK: "0.02 --parts memory,lookups,server --rounds 5",
        },
        needs_compiler=True,
    ),
}


def has_compiler() -> bool:
    """Return whether there is a C compiler, as ``warmroute/native.py`` looks for one."""
    return shutil.which("cc") is not None


def report_name(name: str, mode: Mode) -> str:
    """Return what the files of a bench are called."""
    return name if mode is Mode.FULL else f"{name}-{mode}"


def run_bench(name: str, mode: Mode, more: Sequence[str] = ()) -> str:
    """Run a bench with its output passed on; return why it has no figures, else an empty text."""
    bench = BENCHES[name]
    if why := bench.missing():
        return why
    told = report_name(name, mode)
    (BUILT / f"{told}.json").unlink(missing_ok=True)
    words = [*bench.words[mode].split(), *more]
    words += ["--json", str(BUILT / f"{told}.json")] if name == "index" else ["--report", told]
    print(f"\n== {bench.script} {' '.join(words)}", flush=True)
    done = subprocess.run(
        [sys.executable, str(HERE / bench.script), *words],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=HERE.parent,
    )
    if done.returncode == 0:
        return ""
    print(done.stderr, file=sys.stderr, flush=True)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return f"{bench.script} ended with status {done.returncode}: {last[:200]}"


def reports_of(
    mode: Mode, wanted: Collection[str], *, measures: bool
) -> tuple[dict[str, Report], list[str]]:
    """Return the report of every bench and which ones failed.

    With ``measures`` those of ``wanted`` are run; all others are read as
    the last run left them.
    """
    reports, failed = {}, []
    for name, bench in BENCHES.items():
        why = ""
        if measures and name in wanted and mode in bench.words:
            why = run_bench(name, mode)
            if why and not bench.missing():
                failed.append(why)
        report = (
            Report(None, why) if why else read_report(BUILT / f"{report_name(name, mode)}.json")
        )
        if not report and not why:
            report = Report(None, bench.missing() or report.why)
        reports[name] = report
    return reports, failed
