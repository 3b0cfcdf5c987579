"""A decision log as a trace: the requests by arrival, with the chains that they share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from replay.decision import LoggedTrace, trace_requests
from replay.trace import TraceError
from support.choosing import chain_for
from support.logged import Logging, open_log, record_of, rewrite

if TYPE_CHECKING:
    from pathlib import Path


ID = "A" * 22 + "=="
"""Any block id in a record."""


async def write(path: Path, *requests: tuple[tuple[range, ...], dict[str, Any]]) -> None:
    """Log requests with their prompts and what is special of their records."""
    log, logging = open_log(path, chains=True), Logging()
    for prompts, changes in requests:
        attempts = changes.pop("tries", 1)
        choices, routed = logging.decide(*prompts, attempts=attempts)
        log.add(record_of(choices, routed, **changes), choices, routed)
    await log.close()


async def test_requests_come_by_arrival_with_lengths_and_chains(tmp_path: Path) -> None:
    path = tmp_path / "log"
    await write(
        path,
        ((range(200),), {"started_unix_s": 1_005.5}),
        ((range(130),), {"started_unix_s": 1_003.0, "tries": 3}),
        ((range(10),), {"started_unix_s": 1_004.0}),
    )
    trace = LoggedTrace(path)
    assert (trace.name, trace.block_tokens) == ("log", 64)
    requests = list(trace)
    assert requests == list(trace) == list(trace_requests(path))
    assert [one.arrival_s for one in requests] == [0.0, 1.0, 2.5]
    assert [one.prompt_tokens for one in requests] == [130, 10, 200]
    assert [one.output_tokens for one in requests] == [20, 20, 20]
    assert requests[2].chain == chain_for(range(200))
    assert requests[0].chain == chain_for(range(128)) == requests[2].chain[:2]
    assert requests[1].chain == ()


async def test_unknown_output_is_the_mean_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "log"
    told = [{"reported_output_tokens": count} for count in (10, None, 30, 0)]
    await write(path, *(((range(100),), changes) for changes in told))
    assert [one.output_tokens for one in trace_requests(path)] == [10, 14, 30, 1]


async def test_several_prompts_are_as_many_requests(tmp_path: Path) -> None:
    path = tmp_path / "log"
    await write(path, ((range(200), range(500, 600)), {"reported_output_tokens": 9}))
    first, second = trace_requests(path)
    assert (first.prompt_tokens, second.prompt_tokens) == (200, 100)
    assert second.chain == chain_for(range(500, 564))
    assert (first.output_tokens, second.output_tokens) == (4, 4)


async def test_a_log_without_chains_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "log"
    await Logging().write(path, 5)
    with pytest.raises(TraceError, match="no ids of prefix blocks"):
        LoggedTrace(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_tokens": 16}, "line 3: block_tokens: expected 64, got 16"),
        ({"block_tokens": None}, "line 3: block_tokens: expected 64, got None"),
        (
            {"prompts": [{"tokens": 100, "chain": "AAAA"}]},
            "line 3: prompts: the chain does not fit 100 tokens",
        ),
        (
            {"prompts": [{"tokens": 3, "chain": ID}]},
            "line 3: prompts: the chain does not fit 3 tokens",
        ),
    ],
)
async def test_chains_that_cannot_be_are_told_by_their_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "log"
    await write(path, ((range(200),), {}), ((range(200),), {}))
    rewrite(path, 2, lambda record: record.update(change))
    with pytest.raises(TraceError, match=message):
        LoggedTrace(path)


async def test_a_session_goes_into_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "log"
    await write(path, ((range(200),), {}))
    rewrite(path, 1, lambda record: record["request"].update(session="s-1"))
    [request] = trace_requests(path)
    assert request.session == "s-1"
    assert msgspec.json.decode(msgspec.json.encode(request), type=type(request)) == request
