"""What the torch runner computes in different manners, as JSON; ``torch_facts.py DTYPE THREADS``.

Runs with the Python of an engine, which has torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from engine_drive import GREEDY, NO_LOAD, Manner, generate, packed, random_prompts
from sidecar.compute import torch_runner
from sidecar.compute.model import ModelConfig
from sidecar.compute.numpy_runner import NumpyRunner
from sidecar.compute.rope import RopeConfig
from sidecar.compute.torch_package import torch
from sidecar.compute.torch_runner import TorchRunner
from sidecar.compute.weights import random_weights
from sidecar.pool import PageId
from sidecar.runner import Batch, Draw, Load, RunnerError, Save, Slot

PAGES, OUTPUTS = 200, 8
ROOM: dict[str, int] = {"pages": PAGES, "page_tokens": 16, "max_tokens": 600}
LLAMA = ModelConfig(
    family="llama",
    vocabulary_size=512,
    hidden_width=96,
    intermediate_width=200,
    layers=2,
    heads=6,
    kv_heads=2,
    head_width=16,
    norm_epsilon=1e-6,
    rope=RopeConfig(kind="llama3", factor=8.0, original_tokens=256),
    max_position_tokens=2048,
)
QWEN2 = msgspec.structs.replace(
    LLAMA,
    family="qwen2",
    heads=4,
    kv_heads=4,
    head_width=32,
    has_attention_bias=True,
    has_tied_embeddings=True,
)
QWEN3 = msgspec.structs.replace(LLAMA, family="qwen3", head_width=32, has_head_norms=True)
BIASED = msgspec.structs.replace(
    LLAMA, has_attention_bias=True, has_output_bias=True, has_mlp_bias=True, kv_heads=1
)
CONFIGS = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3, "llama with biases": BIASED}
PROMPTS = [
    prompt
    for seed, tokens in enumerate((5, 300, 1, 40, 560))
    for prompt in random_prompts(1, tokens, LLAMA.vocabulary_size, seed)
]
TABLE_PAGES = [-(-(len(prompt) + OUTPUTS) // 16) for prompt in PROMPTS]
MANNERS = {
    "token by token": Manner(page_tokens=16, step_tokens=1, sequences=1),
    "chunks of 7, together": Manner(page_tokens=16, chunk_tokens=7, step_tokens=64),
    "chunks of 100, together": Manner(page_tokens=16, chunk_tokens=100, step_tokens=600),
    "chunks of 64, on other pages": Manner(
        page_tokens=16, chunk_tokens=64, step_tokens=65, sequences=3, first_page=100
    ),
}
ALONE = Manner(page_tokens=16, step_tokens=600, sequences=1)


class Replayer:
    """Implements ``Recorder`` by doing the work again; counts."""

    def __init__(self) -> None:
        self.records = self.replays = 0

    def record(self, work: Any) -> Any:
        """See ``Recorder``; a result stays in one place, as a CUDA graph leaves it."""
        self.records += 1
        result = torch.full_like(work(), torch.nan)

        def replay() -> None:
            self.replays += 1
            result.copy_(work())

        return replay, result


async def content_digest(runner: Any, manner: Manner) -> str:
    """Return a digest of the full pages of all prompts."""
    pages, first = [], manner.first_page
    for prompt, table in zip(PROMPTS, TABLE_PAGES, strict=True):
        pages += [PageId(first + page) for page in range(len(prompt) // 16)]
        first += table
    return hashlib.sha256(b"".join(await runner.read(tuple(pages)))).hexdigest()


async def manner_facts(runner: Any) -> dict[str, Any]:
    """Return tokens and the digest of KV for every manner."""
    told = {}
    for name, manner in {"alone": ALONE, **MANNERS}.items():
        tokens = await generate(runner, PROMPTS, OUTPUTS, manner)
        told[name] = {"tokens": tokens, "kv": await content_digest(runner, manner)}
    return told


async def cache_facts(runner: TorchRunner) -> dict[str, Any]:
    """Return what a prompt's tokens are after cache hits, preemption, copies and other tiers."""
    prompt = PROMPTS[1]
    whole = (await generate(runner, [prompt], OUTPUTS, ALONE))[0]
    hit = msgspec.structs.replace(ALONE, context_tokens=288)
    told: dict[str, Any] = {
        "whole": whole,
        "hit": (await generate(runner, [prompt], OUTPUTS, hit))[0],
        "preempted": whole[:3]
        + (await generate(runner, [prompt + whole[:3]], OUTPUTS - 3, ALONE))[0],
    }
    table = [PageId(page) for page in range(18)]
    kept = [bytearray(runner.content_bytes) for _ in table]
    saves = tuple(Save(page, memoryview(one)) for page, one in zip(table, kept, strict=True))
    await runner.run(Batch(load=NO_LOAD, saves=saves))
    told["saved as read"] = [bytes(one) for one in kept] == await runner.read(tuple(table))
    moved = tuple(Load(PageId(page + 50), bytes(kept[page])) for page in table)
    copies = tuple((PageId(page + 50), PageId(page + 80)) for page in table)
    chained = tuple((PageId(page + 80), PageId(page + 110)) for page in table)
    await runner.run(Batch(load=NO_LOAD, loads=moved, copies=copies + chained))
    for name, first in (("loaded", 50), ("copied", 80), ("copied again", 110)):
        elsewhere = msgspec.structs.replace(hit, first_page=first)
        told[name] = (await generate(runner, [prompt], OUTPUTS, elsewhere))[0]
    return told


