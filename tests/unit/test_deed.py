"""What was done to an engine behind its events' back, from its metrics."""

from __future__ import annotations

from typing import Final
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import make_mocked_request

from sidecar.deed import Deeds, DeedWatch, Loss
from sidecar.event import ClearedPages, RemovedPages
from sidecar.exporter import is_local
from sidecar.scrape import parse_metrics
from state.model import ReplicaLoad

IDLE: Final = ReplicaLoad(running=0, queued=0)
BUSY: Final = ReplicaLoad(running=1, queued=0)
CLEAR: Final = (ClearedPages(),)
OTHER: Final = (RemovedPages(handles=(1,)),)
SCRAPED: Final = """\
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="discard_all"} 0.0
http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 100.0
http_requests_total{handler="/reset_prefix_cache",method="POST",status="2xx"} 2.0
http_requests_total{handler="/reset_prefix_cache",method="POST",status="5xx"} 8.0
http_requests_total{handler="/sleep",method="POST",status="2xx"} 1.0
http_requests_total{handler="/sleep",method="GET",status="4xx"} 8.0
http_requests_total{handler="/is_sleeping",method="GET",status="2xx"} 8.0
http_requests_total{handler="/collective_rpc",method="POST",status="2xx"} 1.0
http_requests_total{handler="/finish_weight_update",method="POST",status="2xx"} 3.0
http_requests_created{handler="/reset_prefix_cache",method="POST",status="2xx"} 1.7e+09
"""


def drops(count: int, *, is_asleep: bool = False) -> Deeds:
    return Deeds(cache_drops=count, is_asleep=is_asleep)


def test_calls_that_succeeded_are_counted_by_what_they_do() -> None:
    """The lines of a real vLLM 0.32."""
    deeds = parse_metrics(SCRAPED).deeds
    assert deeds == Deeds(cache_drops=2, sleeps=1, weight_changes=4)
    shallow = SCRAPED.replace('"awake"} 1.0', '"awake"} 0.0')
    asleep = parse_metrics(shallow).deeds
    assert (asleep.is_asleep, asleep.keeps_memory, asleep.sleeps) == (True, True, 1)
    deep = parse_metrics(shallow.replace('"discard_all"} 0.0', '"discard_all"} 1.0')).deeds
    assert (deep.is_asleep, deep.keeps_memory) == (True, False)
    assert parse_metrics("").deeds == Deeds()


@pytest.mark.parametrize(
    ("size_bytes", "cache_drops"),
    [
        (5 * 16, 5),
        (2 * 16 + 3 * 17, 2),
        (5 * 17, 0),
        (0, 5),  # an answer without a body tells nothing
        (5 * 40, 5),  # nor does one that is not known
    ],
)
def test_resets_that_were_refused_are_no_drops(size_bytes: int, cache_drops: int) -> None:
    """While requests run, vLLM answers 200 with ``{"success":false}``; callers try again."""
    shown = f"""\
http_requests_total{{handler="/reset_prefix_cache",method="POST",status="2xx"}} 5.0
http_response_size_bytes_count{{handler="/reset_prefix_cache"}} 5.0
http_response_size_bytes_sum{{handler="/reset_prefix_cache"}} {size_bytes}.0
http_response_size_bytes_count{{handler="/v1/completions"}} 9.0
http_response_size_bytes_sum{{handler="/v1/completions"}} 9000.0
"""
    assert parse_metrics(shown).deeds.cache_drops == cache_drops


def test_a_drop_of_an_idle_engine_counts_until_its_next_step() -> None:
    watch = DeedWatch()
    watch.hear(6, OTHER)
    assert watch.look(drops(1), IDLE) is Loss.NOTHING
    assert watch.look(drops(2), IDLE) is Loss.CACHE
    assert watch.look(drops(2), IDLE) is Loss.CACHE
    watch.hear(6, OTHER)  # a replay of what was before
    assert watch.look(drops(2), IDLE) is Loss.CACHE
    watch.hear(7, (*CLEAR, *OTHER))
    assert watch.look(drops(2), IDLE) is Loss.NOTHING
    assert watch.look(drops(3), IDLE) is Loss.CACHE  # what was told late pays for nothing else


