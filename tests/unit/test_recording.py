"""The recording of the last requests: what is in it, its bound, and how it is fetched."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import TYPE_CHECKING

import msgspec
import pytest
import zstandard
from prometheus_client import CollectorRegistry

import router.recording
from router.config import ConfigError, decode_config
from router.error import NotFoundError
from router.recording import (
    Recorded,
    Recording,
    RecordingDesk,
    RecordingSettings,
    open_recording,
)
from support.choosing import chain_for
from support.logged import Logging, record_of

if TYPE_CHECKING:
    from router.request import Request

BEGAN_UNIX_S = 1_700_000_000.0
MODULE = router.recording.__file__


def open_for(max_bytes: int) -> Recording:
    recording = open_recording(
        RecordingSettings(max_bytes=max_bytes), CollectorRegistry(), lambda: BEGAN_UNIX_S
    )
    assert recording is not None
    return recording


def note_any(recording: Recording, logging: Logging, number: int) -> None:
    choices, routed = logging.decide_any()
    record = record_of(
        choices, routed, request_id=f"r{number}", started_unix_s=BEGAN_UNIX_S + number
    )
    recording.note(record, choices[-1], routed)


async def add_all(recording: Recording, lines: list[Recorded], number: int) -> None:
    """Add ``lines`` once more, all of them a thousand seconds times ``number`` later."""
    for one in lines:
        later_s = one.arrived_unix_s + 1_000 * number
        recording.add(msgspec.structs.replace(one, arrived_unix_s=later_s))
        await recording.settle()


async def walked(recording: Recording, since_unix_s: float = 0.0) -> list[Recorded]:
    """Return what a walk over all chunks gives."""
    found: list[Recorded] = []
    following: int | None = 0
    while following is not None:
        frame, following = await recording.chunk_from(following, since_unix_s)
        if frame:
            lines = zstandard.ZstdDecompressor().decompress(frame).splitlines()
            found += [msgspec.json.decode(line, type=Recorded) for line in lines]
    return found


async def test_a_record_has_lengths_ids_decision_and_outcome() -> None:
    recording = open_for(1 << 20)
    choices, routed = Logging().decide(range(200), range(500, 564), attempts=2)
    recording.note(record_of(choices, routed, tenant="acme"), choices[-1], routed)
    [one] = await walked(recording)
    decision = choices[-1].decision
    assert (one.arrived_unix_s, one.prompt_tokens, one.output_tokens) == (
        1_700_000_000.125,
        264,
        20,
    )
    assert (one.replica, one.reason, one.attempts) == (decision.replica, decision.reason, 2)
    assert (one.status, one.outcome, one.ttft_s, one.duration_s) == (200, "done", 0.1, 0.3)
    assert (one.model, one.tenant, one.cached_tokens, one.block_tokens) == ("m", "acme", 0, 64)
    assert [prompt.tokens for prompt in one.prompts] == [200, 64]
    assert one.prompts[0].chain == b"".join(chain_for(range(200)))
    assert one.prompts[1].chain == b"".join(chain_for(range(500, 564)))


async def test_neither_the_clients_words_nor_any_id_of_a_request_is_recorded() -> None:
    """S-13."""
    recording = open_for(1 << 20)
    choices, routed = Logging().decide(range(200))
    recording.note(record_of(choices, routed, trace_id="CANARY-trace"), choices[-1], routed)
    frame, following = await recording.chunk_from(0, 0.0)
    assert following is None
    line = zstandard.ZstdDecompressor().decompress(frame)
    assert line.count(b"\n") == 1
    assert b"CANARY" not in line
    assert b'"r1"' not in line


async def test_it_takes_no_more_memory_than_it_may_and_the_oldest_requests_go() -> None:
    recording, logging = open_for(60_000), Logging()
    for number in range(600):
        note_any(recording, logging, number)
        await recording.settle()
        assert recording.held_bytes <= 60_000
    arrivals = [one.arrived_unix_s - BEGAN_UNIX_S for one in await walked(recording)]
    assert arrivals == list(range(600 - len(arrivals), 600))
    assert 60 < len(arrivals) < 600
    assert recording.held_bytes > 30_000


async def test_every_request_is_fetched_once_also_while_chunks_are_compressed() -> None:
    recording, logging = open_for(1 << 20), Logging()
    settling = []
    for number in range(400):
        note_any(recording, logging, number)
        if number % 40 == 0:
            settling.append(asyncio.create_task(recording.settle()))
            await asyncio.sleep(0)
            arrivals = [one.arrived_unix_s - BEGAN_UNIX_S for one in await walked(recording)]
            assert arrivals == list(range(number + 1))
    await asyncio.gather(*settling)
    assert len(await walked(recording)) == 400


async def test_chunks_that_are_too_old_are_passed_over() -> None:
    recording, logging = open_for(1 << 20), Logging()
    for number in range(400):
        note_any(recording, logging, number)
        await recording.settle()
    arrivals = [
        one.arrived_unix_s - BEGAN_UNIX_S for one in await walked(recording, BEGAN_UNIX_S + 300)
    ]
    assert 0 < arrivals[0] <= 300
    assert arrivals == list(range(int(arrivals[0]), 400))


async def test_the_bound_is_of_memory_taken_and_not_of_lengths() -> None:
    """A compressed chunk must not keep the room that it might have needed."""
    recording, logging = open_for(64 * 1024), Logging()
    made = open_for(1 << 20)
    for number in range(200):
        note_any(made, logging, number)
    lines = await walked(made)
    for number in range(2):  # full before it is looked at
        await add_all(recording, lines, number)
    tracemalloc.start()
    try:
        for number in range(2, 5):
            await add_all(recording, lines, number)
        only = tracemalloc.Filter(inclusive=True, filename_pattern=MODULE)
        taken = tracemalloc.take_snapshot().filter_traces([only])
    finally:
        tracemalloc.stop()
    taken_bytes = sum(trace.size for trace in taken.traces)
    assert 0 < taken_bytes <= 1.25 * 64 * 1024
    assert (await walked(recording))[0].arrived_unix_s > BEGAN_UNIX_S + 1_000


async def test_what_does_not_fit_is_dropped_and_counted() -> None:
    registry = CollectorRegistry()
    recording = open_recording(RecordingSettings(max_bytes=8_000), registry, lambda: 0.0)
    assert recording is not None
    choices, routed = Logging().decide(range(64 * 400))
    recording.note(record_of(choices, routed), choices[-1], routed)
    assert registry.get_sample_value("warmroute_recording_dropped_total") == 1
    choices, routed = Logging().decide(range(100))
    for number in range(40):  # more than half of it before anything was compressed
        recording.note(
            record_of(choices, routed, started_unix_s=float(number)), choices[-1], routed
        )
    kept = [one.arrived_unix_s for one in await walked(recording)]
    assert kept == list(range(len(kept)))
    assert registry.get_sample_value("warmroute_recording_dropped_total") == 41 - len(kept)
    assert 0 < (registry.get_sample_value("warmroute_recording_bytes") or 0) <= 8_000


async def test_without_room_there_is_no_recording_and_operators_are_told(
    anything: Request,
) -> None:
    registry = CollectorRegistry()
    assert open_recording(RecordingSettings(max_bytes=0), registry, lambda: 0.0) is None
    with pytest.raises(NotFoundError, match=r"recording\.max_bytes"):
        await RecordingDesk(None).answer(anything)
    assert list(registry.collect()) == []


@pytest.fixture
def anything() -> Request:
    return None  # type: ignore[return-value] # what is asked is not looked at


def test_a_wrong_bound_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"recording\.max_bytes"):
        decode_config({"recording": {"max_bytes": -1}})
    with pytest.raises(ConfigError, match=r"recording\.max_bytes: expected 0 or at least 1048576"):
        decode_config({"recording": {"max_bytes": (1 << 20) - 1}})
    assert decode_config({"recording": {"max_bytes": 1 << 20}}).recording.max_bytes == 1 << 20
    assert decode_config({"recording": {"max_bytes": 0}}).recording.max_bytes == 0
    assert decode_config({}).recording.max_bytes == 16 << 20
