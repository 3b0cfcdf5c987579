"""What is said of an engine: its name, and what it lacks."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.scrape import EngineClient, ModelCard
from sidecar.subscriber import EventSource
from state.model import EngineKind
from warmroute.attend import advice
from warmroute.engine_look import EngineLook, root_of, shown

WHOLE = {0: EventSource(events="tcp://h:1", replay="tcp://h:2")}
ONE_WAY = {0: EventSource(events="tcp://h:1")}
NONE: dict[int, EventSource] = {}


def look_of(kind: EngineKind, sources: dict[int, EventSource], **facts: Any) -> EngineLook:
    return EngineLook(kind=kind, base_models=("m",), sources=sources, **facts)


@pytest.mark.parametrize(
    ("look", "wanted"),
    [
        (look_of(EngineKind.VLLM, NONE), ['"enable_kv_cache_events":true', '"replay_endpoint"']),
        (look_of(EngineKind.SGLANG, NONE), ['--kv-events-config \'{"publisher":"zmq"']),
        (look_of(EngineKind.VLLM, ONE_WAY), ["a replay_endpoint in its --kv-events-config"]),
        (look_of(EngineKind.SGLANG, WHOLE, does_report_hits=False), ["--enable-cache-report"]),
        (look_of(EngineKind.SGLANG, WHOLE, does_cache=False), ["--disable-radix-cache"]),
    ],
)
def test_what_an_engine_lacks_is_named_as_it_is_spelled(
    look: EngineLook, wanted: list[str]
) -> None:
    """A94: each is a flag that its engine has."""
    said = advice(look)
    assert said.startswith(" (start it with ")
    assert all(word in said for word in wanted)


@pytest.mark.parametrize(
    "look",
    [
        look_of(EngineKind.VLLM, WHOLE),
        look_of(EngineKind.SGLANG, WHOLE, does_report_hits=True),
        look_of(EngineKind.UNKNOWN, NONE),
        look_of(EngineKind.WORKER, WHOLE),
    ],
)
def test_of_an_engine_that_lacks_nothing_nothing_is_said(look: EngineLook) -> None:
    assert advice(look) == ""


def test_events_count_only_where_all_of_them_can_be_had() -> None:
    assert look_of(EngineKind.VLLM, WHOLE).can_follow
    assert not look_of(EngineKind.VLLM, NONE).can_follow
    assert not look_of(EngineKind.VLLM, WHOLE, unreachable=("tcp://h:1",)).can_follow


@pytest.mark.asyncio
@pytest.mark.parametrize("root", ["/" + "x" * 5_000, "/nul\0", "relative", ""])
async def test_a_root_that_is_no_directory_here_names_none(root: str) -> None:
    async with EngineClient("http://127.0.0.1:1") as client:
        assert root_of([ModelCard(id="m", root=root)], client) is None


def test_names_are_short_and_printable_in_a_log() -> None:
    assert shown("a\nb\x1b[31m") == "a?b?[31m"
    assert shown("x" * 500) == "x" * 80 + "..."
