"""The loop of the worker's engine: whatever goes wrong and whenever, no page is lost."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.audit import AuditFault
from sidecar.generation import EngineHaltedError
from sidecar.peer import LocalPages
from sidecar.pool import PoolError
from sidecar.scheduler import NeverFitsError
from support.engine_rig import Asked, EngineRig, greedy

if TYPE_CHECKING:
    from pathlib import Path

    from sidecar.table import BlockTable

ONE = list(range(100, 113))
TWO = list(range(200, 209))


class BrokenStepError(Exception):
    """What a runner may raise."""


async def _turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def _step_breaker(*broken: int) -> object:
    def before_step(number: int) -> None:
        if number in broken:
            raise BrokenStepError

    return before_step


async def test_a_request_that_left_before_the_engine_woke_up_does_not_stop_it(
    tmp_path: Path,
) -> None:
    """A19: submitted and aborted in one turn of the event loop; the next request is answered."""
    rig = EngineRig(tmp_path)
    async with rig.running():
        await asyncio.sleep(0)
        left = rig.ask(ONE)
        assert left.ticket is not None
        rig.engine.abort(left.ticket)
        await asyncio.sleep(0)
        assert (await rig.answer(TWO, 2)).tokens == greedy(TWO, 2)
        assert left.deltas == []
    assert rig.proven().ended_requests == {"cancelled": 1, "done": 1}


@pytest.mark.parametrize("step", range(1, 8))
async def test_a_request_cancelled_at_any_step_leaves_nothing_and_harms_nobody(
    tmp_path: Path, step: int
) -> None:
    """Chunks, forks and decode are under way; the cancel comes in the middle of a step."""
    rig = EngineRig(tmp_path, pages=16, host_slots=4, max_step_tokens=6)
    victims: list[Asked] = []

    def before_step(number: int) -> None:
        if number == step:
            for victim in victims:
                assert victim.ticket is not None
                rig.engine.abort(victim.ticket)
                rig.engine.abort(victim.ticket)

    rig.runner.before_step = before_step
    async with rig.running():
        victims.append(rig.ask(ONE, 5))
        stays = rig.ask(ONE, 5, parent=victims[0], sample=1)
        other = rig.ask(TWO, 6)
        await stays.ended.wait()
        await other.ended.wait()
        await _turns()
        assert rig.runner.steps >= step
        assert not victims[0].ended.is_set()
        assert other.tokens == greedy(TWO, 6)
        assert len(stays.tokens) == 5
        again = await rig.answer(ONE, 5, sample=1)
        assert again.tokens == stays.tokens
    rig.proven()


@pytest.mark.parametrize("step", range(1, 12))
async def test_a_step_that_raises_ends_only_its_requests_and_nothing_it_wrote_is_believed(
    tmp_path: Path, step: int
) -> None:
    rig = EngineRig(tmp_path, pages=8, host_slots=3, max_step_tokens=6, max_sequences=2)
    rig.runner.before_step = _step_breaker(step)  # type: ignore[assignment]
    async with rig.running():
        asked = [rig.ask(prompt, 4) for prompt in (ONE, TWO, ONE, TWO)]
        for each in asked:
            await each.ended.wait()
        assert {each.halted for each in asked} == {None, "failed"}
        assert sum(each.halted == "failed" for each in asked) <= 2
        for each, prompt in zip(asked, (ONE, TWO, ONE, TWO), strict=True):
            wanted = greedy(prompt, 4)
            assert each.tokens == (wanted[: len(each.tokens)] if each.halted else wanted)
        for prompt in (ONE, TWO):
            assert (await rig.answer(prompt, 4)).tokens == greedy(prompt, 4)
    ended = rig.proven().ended_requests
    assert ended["failed"] == sum(each.halted == "failed" for each in asked)


async def test_three_failures_in_a_row_halt_the_engine_and_a_good_step_between_forgives(
    tmp_path: Path,
) -> None:
    rig = EngineRig(tmp_path)
    rig.runner.before_step = _step_breaker(1, 2, 4, 5, 6)  # type: ignore[assignment]
    async with rig.running():
        for halted in ("failed", "failed", None, "failed", "failed"):
            assert (await rig.answer(ONE, 1)).halted == halted
            assert not rig.engine.is_halted
        last = rig.ask(ONE, 1)
        bystander = rig.ask(TWO, 1)
        await last.ended.wait()
        await bystander.ended.wait()
        assert (last.halted, bystander.halted) == ("failed", "failed")
        assert rig.engine.is_halted
        with pytest.raises(EngineHaltedError):
            rig.ask(ONE, 1)
    rig.proven()


async def test_a_request_that_takes_too_long_is_timed_out_and_the_others_are_not(
    tmp_path: Path,
) -> None:
    rig = EngineRig(tmp_path, request_timeout_s=0.05)
    rig.runner.gate = asyncio.Event()
    async with rig.running():
        slow = [rig.ask(ONE, 4), rig.ask(ONE, 4), rig.ask(TWO, 4)]
        for each in slow:
            await each.ended.wait()
        assert [each.halted for each in slow] == ["timed_out"] * 3
        assert rig.cache.pool.held_pages == 0
        rig.runner.gate.set()
        assert (await rig.answer(ONE, 4)).tokens == greedy(ONE, 4)
    assert rig.proven().ended_requests == {"done": 1, "timed_out": 3}


async def test_a_finished_request_is_not_timed_out_later(tmp_path: Path) -> None:
    rig = EngineRig(tmp_path, request_timeout_s=0.01)
    async with rig.running():
        asked = rig.ask(TWO, 1)
        await asked.ended.wait()
        assert asked.ticket is not None
        assert asked.ticket.timer is not None
        assert asked.ticket.timer.cancelled()
        assert asked.halted is None
    rig.proven()


async def test_halting_in_the_middle_of_streams_ends_each_with_an_event(tmp_path: Path) -> None:
    rig = EngineRig(tmp_path, pages=16, host_slots=4, max_sequences=2)
    rig.runner.before_step = lambda number: rig.engine.halt() if number == 3 else None
    async with rig.running():
        asked = [rig.ask(ONE, 8), rig.ask(TWO, 8), rig.ask(ONE, 8)]
        for each in asked:
            await each.ended.wait()
        assert [each.halted for each in asked] == ["stopping"] * 3
        assert asked[0].tokens == greedy(ONE, 2)
        await rig.engine.drained()
        with pytest.raises(EngineHaltedError):
            rig.ask(ONE)
        await _turns()
    assert rig.proven().ended_requests == {"cancelled": 3}


async def test_an_engine_cancelled_in_the_middle_of_a_step_gives_everything_back(
    tmp_path: Path,
) -> None:
    """SIGTERM: the step that loads from the host never ends."""
    rig = EngineRig(tmp_path, pages=6, host_slots=16)
    async with rig.running():
        for prompt in (range(17), range(1000, 1017), range(2000, 2017)):
            await rig.answer(prompt)
        rig.runner.gate = asyncio.Event()
        asked = rig.ask(range(17))
        await _turns()
        assert rig.tier("host").pool.held_pages > 0
        rig.engine.halt()
        assert asked.halted == "stopping"
    rig.proven()


async def test_a_request_whose_pages_another_worker_reads_waits_instead_of_ending_the_engine(
    tmp_path: Path,
) -> None:
    rig = EngineRig(tmp_path, pages=5)
    async with rig.running():
        first = await rig.answer(ONE, 4)
        assert first.ticket is not None
        local = LocalPages(rig.cache, rig.runner, None, rig.ledger.note)
        gate = asyncio.Event()
        read = rig.runner.read

        async def slow_read(pages: tuple[int, ...]) -> list[bytes]:
            await gate.wait()
            return await read(pages)  # type: ignore[arg-type]

        rig.runner.read = slow_read  # type: ignore[method-assign]
        stream = local.pages(first.ticket.sequence.table.chain)
        reading = asyncio.create_task(anext(stream))
        await _turns()
        assert rig.cache.pool.held_pages > 0
        waiting = rig.ask(range(500, 517), 4)
        await _turns(50)
        assert not waiting.ended.is_set()
        gate.set()
        content = await reading
        assert len(content) == rig.runner.content_bytes
        await stream.aclose()
        await waiting.ended.wait()
        assert waiting.tokens == greedy(range(500, 517), 4)
    assert rig.proven().ended_requests == {"done": 2, "read": 1}


async def test_an_engine_that_waits_for_nobody_says_so_instead_of_hanging(tmp_path: Path) -> None:
    rig = EngineRig(tmp_path, pages=2)
    rig.cache.pool.eviction.available_pages = lambda *_: 0  # type: ignore[method-assign]
    rig.cache.pool.take(1, holder="lost")
    rig.cache.pool.index([page for page in range(2) if rig.cache.pool.references(page)])  # type: ignore[arg-type, misc]
    rig.cache.pool.release([page for page in range(2) if rig.cache.pool.references(page)], "lost")  # type: ignore[arg-type, misc]
    rig.ask(range(5), 1)
    with pytest.raises(PoolError, match="none can run"):
        await rig.engine.run()


async def test_a_pinned_pool_yields_to_the_only_request_that_runs(tmp_path: Path) -> None:
    rig = EngineRig(tmp_path, pages=4)
    async with rig.running():
        await rig.answer(range(9), 1)
        packed = b"".join(each.to_bytes(4, "little") for each in range(9))
        assert rig.engine.pin(packed, None, 1e6) == 2
        assert (await rig.answer(TWO, 7)).tokens == greedy(TWO, 7)
        assert rig.engine.kv_report().tiers[0].states["pinned"] == 0
    rig.proven()


async def test_two_answers_to_one_prompt_compute_it_once(tmp_path: Path) -> None:
    rig = EngineRig(tmp_path)
    async with rig.running():
        first = rig.ask(ONE, 5)
        second = rig.ask(ONE, 5, parent=first, sample=1)
        third = rig.ask(ONE, 3, parent=second, sample=2)
        for each in (first, second, third):
            await each.ended.wait()
        assert first.tokens == greedy(ONE, 5)
        (tmp_path / "alone").mkdir()
        alone = EngineRig(tmp_path / "alone")
        async with alone.running():
            assert second.tokens == (await alone.answer(ONE, 5, sample=1)).tokens
            assert third.tokens == (await alone.answer(ONE, 3, sample=2)).tokens
        assert rig.runner.computed_tokens == len(ONE) + 4 + 4 + 2 + 1
    rig.proven()


@pytest.mark.parametrize("host_slots", [0, 16])
async def test_preempted_requests_go_on_with_the_same_tokens(
    tmp_path: Path, host_slots: int
) -> None:
    """Recomputed, or swapped to the host and back."""
    rig = EngineRig(tmp_path, pages=9, host_slots=host_slots)
    prompts = [list(range(100 * n, 100 * n + 9)) for n in range(1, 5)]
    async with rig.running():
        asked = [rig.ask(prompt, 20) for prompt in prompts]
        for each, prompt in zip(asked, prompts, strict=True):
            await each.ended.wait()
            assert each.tokens == greedy(prompt, 20)
        assert rig.engine.scheduler.counters.preemptions > 0
        assert (rig.runner.loaded_pages > 0) == bool(host_slots)
    rig.proven()


async def test_what_never_fits_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    rig = EngineRig(tmp_path, pages=4)
    async with rig.running():
        with pytest.raises(NeverFitsError, match="4 pages of 4 tokens"):
            rig.ask(range(16), 2)
        assert (await rig.answer(range(16), 1)).tokens == greedy(range(16), 1)
        await rig.engine.drained()
    assert rig.proven().ended_requests == {"done": 1}


async def test_what_never_fits_is_refused_before_it_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = EngineRig(tmp_path, pages=4)
    hashed: list[bytes] = []
    open_table = rig.cache.open_table

    def noted(packed: bytes, *more: Any) -> BlockTable:
        hashed.append(packed)
        return open_table(packed, *more)

    monkeypatch.setattr(rig.cache, "open_table", noted)
    with pytest.raises(NeverFitsError):
        rig.ask(range(100), 2)
    assert not hashed
    rig.ask(range(8), 2)
    assert len(hashed) == 1


async def test_a_reset_in_the_middle_of_a_step_is_announced_and_changes_no_answer(
    tmp_path: Path,
) -> None:
    rig = EngineRig(tmp_path, pages=8, host_slots=4)
    rig.runner.before_step = lambda number: (
        rig.engine.reset_prefix_cache() if number in (2, 7) else None
    )
    async with rig.running():
        asked = [rig.ask(prompt, 6) for prompt in (ONE, TWO, ONE)]
        for each, prompt in zip(asked, (ONE, TWO, ONE), strict=True):
            await each.ended.wait()
            assert each.tokens == greedy(prompt, 6)
    rig.proven()
    assert [type(change).__name__ for change in rig.changes].count("PagesCleared") == 2


async def test_the_audit_names_a_request_whose_pages_leaked(tmp_path: Path) -> None:
    """The proof must be able to fail."""
    rig = EngineRig(tmp_path)
    async with rig.running():
        await rig.answer(ONE, 2)
    rig.cache.pool.take(1, holder="lost")
    with pytest.raises(AuditFault, match=r"it leaked: .* held by lost"):
        rig.replayed()
