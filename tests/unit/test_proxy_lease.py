"""Whatever ends an attempt, what it took is given back by the block that took it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from policies.model import Decision, Reason
from router.account import Call
from router.attempt import Attempts
from router.chooser import Choice
from router.config import Config
from router.error import ReplicaClosedError
from router.fleet import Member
from router.footprint import Footprints
from router.request import read_headers
from router.upstream import Endpoint
from state.lease import LeaseBook
from state.placement import Placements
from support.fleet_state import A, blocks


def call() -> Call:
    return Call(
        request_id="r1",
        client_request_id=None,
        path="/v1/completions",
        started_s=0.0,
        started_unix_s=0.0,
    )


@pytest.mark.parametrize("error", [OSError("close failed"), ReplicaClosedError("gone")])
async def test_a_connection_that_fails_to_close_leaves_no_lease(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A19: the error goes on, the lease ends once, the prompt does not count as resident."""

    async def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr("router.attempt.relay", failing)
    leases, placements, footprints = LeaseBook(), Placements(), Footprints()
    choice = Choice(
        member=Member(replica=A, endpoint=Endpoint("127.0.0.1", 9)),
        decision=Decision(replica=A, reason=Reason.LOAD, predicted_cached_tokens=0, candidates=()),
        lease=leases.acquire(A, 100, 0.0),
        book=placements,
        placements=[placements.place(A, blocks(0, 1), 0.0)],
        footprint=footprints.take(A, (blocks(0, 1),), 64, 130, 0),
        is_told=True,
    )
    parts: Any = SimpleNamespace(
        config=Config(),
        pool=SimpleNamespace(key_line=b""),
        clock=float,
        hold=None,
        recovery=SimpleNamespace(may_replay=lambda: True),
    )
    request: Any = SimpleNamespace(
        method="POST", target="/v1/completions", headers=read_headers(())
    )
    made = call()
    with pytest.raises(type(error)):
        await Attempts(cast("Any", parts)).run(request, made, choice)
    assert (leases.open_count, leases.inflight(A)) == (0, 0)
    assert placements.overlap(blocks(0, 1), 0.0) == {}
    assert footprints.room_tokens(A, 64, (blocks(0),), 64, 128) is None
    assert len(made.attempts) == 1