def test_an_engine_that_never_told_anything_can_drop_too() -> None:
    watch = DeedWatch()
    watch.look(drops(0), IDLE)
    assert watch.look(drops(1), IDLE) is Loss.CACHE
    watch.hear(0, OTHER)
    assert watch.look(drops(1), IDLE) is Loss.NOTHING


@pytest.mark.parametrize("looks_between", [0, 1])
def test_a_drop_that_was_told_is_none(looks_between: int) -> None:
    """The event may come before the call is counted."""
    watch = DeedWatch()
    watch.look(drops(0), IDLE)
    watch.hear(1, CLEAR)
    for _ in range(looks_between):
        assert watch.look(drops(0), IDLE) is Loss.NOTHING
    assert watch.look(drops(1), IDLE) is Loss.NOTHING
    assert watch.look(drops(2), IDLE) is Loss.CACHE


def test_a_clear_long_ago_pays_for_nothing() -> None:
    watch = DeedWatch()
    watch.look(drops(0), IDLE)
    watch.hear(1, CLEAR)
    for _ in range(3):
        watch.look(drops(0), IDLE)
    assert watch.look(drops(1), IDLE) is Loss.CACHE


def test_a_busy_engine_tells_by_itself_and_what_failed_there_is_no_drop() -> None:
    watch = DeedWatch()
    watch.look(drops(0), BUSY)
    assert watch.look(drops(1), BUSY) is Loss.NOTHING
    assert watch.look(drops(1), IDLE) is Loss.NOTHING
    assert watch.look(drops(2), ReplicaLoad(running=0, queued=1)) is Loss.NOTHING
    assert watch.look(drops(3, is_asleep=True), BUSY) is Loss.CACHE  # asleep, it makes no step


def test_a_sleep_drops_the_cache_but_where_the_memory_is_kept() -> None:
    watch = DeedWatch()
    watch.look(Deeds(), IDLE)
    light = Deeds(sleeps=1, is_asleep=True, keeps_memory=True)
    assert watch.look(light, IDLE) is Loss.NOTHING
    assert watch.look(Deeds(sleeps=1), IDLE) is Loss.NOTHING
    assert watch.look(Deeds(sleeps=2, is_asleep=True), IDLE) is Loss.CACHE
    watch.hear(1, CLEAR)
    assert watch.look(Deeds(sleeps=3), IDLE) is Loss.CACHE  # it woke again: how deep, nobody knows
    assert watch.look(Deeds(), IDLE) is Loss.NOTHING


def test_a_new_process_begins_to_count_again() -> None:
    watch = DeedWatch()
    watch.look(drops(5), IDLE)
    assert watch.look(drops(6), IDLE) is Loss.CACHE
    assert watch.look(drops(0), IDLE) is Loss.NOTHING
    assert watch.look(drops(1), IDLE) is Loss.CACHE


def test_other_weights_are_seen_busy_or_not() -> None:
    watch = DeedWatch()
    assert watch.look(Deeds(weight_changes=1), BUSY) is Loss.NOTHING
    assert watch.look(Deeds(weight_changes=2), BUSY) is Loss.WEIGHTS
    assert watch.look(Deeds(weight_changes=2), BUSY) is Loss.NOTHING
    assert watch.look(Deeds(weight_changes=3, cache_drops=1), IDLE) is Loss.WEIGHTS
    assert watch.look(Deeds(weight_changes=3, cache_drops=1), IDLE) is Loss.CACHE


@pytest.mark.parametrize(
    ("peer", "is_so"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("10.0.0.7", False), (None, False)],
)
def test_only_this_host_may_begin_a_generation(peer: str | None, *, is_so: bool) -> None:
    transport = Mock()
    transport.get_extra_info.return_value = peer and (peer, 4711)
    assert is_local(make_mocked_request("POST", "/renew", transport=transport)) is is_so
    page = {"Origin": "http://127.0.0.1"}
    assert not is_local(make_mocked_request("POST", "/renew", headers=page, transport=transport))
