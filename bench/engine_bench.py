"""The bundled worker's runners beside transformers' ``generate``, on the same weights. One run.

    /path/to/environment/bin/python bench/engine_bench.py [--quick] [--threads N] [--only mid,small]

Runs with a Python that has torch, transformers and what a worker needs. Greedy, float32, on the
processor, with a KV cache everywhere; prompts are random ids, equally long, which spares
transformers the padding of its batch. transformers takes eager attention and sdpa; compared with is
the faster of the two. Rounds are interleaved, the first warms up, shown are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from msgspec import Struct

from engine_drive import Manner, generate, random_prompts
from engine_model import (
    SHAPES,
    WEIGHTS_SEED,
    shape_told,
    transformers_model,
    versions_told,
)
from figures import Figures, ratio_table, write_report
from meter import Noise
from sidecar.compute.numpy_runner import NumpyRunner
from sidecar.compute.weights import random_weights

try:
    import torch  # type: ignore[import-not-found]
    import transformers  # type: ignore[import-not-found]

    from sidecar.compute.torch_runner import TorchRunner
except ImportError as error:
    print(f"the engine bench needs torch and transformers in {sys.executable}: {error}")
    sys.exit(2)

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE_TOKENS = 16
CONCURRENT = 8
MAX_TOKENS = 2048
ATTENTIONS = ("eager", "sdpa")
TORCH, NUMPY = "torch runner", "NumPy runner"
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
Prompts = list[list[int]]
Tokens = list[list[int]]


class Amounts(Struct, frozen=True, kw_only=True):
    """How much is done."""

    rounds: int = 3
    prompt_tokens: int = 128
    outputs: int = 32


QUICK = Amounts(rounds=1, prompt_tokens=64, outputs=4)


class Contender(Struct, frozen=True):
    """``answer`` generates for prompts, all at once."""

    name: str
    answer: Callable[[Prompts, int], Tokens]


def transformers_contender(attention: str, model: Any) -> Contender:
    """Return ``generate`` of a model, greedy."""

    def answer(prompts: Prompts, outputs: int) -> Tokens:
        ids = torch.tensor(prompts)
        settings = {"do_sample": False, "use_cache": True, "max_new_tokens": outputs}
        with torch.inference_mode():
            mask = torch.ones_like(ids)
            made = model.generate(ids, attention_mask=mask, min_new_tokens=outputs, **settings)
        tokens: Tokens = made[:, ids.shape[1] :].tolist()
        return tokens

    return Contender(attention, answer)


def runner_contender(name: str, runner: TorchRunner | NumpyRunner) -> Contender:
    """Return a runner that serves prompts together, without an engine around it."""
    manner = Manner(page_tokens=PAGE_TOKENS, step_tokens=MAX_TOKENS)

    def answer(prompts: Prompts, outputs: int) -> Tokens:
        return asyncio.run(generate(runner, prompts, outputs, manner))

    return Contender(name, answer)


def contenders(shape: str, amounts: Amounts, threads: int) -> tuple[str, list[Contender]]:
    """Return what the model is and who computes it."""
    config = SHAPES[shape].config(amounts.prompt_tokens + amounts.outputs)
    weights = random_weights(config, WEIGHTS_SEED)
    pages = CONCURRENT * -(-config.max_position_tokens // PAGE_TOKENS)
    room = {"pages": pages, "page_tokens": PAGE_TOKENS, "max_tokens": MAX_TOKENS}
    field = [
        transformers_contender(attention, transformers_model(config, attention))
        for attention in ATTENTIONS
    ]
    settings: dict[str, Any] = {**room, "threads": threads}
    torch_runner = TorchRunner(config, weights, device="cpu", **settings)
    field.append(runner_contender(TORCH, torch_runner))
    field.append(runner_contender(NUMPY, NumpyRunner(config, weights, **settings)))
    return shape_told(config), field


def measured(field: Sequence[Contender], vocabulary_size: int, amounts: Amounts) -> Figures:
    """Measure tokens per second: of prompts in prefill, generated ones else."""
    figures = Figures()
    for at in range(amounts.rounds + 1):
        prompts = random_prompts(CONCURRENT, amounts.prompt_tokens, vocabulary_size, at)
        for one in field:
            prefill_s, _ = timed(one, prompts[:1], 1)
            one_s, first = timed(one, prompts[:1], amounts.outputs)
            together_s, answers = timed(one, prompts, amounts.outputs)
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
                alone_s = sum(timed(one, [prompt], amounts.outputs)[0] for prompt in prompts)
                figures.add(ALONE, one.name, made / alone_s)
            figures.add(TOGETHER, one.name, made / together_s)
    return figures


def timed(one: Contender, prompts: Prompts, outputs: int) -> tuple[float, Tokens]:
    """Return the seconds that an answer took, and the answer."""
    began_s = time.perf_counter()
    answers = one.answer(prompts, outputs)
    return time.perf_counter() - began_s, answers


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
    amounts = QUICK if options.quick else Amounts()
    amounts = Amounts(
        rounds=options.rounds or amounts.rounds,
        prompt_tokens=amounts.prompt_tokens,
        outputs=amounts.outputs,
    )
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    noise, load_before = Noise(), os.getloadavg()[0]
    setting = (
        f"Prompts of {amounts.prompt_tokens} random ids, {amounts.outputs} tokens after each; "
        f"float32, {options.threads} threads, {amounts.rounds} rounds; {versions_told()}."
    )
    told: dict[str, Any] = {"setting": setting, "load_average_before": load_before}
    tables = [setting]
    for shape in options.shapes:
        words, field = contenders(shape, amounts, options.threads)
        figures = measured(field, SHAPES[shape].vocabulary_size, amounts)
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
    is_whole = not options.quick and set(options.shapes) == set(SHAPES)
    name = "engine" if is_whole else "engine-part"
    print(f"all values and tables: {write_report(name, told, tables)}.json, .md")


if __name__ == "__main__":
    main()
