"""Pages of real workers through host memory and disk and back: hits, bytes, the same tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest

from sidecar.profile import SidecarSettings
from state.model import ReplicaId
from state.prefix import chain_of, chain_root, pack_tokens
from support.sidecar import REPLICA, Fleet, eventually, sidecar
from support.tiered import (
    PAGE_TOKENS,
    Answer,
    complete,
    prompt_of,
    settings_of,
    tiers_of,
    until_on_disk,
    written_down,
)
from support.worker import RunningWorker, metrics_of, post_json, running_worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGES: Final = 24
"""Room for less than three prompts of ``PROMPTS``."""
PROMPTS: Final = [prompt_of(seed) for seed in range(8)]
REUSABLE: Final = 112
"""Tokens of a prompt that can be reused: all full pages before its last token."""
PAGE_BYTES: Final = 49_152


@pytest.fixture(scope="module")
def plain() -> Iterator[list[list[int]]]:
    """Return what a worker without tiers, and with room for everything, answers."""
    with running_worker(settings_of(pages=512)) as worker:
        cold = [complete(worker, prompt) for prompt in PROMPTS]
        warm = [complete(worker, prompt) for prompt in PROMPTS]
        assert [answer.cached_tokens for answer in cold] == [0] * len(PROMPTS)
        assert [answer.cached_tokens for answer in warm] == [REUSABLE] * len(PROMPTS)
        assert said(cold) == said(warm)
        yield said(cold)


def said(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def hit_tokens(tiers: dict[str, dict[str, Any]]) -> int:
    return sum(int(tier["hit_pages"]) for tier in tiers.values()) * PAGE_TOKENS


def in_rounds(worker: RunningWorker, rounds: int = 2) -> list[list[Answer]]:
    return [[complete(worker, prompt) for prompt in PROMPTS] for _ in range(rounds)]


def test_a_pool_alone_forgets_what_does_not_fit_it(plain: list[list[int]]) -> None:
    with running_worker(settings_of(pages=PAGES)) as worker:
        _, second = in_rounds(worker)
        assert [answer.cached_tokens for answer in second] == [0] * len(PROMPTS)
        assert said(second) == plain


def test_pages_come_back_from_host_memory(plain: list[list[int]]) -> None:
    with running_worker(settings_of(pages=PAGES, host_mib=4, fetch="always")) as worker:
        first, *rest = in_rounds(worker, 3)
        assert [answer.cached_tokens for answer in first] == [0] * len(PROMPTS)
        for answers in rest:
            assert [answer.cached_tokens for answer in answers] == [REUSABLE] * len(PROMPTS)
            assert said(answers) == plain
        tiers = tiers_of(worker)
        metrics = metrics_of(worker)
    host = tiers["host"]
    assert hit_tokens(tiers) == metrics["prefix_cache_hits_total"] == 2 * 8 * REUSABLE
    assert host["page_bytes"] == PAGE_BYTES
    assert host["moved_out_bytes"] == host["hit_pages"] * PAGE_BYTES
    # Every page was given up by the device at least once, and the host has room for all of them.
    assert host["moved_in_bytes"] == 8 * 8 * PAGE_BYTES
    assert host["dropped"] == 0
    assert 0 < host["spent_ms"] < host["saved_ms"]


def test_pages_come_back_from_disk(plain: list[list[int]], tmp_path: Path) -> None:
    settings = settings_of(
        pages=PAGES, host_mib=1, disk_dir=str(tmp_path / "kv"), disk_mib=8, fetch="always"
    )
    with running_worker(settings) as worker:
        for turn in range(3):
            answers = []
            for number, prompt in enumerate(PROMPTS, start=1 + 8 * turn):
                answers.append(complete(worker, prompt))
                # All but the last page of the pool, which is the answer's, have prompts in them.
                until_on_disk(worker, min(8 * 8, 8 * number - (PAGES - 1)))
            assert said(answers) == plain
        assert [answer.cached_tokens for answer in answers] == [REUSABLE] * len(PROMPTS)
        tiers = tiers_of(worker)
        metrics = metrics_of(worker)
    disk, host = tiers["disk"], tiers["host"]
    assert hit_tokens(tiers) == metrics["prefix_cache_hits_total"] == 2 * 8 * REUSABLE
    assert disk["hit_pages"] > 0
    for tier in (disk, host):
        assert tier["moved_out_bytes"] == tier["hit_pages"] * PAGE_BYTES
    # A page is written once, however often the host gives it up.
    assert disk["moved_in_bytes"] == 8 * 8 * PAGE_BYTES
    assert disk["dropped"] == 0
    assert disk["hits"] <= 16
    assert disk["spent_ms"] > 0
    assert disk["saved_ms"] > 0


def _filled(settings: Any) -> None:
    """Run a worker until its disk has the pages of all prompts but the last ones."""
    with running_worker(settings) as worker:
        for prompt in PROMPTS:
            complete(worker, prompt)
            written_down(worker)


def test_a_restarted_worker_reuses_its_files(plain: list[list[int]], tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    settings = settings_of(
        pages=PAGES, host_mib=4, disk_dir=str(directory), disk_mib=8, fetch="always"
    )
    _filled(settings)
    files = len([path for path in directory.rglob("*") if path.is_file()]) - 1
    assert files >= 8 * 8 - PAGES
    with running_worker(settings) as worker:
        assert tiers_of(worker)["disk"]["states"]["evictable"] == files
        answers = [complete(worker, prompt) for prompt in PROMPTS]
        tiers = tiers_of(worker)
    assert said(answers) == plain
    assert [answer.cached_tokens for answer in answers][:5] == [REUSABLE] * 5
    assert tiers["disk"]["hit_pages"] * PAGE_TOKENS == sum(each.cached_tokens for each in answers)


def test_pages_that_make_room_for_a_fetch_are_kept(plain: list[list[int]], tmp_path: Path) -> None:
    """While a prompt waits for its pages from disk no step runs that could copy others down."""
    settings = settings_of(
        pages=PAGES, host_mib=1, disk_dir=str(tmp_path / "kv"), disk_mib=8, fetch="always"
    )
    _filled(settings)
    with running_worker(settings) as worker:
        for number in (5, 6, 7, 0, 5):
            answer = complete(worker, PROMPTS[number])
            assert answer.token_ids == plain[number]
        assert answer.cached_tokens == REUSABLE
        assert tiers_of(worker)["host"]["hit_pages"] > 0


def test_pages_of_other_weights_are_not_reused(tmp_path: Path) -> None:
    settings = settings_of(
        pages=PAGES, host_mib=4, disk_dir=str(tmp_path / "kv"), disk_mib=8, fetch="always"
    )
    _filled(settings)
    with running_worker(msgspec.structs.replace(settings, seed=1)) as worker:
        assert [complete(worker, prompt).cached_tokens for prompt in PROMPTS] == [0] * 8


def test_a_damaged_file_is_a_miss(plain: list[list[int]], tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    settings = settings_of(
        pages=PAGES, host_mib=4, disk_dir=str(directory), disk_mib=8, fetch="always"
    )
    _filled(settings)
    for path in directory.glob("*/*/*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with running_worker(settings) as worker:
        answers = [complete(worker, prompt) for prompt in PROMPTS]
        assert said(answers) == plain
        assert [answer.cached_tokens for answer in answers] == [0] * len(PROMPTS)
        assert tiers_of(worker)["disk"]["hits"] == 0


def test_one_damaged_page_costs_what_follows_it(plain: list[list[int]], tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    settings = settings_of(
        pages=PAGES, host_mib=4, disk_dir=str(directory), disk_mib=8, fetch="always"
    )
    _filled(settings)
    files = directory.glob("*/*/*")
    oldest = sorted(files, key=lambda path: path.stat().st_mtime_ns)
    # A prompt's pages leave the device last page first: its fifth page is the fourth to be written.
    oldest[3].write_bytes(b"torn")
    with running_worker(settings) as worker:
        answer = complete(worker, PROMPTS[0])
    assert answer == Answer(plain[0], 4 * PAGE_TOKENS)


def test_fetch_never_computes_all_again(plain: list[list[int]]) -> None:
    with running_worker(settings_of(pages=PAGES, host_mib=4, fetch="never")) as worker:
        _, second = in_rounds(worker)
        assert said(second) == plain
        assert [answer.cached_tokens for answer in second] == [0] * len(PROMPTS)
        assert tiers_of(worker)["host"]["hit_pages"] == 0


def test_demote_reused_keeps_what_is_used_once_out_of_the_host(plain: list[list[int]]) -> None:
    with running_worker(
        settings_of(pages=PAGES, host_mib=4, fetch="always", demote="reused")
    ) as worker:
        answers = []
        for number, prompt in enumerate(PROMPTS):
            answers.append(complete(worker, prompt))
            if number == 0:
                assert complete(worker, prompt).cached_tokens == REUSABLE
        assert said(answers) == plain
        assert tiers_of(worker)["host"]["moved_in_bytes"] == 7 * PAGE_BYTES
        assert complete(worker, PROMPTS[0]) == Answer(plain[0], REUSABLE)


def test_the_measured_figures_decide_and_change_no_token(plain: list[list[int]]) -> None:
    """Prefill is dearer than a copy of its pages by far, also before anything was measured."""
    with running_worker(settings_of(pages=PAGES, host_mib=4)) as worker:
        _, second = in_rounds(worker)
        assert said(second) == plain
        assert [answer.cached_tokens for answer in second] == [REUSABLE] * len(PROMPTS)


def test_preempted_requests_come_back_from_the_host_with_the_same_tokens() -> None:
    """Four answers of 60 tokens do not fit 24 pages: what is preempted goes down and up again."""
    prompts = [prompt_of(seed, 64) for seed in range(100, 104)]
    with running_worker(settings_of(pages=512)) as worker:
        expected = [complete(worker, prompt, max_tokens=60).token_ids for prompt in prompts]
    with running_worker(settings_of(pages=PAGES, host_mib=4, fetch="always")) as worker:
        with ThreadPoolExecutor(4) as threads:
            answers = list(
                threads.map(lambda prompt: complete(worker, prompt, max_tokens=60), prompts)
            )
        assert said(answers) == expected
        metrics, tiers = metrics_of(worker), tiers_of(worker)
        assert metrics["num_preemptions_total"] > 0
        assert tiers["device"]["states"]["used"] == tiers["device"]["states"]["reserved"] == 0
        assert tiers["host"]["states"]["used"] == tiers["host"]["states"]["reserved"] == 0


def test_a_reset_empties_all_tiers(plain: list[list[int]]) -> None:
    with running_worker(settings_of(pages=PAGES, host_mib=4, fetch="always")) as worker:
        in_rounds(worker, 1)
        assert post_json(worker, "/reset_prefix_cache", {})[0] == 200
        assert tiers_of(worker)["host"]["states"]["evictable"] == 0
        (answers,) = in_rounds(worker, 1)
        assert said(answers) == plain
        assert [answer.cached_tokens for answer in answers] == [0] * len(PROMPTS)


class TestEvents:
    async def test_a_sidecar_knows_what_is_in_which_tier(self, tmp_path: Path) -> None:
        fleet = Fleet()
        settings = settings_of(
            pages=PAGES, host_mib=1, disk_dir=str(tmp_path / "kv"), disk_mib=8, fetch="always"
        )
        with running_worker(settings) as worker:
            agent = SidecarSettings(
                engine=worker.url, replica=REPLICA, block_tokens=16, drain_grace_s=0.0
            )
            async with sidecar(agent, fleet):
                await eventually(fleet.is_registered)
                for prompt in PROMPTS:
                    complete(worker, prompt)
                    written_down(worker)
                # Of 64 pages the device has the last 24 and the host those before: 21 of them.
                await eventually(lambda: overlaps(fleet, PROMPTS[-1]) == (8, 8))
                await eventually(lambda: overlaps(fleet, PROMPTS[0]) == (0, 8))
                assert post_json(worker, "/reset_prefix_cache", {})[0] == 200
                await eventually(lambda: overlaps(fleet, PROMPTS[0]) == (0, 0))

    async def test_what_host_memory_gives_up_is_told(self) -> None:
        fleet = Fleet()
        with running_worker(settings_of(pages=PAGES, host_mib=1, fetch="always")) as worker:
            agent = SidecarSettings(
                engine=worker.url, replica=REPLICA, block_tokens=16, drain_grace_s=0.0
            )
            async with sidecar(agent, fleet):
                await eventually(fleet.is_registered)
                for prompt in PROMPTS[:4]:
                    complete(worker, prompt)
                await eventually(lambda: overlaps(fleet, PROMPTS[0]) == (0, 8))
                for prompt in PROMPTS[4:]:
                    complete(worker, prompt)
                await eventually(lambda: overlaps(fleet, PROMPTS[0]) == (0, 0))


def overlaps(fleet: Fleet, prompt: list[int]) -> tuple[int, int]:
    """Return the leading pages of ``prompt`` on the device, and in any tier."""
    state = fleet.replica()
    assert state is not None
    chain = chain_of(chain_root(state.record.identity, 0), pack_tokens(prompt), PAGE_TOKENS, 0)
    found = fleet.reader.overlap(chain).get(ReplicaId(REPLICA))
    return (0, 0) if found is None else (found.gpu_blocks, found.any_tier_blocks)
