"""Fuzz one target, or each in turn, with coverage to guide it: ``make fuzz``.

``python -m support.fuzz --seconds 60 --target sse``; needs ``atheris``. What grows the coverage is
kept below ``--corpus``; an input that fails is written beside it, and the run ends with status 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, Final

OURS: Final = ["prompt", "router", "sidecar", "state", "replay"]
SEED: Final = 1
MUTATIONS: Final = 200
"""Of the seeds, to begin with."""


def begun(directory: Path, name: str) -> Path:
    """Return the corpus of a target, with the seeds and some edits of them."""
    from support.fuzz_seed import SEEDS, mutated  # noqa: PLC0415 - only where a run begins

    corpus = directory / name
    corpus.mkdir(parents=True, exist_ok=True)
    rng = Random(name)
    edited = (mutated(rng.choice(SEEDS[name]), rng) for _ in range(MUTATIONS))
    for number, data in enumerate((*SEEDS[name], *edited)):
        (corpus / f"seed-{number:03}").write_bytes(data)
    return corpus


def fuzz(name: str, corpus: Path, seconds: int) -> None:
    """Fuzz one target in this process; does not return."""
    atheris: Any = import_module("atheris")  # is there in the fuzzer's own environment only
    with atheris.instrument_imports(include=OURS):
        from support.fuzz_target import LARGEST, TARGETS  # noqa: PLC0415 - instrumented
    flags = [
        *(f"-max_total_time={seconds}", f"-max_len={LARGEST}", f"-seed={SEED}", "-timeout=20"),
        *("-rss_limit_mb=2048", "-print_final_stats=1", f"-artifact_prefix={corpus}.failed-"),
    ]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], TARGETS[name])
    atheris.Fuzz()


def main() -> None:
    """Run each target in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", help="one of them, repeatable; default: all")
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument("--corpus", type=Path, default=Path("build/fuzz/corpus"))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        fuzz(options.target[0], options.corpus / options.target[0], options.seconds)
    from support.fuzz_target import TARGETS  # noqa: PLC0415 - not instrumented

    failed = []
    for name in options.target or TARGETS:
        begun(options.corpus, name)
        words = ["--here", "--target", name, "--seconds", str(options.seconds)]
        words += ["--corpus", str(options.corpus)]
        done = subprocess.run(
            [sys.executable, "-m", "support.fuzz", *words],
            capture_output=True,
            text=True,
            check=False,
        )
        told = [line for line in done.stderr.splitlines() if line.startswith(("stat::", "Done"))]
        sys.stdout.write(f"{name}: status {done.returncode}; {' '.join(told)}\n")
        sys.stdout.flush()
        if done.returncode:
            failed.append(name)
            sys.stdout.write(done.stderr[-4_000:] + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
