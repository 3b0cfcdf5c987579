"""Token identity and throughput of the torch runner on a GPU; dates the result in docs/engine.md.

    /path/to/environment/bin/python bench/gpu_check.py [--page docs/engine.md]

Runs with a Python that has torch with CUDA and what a worker needs. For each dtype: the same greedy
tokens in every manner (chunks, company, recorded steps or not), in float32 also those of the NumPy
runner; then tokens per second. Ends with 2 and says what is missing where there is no GPU, with 1
where tokens differ. Without CUDA the same checks run with ``--device cpu``, which writes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from msgspec import Struct

from engine_drive import Manner, generate, random_prompts
from engine_model import SHAPES, WEIGHTS_SEED, shape_told
from figures import table
from sidecar.compute.numpy_runner import NumpyRunner
from sidecar.compute.weights import random_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.compute.model import ModelConfig
    from sidecar.compute.torch_runner import TorchRunner
    from sidecar.compute.weights import Weights

PAGE_TOKENS = 16
MAX_TOKENS = 2048
OUTPUTS = 16
CONCURRENT = 8
PREFILL_TOKENS, DECODE_TOKENS = 1024, 64
ALONE = Manner(page_tokens=PAGE_TOKENS, sequences=1)
MANNERS = {
    "all at once": Manner(page_tokens=PAGE_TOKENS),
    "chunks of 7": Manner(page_tokens=PAGE_TOKENS, chunk_tokens=7, step_tokens=64),
    "chunks of 100": Manner(page_tokens=PAGE_TOKENS, chunk_tokens=100, step_tokens=300),
}
PLACE = re.compile(r"(<!-- gpu-check -->\n).*?(<!-- /gpu-check -->)", re.DOTALL)
IS_MISSING, DIFFERS = 2, 1


class Case(Struct, frozen=True):
    """One row: a dtype, and whether steps are of shapes that are proven invariant."""

    dtype: str
    is_invariant: bool = True

    def told(self) -> str:
        """Return the row's name."""
        return self.dtype if self.is_invariant else f"{self.dtype}, any shapes"


CASES = (Case("float32"), Case("bfloat16"), Case("float16"), Case("bfloat16", is_invariant=False))


class Result(Struct, frozen=True):
    """What a case gave: the manners with other tokens than alone, and tokens per second."""

    case: Case
    differing: tuple[str, ...]
    prefill_per_s: float
    decode_one_per_s: float
    decode_many_per_s: float


def missing(device: str) -> str | None:
    """Return what is missing for checks on ``device``."""
    try:
        import torch  # type: ignore[import-not-found] # noqa: PLC0415 - what is asked is whether
    except ImportError as error:
        return f"torch is not installed in {sys.executable}: {error}"
    if device == "cuda" and not torch.cuda.is_available():
        build = torch.version.cuda or "none"
        return f"torch {torch.__version__} (CUDA in the build: {build}) sees no CUDA device"
    return None


async def checked(case: Case, config: ModelConfig, weights: Weights, device: str) -> Result:
    """Return what ``case`` gives on ``device``."""
    from sidecar.compute.torch_runner import TorchRunner  # noqa: PLC0415 - needs torch

    runner = TorchRunner(
        config,
        weights,
        pages=CONCURRENT * (PREFILL_TOKENS + DECODE_TOKENS) // PAGE_TOKENS,
        page_tokens=PAGE_TOKENS,
        max_tokens=MAX_TOKENS,
        dtype=case.dtype,
        device=device,
        is_invariant=case.is_invariant,
    )
    try:
        differing = await different(runner, case, config, weights)
        return Result(case, differing, *await rates(runner, config.vocabulary_size))
    finally:
        runner.close()


