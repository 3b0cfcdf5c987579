"""A live replay as a person runs it: a router, a bundled worker behind it, a small trace."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from prompt.codec import load_codec
from support.fleet import FleetPlan, LocalFleet, until
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]
BLOCK_TOKENS = 512
SHRINK = 16
SESSIONS = 6
TURNS = 4
GAP_MS = 50


def write_trace(path: Path, gap_ms: int = GAP_MS) -> list[dict[str, Any]]:
    """Write sessions that share a system prompt, turn after turn, and return the lines.

    Every prompt ends with 200 tokens that fill no block.
    """
    lines: list[dict[str, Any]] = []
    for turn in range(TURNS):
        for session in range(SESSIONS):
            own = range(100 * (session + 1), 100 * (session + 1) + 2 * turn + 1)
            ids = [0, 1, *own]
            lines.append(
                {
                    "timestamp": gap_ms * len(lines),
                    "input_length": BLOCK_TOKENS * len(ids) + 200,
                    "output_length": 5 * SHRINK,
                    # The last id is of the part block, as Mooncake has it.
                    "hash_ids": [*ids, 10_000 + len(lines)],
                }
            )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def allowed_tokens(lines: list[dict[str, Any]]) -> list[int]:
    """Return the tokens of each prompt that one cache without end has, in shrunken blocks."""
    seen: set[int] = set()
    allowed = []
    for line in lines:
        whole = line["hash_ids"][:-1]
        held = sum(1 for _ in takewhile(seen.__contains__, whole))
        allowed.append(held * BLOCK_TOKENS // SHRINK)
        seen.update(whole)
    return allowed


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="fleet")
async def one_replica(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    plan = FleetPlan(
        replicas=1, tokenizer=write_tokenizer(folder / "tokenizer"), config={"receipts": True}
    )
    async with LocalFleet(folder, plan) as running:
        yield running


async def replay(*words: str, interrupt_when: Path | None = None) -> tuple[int, str, str]:
    """Run the command; a SIGINT comes once the journal ``interrupt_when`` has three outcomes."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "warmroute", "replay", *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        if interrupt_when is not None:
            path = interrupt_when

            async def has_begun() -> bool:
                return path.exists() and path.read_bytes().count(b"\n") > 3

            await until(has_begun, "outcomes in the journal", 30.0)
            process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            out, err = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def target_words(fleet: LocalFleet, trace: Path) -> list[str]:
    assert fleet.plan.tokenizer is not None
    size = load_codec(fleet.plan.tokenizer).vocabulary_size
    words = [str(trace), "--target", fleet.router.url, "--shrink", str(SHRINK)]
    return [*words, "--vocab-size", str(size)]


async def emptied(fleet: LocalFleet) -> None:
    async with fleet.http.post(f"{fleet.replicas[0].url}/reset_prefix_cache") as answer:
        assert answer.status == 200

    async def is_known() -> bool:
        return not (await fleet.seen())["w0"]["resident_blocks"]

    await until(is_known, "an empty cache")


