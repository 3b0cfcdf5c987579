"""What a timing audit makes of answers that are no stream of tokens."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from support.raw import SSE, FakeReplica, Talk, chunk, sized
from warmroute import audit_probe
from warmroute.admin_client import session
from warmroute.audit_probe import AuditError, Caller

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

STREAM = SSE + chunk(b"data: {}\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
BUSY = sized(b"{}", status=b"503 Service Unavailable")
LIMITED = sized(b"{}", status=b"429 Too Many Requests")


@asynccontextmanager
async def calling(*answers: bytes) -> AsyncIterator[tuple[Caller, FakeReplica]]:
    """Yield a caller of a target that gives these answers in turn, the last one for ever."""
    left = list(answers)

    async def play(talk: Talk) -> None:
        while True:
            await talk.request()
            await talk.say(left.pop(0) if len(left) > 1 else left[0])

    target = FakeReplica(play)
    endpoint = await target.start()
    try:
        async with session() as http:
            yield Caller(http, f"http://{endpoint.authority}", "m", "sk-1", "KEY"), target
    finally:
        await target.stop()


async def test_a_busy_target_is_asked_again_and_only_the_answer_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit_probe, "BUSY_WAIT_S", 0.0)
    async with calling(BUSY, LIMITED, STREAM) as (caller, target):
        assert await caller.first_token_ms("hello") > 0
        assert len(target.requests) == 3
    async with calling(BUSY) as (caller, target):
        with pytest.raises(AuditError, match="is busy"):
            await caller.first_token_ms("hello")
        assert len(target.requests) == audit_probe.BUSY_TRIES


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (sized(b"{}", status=b"401 Unauthorized"), r"does not know the key in \$KEY"),
        (sized(b"{}", status=b"404 Not Found"), r"answered 404 to the key in \$KEY"),
        (sized(b'{"choices":[]}'), "expected a stream of events"),
    ],
)
async def test_other_answers_end_the_audit(answer: bytes, expected: str) -> None:
    async with calling(answer) as (caller, _):
        with pytest.raises(AuditError, match=expected):
            await caller.first_token_ms("hello")
