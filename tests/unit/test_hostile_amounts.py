"""What one request may bring in any amount costs the others on the event loop no more than that."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec
import pytest
from aiohttp import web

from sidecar.api import ApiError
from sidecar.cache import PagedCache
from sidecar.peer import Peers
from sidecar.sampling import decode_completion_sampling
from sidecar.scheduler import Scheduler
from sidecar.scope import Place
from sidecar.step import SchedulerLimits, Sequence
from sidecar.stop import Passed, StopFilter
from state.model import BlockId
from state.prefix import pack_tokens

if TYPE_CHECKING:
    from sidecar.transfer_client import TransferClient


class _ReadText(str):
    """A text that counts how often it is read."""

    __slots__ = ("reads",)
    reads: int

    def __getitem__(self, key: object) -> str:
        self.reads += 1
        return super().__getitem__(key)  # type: ignore[index]


def _read_text(text: str) -> _ReadText:
    read = _ReadText(text)
    read.reads = 0
    return read


def test_a_long_stop_string_is_read_only_as_far_as_the_text_begins_it() -> None:
    stop = _read_text("ab" * 500 + "c")
    stop_filter = StopFilter([stop])
    assert stop.reads == 0
    assert stop_filter.feed("xaba" * 10) == Passed("xaba" * 9 + "x")
    assert stop.reads <= 3 * 40


def test_a_stop_string_of_many_borders_is_found_where_it_is_complete() -> None:
    stop_filter = StopFilter(["aabaabaaac"])
    assert stop_filter.feed("aabaabaabaaab").text == "aabaabaaba"
    assert stop_filter.feed("aabaaac!") == Passed("", "aabaabaaac")


def test_leaving_a_long_queue_from_its_end_looks_at_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = Scheduler(PagedCache(8, 4), SchedulerLimits())
    packed = pack_tokens([1, 2])
    place = Place(BlockId(b"root".ljust(16)))
    queue = [scheduler.submit(scheduler.cache.open_table(packed, place), 1) for _ in range(300)]
    compared = 0

    def is_same(one: Sequence, other: object) -> bool:
        nonlocal compared
        compared += 1
        return one is other

    monkeypatch.setattr(Sequence, "__eq__", is_same)
    for sequence in reversed(queue):
        scheduler.end(sequence, "cancelled")
    assert scheduler.waiting_sequences == 0
    assert compared < len(queue)


def test_more_stop_tokens_than_a_step_can_compare_are_refused_by_name() -> None:
    allowed = msgspec.json.encode({"stop_token_ids": list(range(1024))})
    assert decode_completion_sampling(allowed).stop_token_ids == list(range(1024))
    with pytest.raises(ApiError) as refused:
        decode_completion_sampling(msgspec.json.encode({"stop_token_ids": list(range(1025))}))
    assert (refused.value.status, refused.value.param) == (400, "stop_token_ids")


async def test_a_peer_is_asked_once_however_a_client_spells_it() -> None:
    questions = 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal questions
        questions += 1
        return web.json_response({"port": 1, "namespace": "of another model"})

    app = web.Application()
    app.router.add_get("/kv_transfer", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        peers = Peers(cast("TransferClient", None), bytes(32), frozenset((url,)))
        for spelling in (url, url.replace("http", "HTTP"), url.replace("http", "hTTp")):
            assert await peers.fetch(spelling, [BlockId(bytes(16))], lambda *_: None) == 0
    finally:
        await runner.cleanup()
    assert questions == 1
