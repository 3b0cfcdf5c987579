"""``vllm bench serve`` gets from the router what it gets from an engine directly."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from support.vllm_bench import BACKENDS, OUTPUT_TOKENS, PROMPTS, bench
from support.vllm_stand import MARKS

if TYPE_CHECKING:
    from pathlib import Path

    from support.vllm_stand import Stand

pytestmark = MARKS

DECISIONS = 1_000


@pytest.mark.parametrize("backend", BACKENDS)
async def test_the_bench_client_completes_with_the_same_texts(
    stand: Stand, vllm: Path, tmp_path: Path, backend: str
) -> None:
    began_s = time.time()
    urls = [stand.fleet.router.url, stand.engines.engines[0].url]
    through_router, direct = await asyncio.gather(
        *(
            bench(vllm, stand.model, url, backend, tmp_path / f"{index}.json")
            for index, url in enumerate(urls)
        )
    )
    for benched in (through_router, direct):
        assert (benched.completed, benched.failed) == (PROMPTS, 0), benched.errors
        assert benched.output_lens == [OUTPUT_TOKENS] * PROMPTS
        assert benched.total_output_tokens == OUTPUT_TOKENS * PROMPTS
        assert all(benched.generated_texts)
    assert len(set(direct.generated_texts)) > PROMPTS / 2
    assert through_router.generated_texts == direct.generated_texts
    assert through_router == direct
    records = await stand.fleet.decisions(DECISIONS)
    later = [record for record in records if record["started_unix_s"] > began_s]
    asked = [record for record in later if record["path"] == BACKENDS[backend]]
    assert len(asked) >= PROMPTS
    assert all(record["outcome"] == "done" for record in asked)
    assert all(record["reported_prompt_tokens"] == record["prompt_tokens"] for record in asked)
    used = Counter(record["attempts"][-1]["decision"]["replica"] for record in asked)
    assert set(used) == {engine.name for engine in stand.engines.engines}, used
