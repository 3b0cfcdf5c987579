"""When a live replay sends what, and what it makes of the answers, on a clock of its own."""

from __future__ import annotations

import asyncio

import pytest

from replay.journal import Record
from replay.live import LiveReplay, LiveSettings, lateness_of, run_of
from replay.outcome import Outcome
from replay.synthesis import Prompt
from replay.target import Answer
from replay.trace import TraceRequest
from state.model import BlockId


class Clock:
    """Time that passes only while everybody waits."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        await settle()
        self.now_s += duration_s
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Listed:
    """Prompts that name their request."""

    def __init__(self, clock: Clock | None = None, work_s: float = 0.0) -> None:
        self._clock = clock
        self._work_s = work_s

    def prompt_for(self, ordinal: int, request: TraceRequest) -> Prompt:
        if self._clock is not None:
            self._clock.now_s += self._work_s
        return Prompt([ordinal], request.prompt_tokens, request.output_tokens)


class Server:
    """Answers at once, or when ``open`` is set."""

    def __init__(self, clock: Clock, answer: Answer | None = None) -> None:
        self.clock = clock
        self.answer = answer or Answer(duration_s=0.5, ttft_s=0.25)
        self.open = asyncio.Event()
        self.open.set()
        self.came: list[tuple[int, float]] = []

    def body_of(self, prompt: Prompt) -> bytes:
        return str(prompt.content[0]).encode()

    async def ask(self, body: bytes) -> Answer:
        self.came.append((int(body), round(self.clock.now_s - 100.0, 6)))
        await self.open.wait()
        return self.answer


def request(arrival_s: float, *blocks: int) -> TraceRequest:
    chain = tuple(BlockId(bytes([one] * 16)) for one in blocks)
    return TraceRequest(
        arrival_s=arrival_s, prompt_tokens=100, output_tokens=7, chain=chain, line=3, session="s"
    )


async def replayed(
    server: Server, requests: list[TraceRequest], concurrency: int = 10, **more: object
) -> list[Record]:
    records: list[Record] = []
    settings = LiveSettings(concurrency=concurrency)
    prompts = Listed(server.clock, float(str(more.get("work_s", 0.0))))
    done = more.get("done", ())
    assert isinstance(done, tuple)
    live = LiveReplay(server, prompts, settings, server.clock, records.append, server.clock.sleep)
    await live.play(requests, done)
    return records


async def test_every_request_is_sent_at_its_time() -> None:
    server = Server(Clock())
    records = await replayed(server, [request(at) for at in (0.0, 0.5, 0.5, 4.0)])
    assert server.came == [(0, 0.0), (1, 0.5), (2, 0.5), (3, 4.0)]
    assert [record.outcome.arrival_s for record in records] == [0.0, 0.5, 0.5, 4.0]
    assert {record.late_s for record in records} == {0.0}


async def test_a_slow_target_gets_no_fewer_requests() -> None:
    server = Server(Clock())
    server.open.clear()
    playing = asyncio.create_task(replayed(server, [request(at) for at in (0.0, 1.0, 2.0)]))
    for _ in range(20):
        await settle()
    assert [at for at, _ in server.came] == [0, 1, 2]
    assert not playing.done()
    server.open.set()
    assert len(await playing) == 3


async def test_what_waits_for_others_is_sent_late_and_says_so() -> None:
    server = Server(Clock())
    server.open.clear()
    playing = asyncio.create_task(replayed(server, [request(0.0), request(1.0)], concurrency=1))
    for _ in range(20):
        await settle()
    assert [at for at, _ in server.came] == [0]
    server.clock.now_s = 105.0
    server.open.set()
    records = await playing
    assert server.came == [(0, 0.0), (1, 5.0)]
    assert [record.late_s for record in records] == [0.0, 4.0]
    assert records[1].outcome.arrival_s == 5.0


async def test_time_that_a_prompt_takes_to_make_is_lateness_too() -> None:
    server = Server(Clock())
    records = await replayed(server, [request(0.0), request(0.1)], work_s=0.4)
    assert [round(record.late_s, 6) for record in records] == [0.4, 0.7]


async def test_a_resumed_replay_begins_with_what_has_no_outcome_yet() -> None:
    server = Server(Clock())
    requests = [request(at) for at in (0.0, 10.0, 11.0, 12.0)]
    records = await replayed(server, requests, done=(0, 2))
    assert server.came == [(1, 0.0), (3, 2.0)]
    assert [record.outcome.ordinal for record in records] == [1, 3]
    assert [record.outcome.arrival_s for record in records] == [10.0, 12.0]
    assert {record.late_s for record in records} == {0.0}


async def test_nothing_is_sent_where_all_is_done() -> None:
    server = Server(Clock())
    assert await replayed(server, [request(0.0)], done=(0,)) == []
    assert server.came == []


async def test_an_outcome_has_what_the_target_told_and_else_what_was_asked() -> None:
    told = Answer(
        duration_s=2.0,
        ttft_s=0.5,
        prompt_tokens=104,
        output_tokens=6,
        cached_tokens=96,
        replica="w1",
        reason="prefix",
        predicted_cached_tokens=64,
    )
    silent = Answer(duration_s=1.0, error="status 503: full")
    [one] = await replayed(Server(Clock(), told), [request(0.0, 1)])
    [other] = await replayed(Server(Clock(), silent), [request(0.0, 1)])
    assert one.outcome == Outcome(
        ordinal=0,
        line=3,
        arrival_s=0.0,
        prompt_tokens=104,
        output_tokens=6,
        replica="w1",
        reason="prefix",
        predicted_cached_tokens=64,
        cached_tokens=96,
        ttft_s=0.5,
        duration_s=2.0,
        session="s",
    )
    assert (other.outcome.prompt_tokens, other.outcome.output_tokens) == (100, 7)
    assert other.outcome.replica == "untold"
    assert other.outcome.cached_tokens is None
    assert other.outcome.ttft_s is None
    assert other.outcome.error == "status 503: full"


async def test_what_the_listener_raises_ends_the_replay() -> None:
    clock = Clock()
    server = Server(clock)

    def refuse(_: Record) -> None:
        message = "the disk is full"
        raise RuntimeError(message)

    live = LiveReplay(server, Listed(), LiveSettings(), clock, refuse, clock.sleep)
    with pytest.raises(RuntimeError, match="the disk is full"):
        await live.play([request(at) for at in range(50)])
    assert len(server.came) < 50


async def test_cancelling_gives_up_what_is_under_way() -> None:
    server = Server(Clock())
    server.open.clear()
    playing = asyncio.create_task(replayed(server, [request(0.0), request(0.0)]))
    for _ in range(20):
        await settle()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert len(server.came) == 2


async def test_the_traffic_of_a_prompt_counts_at_its_deepest_shared_block() -> None:
    requests = [request(0, 1, 2, 3), request(0, 1, 2), request(0, 9)]
    records = await replayed(Server(Clock()), requests)
    shared = bytes([2] * 16).hex()
    assert [record.outcome.prefix for record in records] == [shared, shared, ""]


def record_of(ordinal: int, late_s: float, replica: str = "w0") -> Record:
    outcome = Outcome(
        ordinal=ordinal,
        line=0,
        arrival_s=float(ordinal),
        prompt_tokens=10,
        output_tokens=1,
        replica=replica,
        ttft_s=0.1,
        duration_s=0.5,
    )
    return Record(outcome=outcome, late_s=late_s)


def test_lateness_counts_from_ten_milliseconds_on() -> None:
    lateness = lateness_of([record_of(at, 0.001 * at) for at in range(1, 101)])
    assert lateness.late_requests == 90
    assert lateness.p99_s == pytest.approx(0.099)
    assert lateness.max_s == pytest.approx(0.1)
    assert lateness_of([]).max_s == 0.0


def test_a_run_has_its_outcomes_by_ordinal_and_the_replicas_that_were_told() -> None:
    run = run_of("t", "live", [record_of(1, 0, "w1"), record_of(0, 0, "untold")], 5)
    assert [one.ordinal for one in run.outcomes] == [0, 1]
    assert run.replicas == ("w1",)
    assert run.span_s == 1.5
    assert run_of("t", "live", [record_of(0, 0, "untold")], 5).replicas == ("untold",)
