"""``vllm bench serve`` completes against the bundled worker: real arithmetic and the clock."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from sidecar.setting import WorkerSettings
from support.vllm import MODEL
from support.vllm_bench import OUTPUT_TOKENS, PROMPTS, bench
from support.vllm_stand import MARKS
from support.worker import metrics_of, running_worker

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = MARKS


def _with_option(vllm: Path, folder: Path, *options: str) -> Path:
    """Return an executable that is ``vllm`` with ``options`` at the end of its command line."""
    script = folder / "vllm"
    script.write_text(f'#!/bin/sh\nexec "{vllm}" "$@" {" ".join(options)}\n')
    script.chmod(0o700)
    return script


@pytest.mark.parametrize("compute", ["numpy", "synthetic"])
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
async def test_the_bench_client_completes_with_no_error(
    vllm: Path, model: Path, tmp_path: Path, backend: str, compute: str
) -> None:
    settings = WorkerSettings(
        compute="numpy" if compute == "numpy" else "synthetic",
        model=str(model),
        tokenizer=str(model),
        served_model_name=MODEL,
        preset="instant",
        pages=2048,
        threads=1,
    )
    with running_worker(settings) as worker:
        benched = await bench(vllm, model, worker.url, backend, tmp_path / "result.json")
        metrics = await asyncio.to_thread(metrics_of, worker)
    assert (benched.completed, benched.failed) == (PROMPTS, 0), benched.errors
    assert not any(benched.errors)
    assert benched.output_lens == [OUTPUT_TOKENS] * PROMPTS
    assert benched.total_output_tokens == OUTPUT_TOKENS * PROMPTS
    assert any(benched.generated_texts)
    assert metrics["generation_tokens_total"] >= OUTPUT_TOKENS * PROMPTS
    assert metrics["prefix_cache_hits_total"] > 0
    assert (metrics["num_requests_running"], metrics["kv_cache_usage_perc"]) == (0, 0)


async def test_the_bench_client_may_ask_for_logprobs(
    vllm: Path, model: Path, tmp_path: Path
) -> None:
    settings = WorkerSettings(model=str(model), served_model_name=MODEL, pages=2048, threads=1)
    asking = _with_option(vllm, tmp_path, "--logprobs", "3")
    with running_worker(settings) as worker:
        benched = await bench(asking, model, worker.url, "openai", tmp_path / "result.json")
    assert (benched.completed, benched.failed) == (PROMPTS, 0), benched.errors
    assert benched.output_lens == [OUTPUT_TOKENS] * PROMPTS
