"""402 recorded calls of a coding agent, through the openai SDK, the router and four workers."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from prompt.codec import load_codec
from support.conversation import Answered, PerfectCache, ask, at_once, sdk
from support.data import data_file, json_lines
from support.fleet import LocalFleet, FleetPlan
from state.prefix import TOKEN_BYTES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.data

WORKERS = 4
SESSIONS_AT_ONCE = 8
PAGE_TOKENS = 16
BLOCK_TOKENS = 64
MODEL = "tiny-chat"


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded call; as many tokens are generated as were then."""

    prompt: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Recording:
    """All calls, by session, in recorded order; and what they need."""

    sessions: list[list[Call]]
    working_set_pages: int
    perfect_hit_ratio: float
    longest_pages: int


@pytest.fixture(scope="module")
def recording() -> Recording:
    codec = load_codec(data_file("tokenizers/tiny-chat"))
    sessions: dict[str, list[Call]] = {}
    cache = PerfectCache(PAGE_TOKENS)
    longest_pages = generated_pages = 0
    for row in json_lines("traces/miniswe_agent_calls.jsonl.zst"):
        prompt = codec.chat_tokens([{"role": "user", "content": row["input"]}], None, options={})
        cache.add(prompt)
        prompt_tokens = len(prompt) // TOKEN_BYTES
        output_tokens = max(1, len(codec.text_tokens(row["output"])) // TOKEN_BYTES)
        total_pages = (prompt_tokens + output_tokens) // PAGE_TOKENS
        generated_pages += total_pages - prompt_tokens // PAGE_TOKENS
        longest_pages = max(longest_pages, total_pages + 1)
        sessions.setdefault(row["session_id"], []).append(Call(row["input"], output_tokens))
    return Recording(
        sessions=list(sessions.values()),
        working_set_pages=len(cache.pages) + generated_pages,
        perfect_hit_ratio=cache.cached_tokens / cache.prompt_tokens,
        longest_pages=longest_pages,
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / MODEL
    shutil.copytree(data_file("tokenizers/tiny-chat"), folder)
    return folder
