"""The bundled worker's runners beside transformers' ``generate``, on the same weights. One run.

    /path/to/environment/bin/python bench/engine_bench.py [--quick] [--threads N] [--only mid,small]

Runs with a Python that has torch, transformers and what a worker needs. Greedy, float32, on the
processor, with a KV cache everywhere; prompts are random ids, equally long, which spares
transformers the padding of its batch. Each contender is a process. transformers takes eager
attention and sdpa; compared with is the faster of the two. Rounds are interleaved, the first warms
up, shown are medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from msgspec import Struct

from engine_contender import ATTENTIONS, NAMES, NUMPY, TORCH, Contender
from engine_drive import random_prompts
from engine_model import SHAPES, shape_told, versions_told
from figures import Figures, ratio_table, write_report
from meter import Noise

if TYPE_CHECKING:
    from collections.abc import Sequence

CONCURRENT = 8
NEEDED = ("torch", "transformers")
COLUMNS = {
    **{name: f"transformers {name}" for name in ATTENTIONS},
    TORCH: TORCH,
    NUMPY: NUMPY,
}
ONE, ALONE, TOGETHER = (
    "1 request",
    f"{CONCURRENT} requests, one after the other",
    f"{CONCURRENT} requests at once",
)


class Amounts(Struct, frozen=True, kw_only=True):
    """How much is done."""

    rounds: int = 3
    prompt_tokens: int = 128
    outputs: int = 32


QUICK = Amounts(rounds=1, prompt_tokens=64, outputs=4)


def contenders(shape: str, amounts: Amounts, threads: int) -> list[Contender]:
    """Return who computes the model, all started."""
    room = (CONCURRENT, amounts.prompt_tokens + amounts.outputs)
    return [Contender(name, shape, room, threads) for name in NAMES]


def measured(field: Sequence[Contender], vocabulary_size: int, amounts: Amounts) -> Figures:
    """Measure tokens per second: of prompts in prefill, generated ones else."""
    figures = Figures()
    for at in range(amounts.rounds + 1):
        prompts = random_prompts(CONCURRENT, amounts.prompt_tokens, vocabulary_size, at)
        for one in field:
            prefill_s, _ = one.timed(prompts[:1], 1)
            one_s, first = one.timed(prompts[:1], amounts.outputs)
            together_s, answers = one.timed(prompts, amounts.outputs)
            if answers[0] != first[0]:
                print(f"{one.name}: other tokens in a batch than alone")
            if not at:
                continue
            decode_s = max(one_s - prefill_s, 1e-9)
            figures.add("prefill, 1 prompt", one.name, amounts.prompt_tokens / prefill_s)
            figures.add("decode, 1 sequence", one.name, (amounts.outputs - 1) / decode_s)
            figures.add(ONE, one.name, amounts.outputs / one_s)
            made = amounts.outputs * CONCURRENT
            if one.name in ATTENTIONS:
                alone_s = sum(one.timed([prompt], amounts.outputs)[0] for prompt in prompts)
                figures.add(ALONE, one.name, made / alone_s)
            figures.add(TOGETHER, one.name, made / together_s)
    return figures


def targets_told(figures: Figures) -> tuple[str, dict[str, float]]:
    """Return the torch runner's ratios to the faster transformers, in words and as values."""

    def ratio(row: str, to_row: str) -> float:
        best = max(figures.median(to_row, name) or 0.0 for name in ATTENTIONS)
        return (figures.median(row, TORCH) or 0.0) / best

    ratios = {
        "1 request": ratio(ONE, ONE),
        "8 at once to 8 calls": ratio(TOGETHER, ALONE),
        "8 at once to 1 call of 8": ratio(TOGETHER, TOGETHER),
    }
    words = (
        f"The torch runner to the faster of both transformers: x{ratios['1 request']:.2f} for one "
        f"request, x{ratios['8 at once to 8 calls']:.2f} for {CONCURRENT} at once to {CONCURRENT} "
        f"calls one after the other, x{ratios['8 at once to 1 call of 8']:.2f} to one call with "
        f"all {CONCURRENT}. A cell's rounds differ by {figures.spread():.0%} of its median."
    )
    return words, ratios


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="small amounts: does it work?")
    parser.add_argument("--only", default=",".join(SHAPES), help="model shapes, with commas")
    parser.add_argument("--rounds", type=int, help="measured rounds")
    parser.add_argument("--prompt-tokens", type=int, help="length of the prompts")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("--threads", type=int, default=cores, help="threads of each contender")
    options = parser.parse_args(words)
    options.shapes = options.only.split(",")
    if not set(options.shapes) <= set(SHAPES):
        parser.error(f"--only: expected some of {','.join(SHAPES)}")
    return options


def main() -> None:
    """Measure the wanted shapes; print tables and write all values beside."""
    options = options_of(sys.argv[1:])
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"the engine bench needs {' and '.join(missing)} in {sys.executable}")
        sys.exit(2)
    amounts = QUICK if options.quick else Amounts()
    amounts = Amounts(
        rounds=options.rounds or amounts.rounds,
        prompt_tokens=options.prompt_tokens or amounts.prompt_tokens,
        outputs=amounts.outputs,
    )
    noise, load_before = Noise(), os.getloadavg()[0]
    setting = (
        f"Prompts of {amounts.prompt_tokens} random ids, {amounts.outputs} tokens after each; "
        f"float32, {options.threads} threads, {amounts.rounds} rounds; {versions_told()}."
    )
    told: dict[str, Any] = {"setting": setting, "load_average_before": load_before}
    tables = [setting]
    for shape in options.shapes:
        field = contenders(shape, amounts, options.threads)
        try:
            figures = measured(field, SHAPES[shape].vocabulary_size, amounts)
        finally:
            for one in field:
                one.close()
        words = shape_told(SHAPES[shape].config(amounts.prompt_tokens + amounts.outputs))
        targets, ratios = targets_told(figures)
        cells = ratio_table(figures, COLUMNS, ATTENTIONS[1], "{:,.1f}".format)
        tables.append(f"### Tokens per second: {words}\n\n{cells}\n\n{targets}")
        told[shape] = {"tokens_per_s": figures.plain(), "ratios": ratios}
        print(f"\n{tables[-1]}", flush=True)
    told["load_average_after"] = os.getloadavg()[0]
    print(
        f"\n{setting}\n{noise.told()} Load average {load_before:.1f} before, "
        f"{told['load_average_after']:.1f} after."
    )
    is_whole = amounts == Amounts() and set(options.shapes) == set(SHAPES)
    name = "engine" if is_whole else "engine-part"
    print(f"all values and tables: {write_report(name, told, tables)}.json, .md")


if __name__ == "__main__":
    main()
