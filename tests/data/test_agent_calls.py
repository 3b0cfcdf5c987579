"""402 recorded calls of a coding agent, through the openai SDK, the router and four workers.

The 20 sessions start in recorded order, eight at once: the calls of a session follow each other
without a pause, and a session keeps its place until its last call. Each call generates as many
tokens as the median recorded one. The working set is every distinct full page of all prompts and of
what is generated. One prompt is nearly a quarter of it, so a fleet whose pools together had a
quarter could not run it: each worker has a quarter of the working set.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import pytest

from prompt.codec import load_codec
from state.prefix import TOKEN_BYTES
from support.conversation import Answered, PerfectCache, ask, at_once, sdk
from support.data import data_file, json_lines
from support.fleet import FleetPlan, LocalFleet

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.data

MODEL = "tiny-chat"
WORKERS = 4
SESSIONS_AT_ONCE = 8
PAGE_TOKENS = 16
BLOCK_TOKENS = 64
OUTPUT_TOKENS = 128
SPEED_UP = 4.0


@dataclass(frozen=True, slots=True)
class Recording:
    """All prompts, by session, in recorded order; and what a perfect cache would make of them."""

    sessions: list[list[str]]
    working_set_pages: int
    longest_pages: int
    perfect_hit_ratio: float


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a replay."""

    answers: list[Answered]
    evicted_pages: int

    def hit_ratio(self) -> float:
        """Return the part of all prompt tokens that was cached."""
        cached = sum(answered.cached_tokens for answered in self.answers)
        return cached / sum(answered.prompt_tokens for answered in self.answers)


@pytest.fixture(scope="module")
def recording() -> Recording:
    codec = load_codec(data_file("tokenizers/tiny-chat"))
    cache = PerfectCache(PAGE_TOKENS)
    sessions: dict[str, list[str]] = {}
    recorded_tokens = []
    generated_pages = longest_pages = 0
    for row in json_lines("traces/miniswe_agent_calls.jsonl.zst"):
        prompt = codec.chat_tokens([{"role": "user", "content": row["input"]}], None, options={})
        cache.add(prompt)
        prompt_tokens = len(prompt) // TOKEN_BYTES
        recorded_tokens.append(len(codec.text_tokens(row["output"])) // TOKEN_BYTES)
        pages = (prompt_tokens + OUTPUT_TOKENS) // PAGE_TOKENS
        generated_pages += pages - prompt_tokens // PAGE_TOKENS
        longest_pages = max(longest_pages, pages + 1)
        sessions.setdefault(row["session_id"], []).append(row["input"])
    assert abs(median(recorded_tokens) - OUTPUT_TOKENS) <= 1
    return Recording(
        sessions=list(sessions.values()),
        working_set_pages=len(cache.pages) + generated_pages,
        longest_pages=longest_pages,
        perfect_hit_ratio=cache.cached_tokens / cache.prompt_tokens,
    )


async def replay(recording: Recording, pages: int, directory: Path) -> Replayed:
    """Replay the recording on workers of ``pages``; what they evicted is counted from below."""
    tokenizer = shutil.copytree(data_file("tokenizers/tiny-chat"), directory / MODEL)
    plan = FleetPlan(
        replicas=WORKERS,
        model=MODEL,
        tokenizer=tokenizer,
        pages=pages,
        preset="llama-8b-h100",
        speed_up=SPEED_UP,
        config={"receipts": True},
    )
    stored_pages: Counter[str] = Counter()
    async with LocalFleet(directory, plan) as fleet, sdk(fleet.router.url) as client:

        async def session(prompts: list[str]) -> list[Answered]:
            answers = []
            for prompt in prompts:
                turns = [("user", prompt)]
                answered = await ask(client, MODEL, turns, OUTPUT_TOKENS, ignore_eos=True)
                kept_tokens = answered.prompt_tokens + OUTPUT_TOKENS - 1
                stored_pages[answered.replica] += kept_tokens // PAGE_TOKENS
                stored_pages[answered.replica] -= answered.cached_tokens // PAGE_TOKENS
                answers.append(answered)
            return answers

        answers = await at_once(recording.sessions, SESSIONS_AT_ONCE, session)
        await fleet.settled()
    return Replayed(
        answers=[answered for each in answers for answered in each],
        evicted_pages=sum(max(0, stored - pages) for stored in stored_pages.values()),
    )


def misses(answers: list[Answered]) -> str:
    """Return the predictions that were off by more than a block, as text."""
    lines = [
        f"{each.request_id} on {each.replica} ({each.reason}): predicted {each.predicted_tokens}, "
        f"reported {each.cached_tokens} of {each.prompt_tokens}"
        for each in answers
        if abs(each.error_tokens) > BLOCK_TOKENS
    ]
    spread = Counter(each.error_tokens // BLOCK_TOKENS for each in answers)
    return "\n".join([*lines, f"errors in blocks: {sorted(spread.items())}"])


async def test_predictions_hold_while_the_pools_overflow(
    recording: Recording, tmp_path: Path
) -> None:
    """At least 99 % of the predictions are within one block of what the worker reports."""
    pages = recording.working_set_pages // 4
    assert recording.longest_pages < pages
    replayed = await replay(recording, pages, tmp_path)
    answers = replayed.answers
    assert len(answers) == 402
    assert replayed.evicted_pages > 0
    exact = sum(abs(each.error_tokens) <= BLOCK_TOKENS for each in answers)
    assert exact >= 0.99 * len(answers), misses(answers)


async def test_with_ample_pools_nearly_everything_is_reused(
    recording: Recording, tmp_path: Path
) -> None:
    """At least 90 % of what one endless cache would save, over four separate ones."""
    replayed = await replay(recording, 2 * recording.working_set_pages, tmp_path)
    assert replayed.evicted_pages == 0
    assert replayed.hit_ratio() >= 0.9 * recording.perfect_hit_ratio, misses(replayed.answers)
    exact = sum(abs(each.error_tokens) <= BLOCK_TOKENS for each in replayed.answers)
    assert exact >= 0.99 * len(replayed.answers), misses(replayed.answers)
