"""How a request is accounted for that ends in no foreseen way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from router.chooser import DecidedBy
from router.config import Config
from router.proxy import Proxy
from router.request import read_headers
from router.trace import DecisionTrace
from state.model import Rung

if TYPE_CHECKING:
    from router.trace import DecisionRecord


async def test_a_fault_of_the_router_counts_as_failed_and_not_as_a_client_that_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I-1: the ledger says what the client was told."""

    async def failing(*_: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr("router.proxy.read_body", failing)
    counted: list[DecisionRecord] = []
    parts: Any = SimpleNamespace(
        config=Config(),
        reader=SimpleNamespace(freshness=lambda: (Rung.LIVE, 0.0)),
        chooser=SimpleNamespace(seed=1, decided_by=DecidedBy(Config().policy, 0)),
        trace=DecisionTrace(8),
        metrics=SimpleNamespace(finished=counted.append),
        clock=float,
        unix_clock=float,
        mint_id=lambda: "r1",
        gate=None,
        billing=None,
        feedback=None,
        history=None,
        admission=None,
    )
    request: Any = SimpleNamespace(headers=read_headers(()), method="POST", path="/v1/completions")
    proxy = Proxy(parts)
    with pytest.raises(ZeroDivisionError):
        await proxy.handle(request)
    assert [(record.status, record.outcome) for record in counted] == [(500, "failed")]
    assert proxy.open_requests == 0
