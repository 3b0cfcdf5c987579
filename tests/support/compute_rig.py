"""Drives a runner of a real model in tests: steps, whole prompts, the bits in its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec import Struct

from sidecar.clock import StepLoad
from sidecar.compute.model import ModelConfig, read_model_config
from sidecar.compute.numpy_runner import NumpyRunner
from sidecar.compute.weights import Weights, builtin_config, open_weights, random_weights
from sidecar.pool import PageId
from sidecar.runner import Batch, Draw, Outcome, Sampled, Slot
from support.checkpoint import write_checkpoint
from support.reference_logits import CASES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PAGE_TOKENS: Final = 16
PAGES: Final = 64
GREEDY: Final = Draw(seed=0, index=0, top_logprobs=3)


class Model(Struct, frozen=True):
    """What a runner needs to be told of a model."""

    config: ModelConfig
    weights: Weights


def load_model(folder: Path, name: str) -> Model:
    """Return the built-in model or one of ``CASES``, which is written to ``folder``."""
    if name == "builtin":
        config = builtin_config(256)
        return Model(config, random_weights(config, 1))
    write_checkpoint(folder, CASES[name])
    config = read_model_config(folder)
    return Model(config, open_weights(folder, config))


def open_runner(model: Model, **changed: Any) -> NumpyRunner:
    """Return a runner with one thread and room for a few texts."""
    settings = {"pages": PAGES, "page_tokens": PAGE_TOKENS, "max_tokens": 256, "threads": 1}
    return NumpyRunner(model.config, model.weights, **(settings | changed))


def slot(text: Sequence[int], context_tokens: int, pages: Sequence[int], *draws: Draw) -> Slot:
    """Return new tokens of one sequence."""
    packed = np.array(text, dtype="<u4").tobytes()
    return Slot(packed, context_tokens, tuple(PageId(page) for page in pages), draws)


async def run(runner: NumpyRunner, *slots: Slot, **parts: Any) -> Outcome:
    """Run one step."""
    return await runner.run(Batch(load=StepLoad(0, 0, 0, 0), slots=slots, **parts))


async def prefill(
    runner: NumpyRunner, text: Sequence[int], pages: Sequence[int], chunk_tokens: int
) -> Sampled:
    """Compute ``text`` in chunks and return what follows."""
    for first in range(0, len(text), chunk_tokens):
        chunk = text[first : first + chunk_tokens]
        outcome = await run(runner, slot(chunk, first, pages, GREEDY))
    return outcome.samples[0][0]


async def content(runner: NumpyRunner, pages: Sequence[int], tokens_count: int) -> bytes:
    """Return the KV bits of a sequence, without what lies after its last token."""
    read = await runner.read(tuple(PageId(page) for page in pages))
    whole = np.concatenate(
        [np.frombuffer(page, np.uint32).reshape(_entry(runner)) for page in read], axis=2
    )
    return whole[:, :, :tokens_count].tobytes()


def _entry(runner: NumpyRunner) -> tuple[int, ...]:
    return tuple(runner._cache.content.shape[1:])