def outcomes_of(journal: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    return sorted((record["outcome"] for record in records), key=lambda one: one["ordinal"])


async def test_the_hits_of_one_large_cache_are_those_that_the_trace_allows(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    await emptied(fleet)
    trace, journal = tmp_path / "t.jsonl", tmp_path / "journal"
    lines = write_trace(trace)
    words = [*target_words(fleet, trace), "--journal", str(journal), "--json", "-"]
    status, out, err = await replay(*words)
    assert status == 0, err
    assert err == ""
    outcomes = outcomes_of(journal)
    allowed = allowed_tokens(lines)
    assert [one["error"] for one in outcomes] == [None] * len(lines)
    assert [one["cached_tokens"] for one in outcomes] == allowed
    assert [one["prompt_tokens"] for one in outcomes] == [
        32 * (len(line["hash_ids"]) - 1) + 12 for line in lines
    ]
    assert {one["output_tokens"] for one in outcomes} == {5}
    assert {one["replica"] for one in outcomes} == {"w0"}
    told = json.loads(out)
    score = told["runs"][0]["score"]
    assert score["requests"] == len(lines)
    assert score["cached_tokens"] == sum(allowed)
    assert score["replicas"][0]["replica"] == "w0"
    assert told["live"]["resumed_requests"] == 0
    sent_s = [one["arrival_s"] for one in outcomes]
    assert sent_s[-1] == pytest.approx(GAP_MS * (len(lines) - 1) / 1_000, abs=0.5)
    assert sent_s == sorted(sent_s)


async def test_an_interrupted_replay_goes_on_where_it_was(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    await emptied(fleet)
    trace, journal = tmp_path / "t.jsonl", tmp_path / "journal"
    lines = write_trace(trace, 200)
    words = [*target_words(fleet, trace), "--journal", str(journal)]
    status, out, err = await replay(*words, interrupt_when=journal)
    assert status == 130, err
    assert out == ""
    assert f"of {len(lines)} requests; go on with --resume" in err
    before = outcomes_of(journal)
    assert 3 <= len(before) < len(lines)

    status, _, err = await replay(*words)
    assert status == 2
    assert "--journal" in err
    assert "--resume" in err
    status, _, err = await replay(*words, "--resume", "--seed", "2")
    assert status == 2
    assert "it is of another replay: seed was 0, is 2" in err
    status, _, err = await replay(*words, "--resume", "--limit", "5")
    assert status == 2
    assert "it is of another replay: requests was" in err
    assert outcomes_of(journal) == before

    status, out, err = await replay(*words, "--resume", "--json", "-")
    assert status == 0, err
    outcomes = outcomes_of(journal)
    assert [one["ordinal"] for one in outcomes] == list(range(len(lines)))
    assert [one["cached_tokens"] for one in outcomes] == allowed_tokens(lines)
    told = json.loads(out)
    assert told["live"]["resumed_requests"] == len(before)
    assert told["runs"][0]["score"]["requests"] == len(lines)

    # Whatever is done already is not sent again.
    status, out, err = await replay(*words, "--resume", "--json", "-")
    assert status == 0, err
    assert outcomes_of(journal) == outcomes
    assert json.loads(out)["live"]["resumed_requests"] == len(lines)


async def test_text_and_chats_share_what_the_trace_shares_up_to_a_page(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    """The bundled template puts tokens before and after, so that pages lie otherwise in a chat."""
    trace = tmp_path / "t.jsonl"
    lines = write_trace(trace, 20)
    for endpoint in ("completions", "chat"):
        await emptied(fleet)
        journal = tmp_path / endpoint
        words = [*target_words(fleet, trace), "--text", "--endpoint", endpoint]
        status, out, err = await replay(*words, "--journal", str(journal))
        assert status == 0, err
        assert "Side by side" not in out
        outcomes = outcomes_of(journal)
        assert [one["error"] for one in outcomes] == [None] * len(lines)
        ratio = sum(one["cached_tokens"] for one in outcomes) / sum(
            one["prompt_tokens"] for one in outcomes
        )
        allowed = sum(allowed_tokens(lines)) / sum(
            32 * (len(line["hash_ids"]) - 1) + 12 for line in lines
        )
        assert ratio == pytest.approx(allowed, abs=0.08)


async def test_one_at_a_time_says_how_late_the_others_were(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    trace = tmp_path / "t.jsonl"
    write_trace(trace, 0)
    words = [*target_words(fleet, trace), "--concurrency", "1", "--json", str(tmp_path / "j")]
    status, out, err = await replay(*words, "--html", str(tmp_path / "page.html"))
    assert status == 0, err
    assert "Sent late, by more than 10 ms: " in out
    live = json.loads((tmp_path / "j").read_text())["live"]
    assert live["late_requests"] > 0
    assert live["max_s"] >= live["p99_s"] > 0.01
    assert "<html" in (tmp_path / "page.html").read_text()


async def test_a_replay_without_any_answer_fails_and_says_why(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    trace = tmp_path / "t.jsonl"
    write_trace(trace, 0)
    words = [*target_words(fleet, trace), "--model", "another", "--limit", "2"]
    status, _, err = await replay(*words)
    assert status == 1
    assert "no answer was whole: status 404" in err


async def test_a_target_that_is_not_there_is_named(tmp_path: Path) -> None:
    trace, journal = tmp_path / "t.jsonl", tmp_path / "journal"
    write_trace(trace)
    words = [str(trace), "--target", "http://127.0.0.1:1", "--journal", str(journal)]
    status, _, err = await replay(*words)
    assert status == 1
    assert "warmroute replay: http://127.0.0.1:1 does not answer" in err
    assert not journal.exists()
