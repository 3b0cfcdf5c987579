"""Tables of commands keep names whole on terminals that are as wide as they need."""

from __future__ import annotations

import argparse
import io
from typing import TYPE_CHECKING

from rich.console import Console

from router.billing import BillingReport, ScopeHeld, TenantUse
from router.replica_view import ReplicaView, RequestCounts, RouterView
from state.model import ReplicaId, Rung
from warmroute import tenants
from warmroute.replicas import WIDE_COLUMNS, show

if TYPE_CHECKING:
    import pytest

NAME = "gpu-node-17.rack-4.example.internal:28001"
SCOPE = "group:research-and-more"


def test_a_replica_is_named_in_one_line() -> None:
    router = RouterView(
        rung=Rung.LIVE,
        state_age_s=0.1,
        state=None,
        lookup="mirror",
        policy="expected_ttft",
        recent=RequestCounts(requests=0, answered={}, unreported={}),
    )
    view = ReplicaView(
        replica=ReplicaId(NAME),
        endpoint=f"http://{NAME}",
        up=True,
        draining=False,
        registered=False,
        has_events=False,
        can_fetch=False,
        models=("m",),
        inflight=0,
        inflight_elsewhere=0,
        load=None,
        resident_blocks=2_000,
        capacity_tokens=16_000,
        generation="g" * 80,
    )
    console = Console(file=io.StringIO(), width=WIDE_COLUMNS)
    show(console, router, [view])
    assert isinstance(console.file, io.StringIO)
    assert NAME in console.file.getvalue()


def test_a_report_of_tenants_fits_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use = TenantUse(tenant="physics", scope=SCOPE, requests=1, prompt_tokens=2_460)
    report = BillingReport(
        since_unix_s=1.0, held_age_s=1.0, tenants=[use], scopes=[ScopeHeld(scope=SCOPE)]
    )
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(tenants, "fetch_report", lambda _admin: report)
    assert tenants.run(argparse.Namespace(action="report", admin=None, json=False)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(SCOPE in line for line in lines) == 2
    assert max(map(len, lines)) <= 80