async def stale_facts(runner: TorchRunner, dtype: str) -> dict[str, Any]:
    """Return tokens and KV over pages that hold great numbers of whoever had them before."""
    value = 1e4 if dtype == "float16" else 1e30
    great = torch.full((runner.content_bytes,), value, dtype=getattr(torch, dtype))
    content = great.view(torch.uint8)[: runner.content_bytes].numpy().tobytes()
    loads = tuple(Load(PageId(page), content) for page in range(PAGES))
    await runner.run(Batch(load=NO_LOAD, loads=loads))
    manner = MANNERS["chunks of 100, together"]
    tokens = await generate(runner, PROMPTS, OUTPUTS, manner)
    return {"tokens": tokens, "kv": await content_digest(runner, manner)}


async def draw_facts(runner: TorchRunner, other: NumpyRunner) -> dict[str, Any]:
    """Return draws of one distribution, alone and in company, and the greatest logprob error."""
    draws = tuple(
        Draw(seed=7, index=3, sample=sample, temperature=1.0, top_logprobs=2) for sample in range(4)
    )
    table = tuple(map(PageId, range(3)))
    one = Slot(packed(PROMPTS[3]), 0, table, draws)
    beside = Slot(packed(PROMPTS[4][:100]), 0, tuple(map(PageId, range(10, 17))), GREEDY)
    alone = (await runner.run(Batch(load=NO_LOAD, slots=(one,)))).samples[0]
    company = (await runner.run(Batch(load=NO_LOAD, slots=(beside, one)))).samples[1]
    theirs = (await other.run(Batch(load=NO_LOAD, slots=(one,)))).samples[0]
    pairs = [(dict(ours.top), dict(their.top)) for ours, their in zip(alone, theirs, strict=True)]
    errors = [
        abs(ours[token] - their[token]) for ours, their in pairs for token in ours if token in their
    ]
    return {
        "alone": [sampled.token for sampled in alone],
        "company": [sampled.token for sampled in company],
        "logprobs are equal": alone == company,
        "logprob error": max(errors, default=None),
    }


async def loop_facts(runner: TorchRunner) -> dict[str, Any]:
    """Return how often the event loop came round during a step."""
    rounds, is_done = 0, False

    async def count() -> None:
        nonlocal rounds
        while not is_done:
            rounds += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count())
    slot = Slot(packed(PROMPTS[4][:500]), 0, tuple(map(PageId, range(44))), GREEDY)
    await runner.run(Batch(load=NO_LOAD, slots=(slot,)))
    is_done = True
    await counter
    return {"rounds": rounds}


async def refusals(runner: TorchRunner) -> list[str]:
    """Return what is said of impossible batches, and after closing."""
    wrong = (
        Batch(load=NO_LOAD, slots=(Slot(packed([512]), 0, (PageId(0),), GREEDY),)),
        Batch(load=NO_LOAD, copies=((PageId(0), PageId(PAGES)),)),
        Batch(load=NO_LOAD, loads=(Load(PageId(0), b"short"),)),
        Batch(load=NO_LOAD, saves=(Save(PageId(-1), memoryview(bytearray(1))),)),
    )
    told = []
    for batch in wrong:
        try:
            await runner.run(batch)
        except RunnerError as error:
            told.append(str(error))
    runner.close()
    try:
        await runner.read((PageId(0),))
    except RunnerError as error:
        told.append(str(error))
    return told


async def main(dtype: str, threads: int) -> dict[str, Any]:
    """Return all facts."""
    told: dict[str, Any] = {"manners": {}, "reference": {}, "content": {}}
    settings: dict[str, Any] = {**ROOM, "threads": threads, "dtype": dtype, "device": "cpu"}
    for name, config in CONFIGS.items():
        weights = random_weights(config, 1)
        runner = TorchRunner(config, weights, **settings)
        told["manners"][name] = await manner_facts(runner)
        reference = NumpyRunner(config, weights, **ROOM, threads=threads)
        told["reference"][name] = await generate(reference, PROMPTS, OUTPUTS, ALONE)
        told["content"][name] = [runner.page_bytes, runner.content_bytes]
        if config is LLAMA:
            told["draws"] = await draw_facts(runner, reference)
            told["cache"] = await cache_facts(runner)
            told["stale"] = await stale_facts(runner, dtype)
            told["loop"] = await loop_facts(runner)
            told["parameters"] = runner.kv_parameters
            told["refusals"] = await refusals(runner)
        runner.close()
        reference.close()
    weights, replayer = random_weights(LLAMA, 1), Replayer()
    replayed = TorchRunner(LLAMA, weights, **settings, recorder=replayer)
    told["replayed"] = await manner_facts(replayed)
    told["records"], told["replays"] = replayer.records, replayer.replays
    replayed.close()
    one_count: dict[str, Any] = {
        "common_counts": lambda *_: (16,),
        "proven_query_counts": lambda *_: (16,),
    }
    with patch.multiple(torch_runner, **one_count):
        fixed = TorchRunner(LLAMA, weights, **settings)
    told["fixed tiles"] = await manner_facts(fixed)
    fixed.close()
    return told


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    print(json.dumps(asyncio.run(main(sys.argv[1], int(sys.argv[2])))))  # noqa: T201