async def different(
    runner: TorchRunner, case: Case, config: ModelConfig, weights: Weights
) -> tuple[str, ...]:
    """Return the manners in which the tokens are others than alone."""
    prompts = [
        random_prompts(1, tokens, config.vocabulary_size, tokens)[0]
        for tokens in (1, 5, 40, 300, 700)
    ]
    alone = await generate(runner, prompts, OUTPUTS, ALONE)
    found = [
        name
        for name, manner in MANNERS.items()
        if await generate(runner, prompts, OUTPUTS, manner) != alone
    ]
    again = [prompt + tokens[:5] for prompt, tokens in zip(prompts, alone, strict=True)]
    resumed = await generate(runner, again, OUTPUTS - 5, MANNERS["all at once"])
    if resumed != [tokens[5:] for tokens in alone]:
        found.append("after preemption")
    if case.dtype == "float32":
        room = {"pages": 200, "page_tokens": PAGE_TOKENS, "max_tokens": MAX_TOKENS}
        reference = NumpyRunner(config, weights, **room)
        if await generate(reference, prompts, OUTPUTS, ALONE) != alone:
            found.append("NumPy runner")
        reference.close()
    return tuple(found)


async def rates(runner: TorchRunner, vocabulary_size: int) -> tuple[float, float, float]:
    """Return tokens per second of prefill, of one decoding sequence and of all."""
    prompts = random_prompts(CONCURRENT, PREFILL_TOKENS, vocabulary_size, 0)
    prefill_s = await seconds(runner, prompts[:1], 1)
    one_s = await seconds(runner, prompts[:1], DECODE_TOKENS)
    many_prefill_s = await seconds(runner, prompts, 1)
    many_s = await seconds(runner, prompts, DECODE_TOKENS)
    made = DECODE_TOKENS - 1
    return (
        PREFILL_TOKENS / prefill_s,
        made / max(one_s - prefill_s, 1e-9),
        CONCURRENT * made / max(many_s - many_prefill_s, 1e-9),
    )


async def seconds(runner: TorchRunner, prompts: Sequence[list[int]], outputs: int) -> float:
    """Return how long it takes, the second time: the first one records steps."""
    manner = Manner(page_tokens=PAGE_TOKENS)
    await generate(runner, prompts, outputs, manner)
    began_s = time.perf_counter()
    await generate(runner, prompts, outputs, manner)
    return time.perf_counter() - began_s


def shown(results: Sequence[Result], where: str, shape: str) -> str:
    """Return the dated block."""
    head = ["", "tokens differ", "prefill, tokens/s", "decode, 1", f"decode, {CONCURRENT}"]
    rows = [
        [
            one.case.told(),
            ", ".join(one.differing) or "nowhere",
            f"{one.prefill_per_s:,.0f}",
            f"{one.decode_one_per_s:,.0f}",
            f"{one.decode_many_per_s:,.0f}",
        ]
        for one in results
    ]
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    return f"{today}, {where}; {shape}.\n\n{table(head, rows)}"


def written(page: str, block: str) -> str:
    """Return ``page`` with ``block`` between the markers; raises ValueError if it has none."""
    if not PLACE.search(page):
        message = "docs: expected <!-- gpu-check --> and <!-- /gpu-check -->"
        raise ValueError(message)
    return PLACE.sub(lambda found: f"{found[1]}\n{block}\n\n{found[2]}", page)


def device_told(device: str) -> str:
    """Return what computes, in words."""
    import torch  # noqa: PLC0415 - it is there by now

    name = torch.cuda.get_device_name() if device == "cuda" else "a processor"
    return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"


def main() -> int:
    """Check, print the block, and put it into the page if a GPU computed it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--page", type=Path, help="the page with the markers")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="mid")
    options = parser.parse_args()
    absent = missing(options.device)
    if absent:
        print(f"gpu-check: no GPU is at hand, nothing was checked: {absent}")
        return IS_MISSING
    config = SHAPES[options.shape].config(2048)
    weights = random_weights(config, WEIGHTS_SEED)
    results: list[Result] = []
    for case in CASES:
        results.append(asyncio.run(checked(case, config, weights, options.device)))
        print(f"{case.told()}: tokens differ {', '.join(results[-1].differing) or 'nowhere'}")
    block = shown(results, device_told(options.device), shape_told(config))
    print(f"\n{block}")
    if options.page and options.device == "cuda":
        page: Any = options.page.read_text(encoding="utf-8")
        options.page.write_text(written(page, block), encoding="utf-8")
    is_wrong = any(one.differing for one in results if one.case.dtype == "float32")
    return DIFFERS if is_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
