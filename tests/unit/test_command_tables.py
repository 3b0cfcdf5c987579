"""Tables of commands keep names whole on terminals that are as wide as they need."""

from __future__ import annotations

import argparse
import io

import pytest
from msgspec import structs
from rich.console import Console

from router.availability import Standing, StandingView
from router.billing import BillingReport, ScopeHeld, TenantUse
from router.replica_view import ReplicaView, RequestCounts, RouterView
from state.model import ReplicaId, Rung
from warmroute import tenants
from warmroute.replicas import WIDE_COLUMNS, health, show

NAME = "gpu-node-17.rack-4.example.internal:28001"
SCOPE = "group:research-and-more"
VIEW = ReplicaView(
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


def test_a_replica_is_named_in_one_line() -> None:
    router = RouterView(
        rung=Rung.LIVE,
        state_age_s=0.1,
        state=None,
        lookup="mirror",
        policy="expected_ttft",
        recent=RequestCounts(requests=0, answered={}, unreported={}),
    )
    console = Console(file=io.StringIO(), width=WIDE_COLUMNS)
    show(console, router, [VIEW])
    assert isinstance(console.file, io.StringIO)
    assert NAME in console.file.getvalue()


@pytest.mark.parametrize(
    ("standing", "words"),
    [
        (StandingView(standing=Standing.UP), "up"),
        (
            StandingView(standing=Standing.DOWN, reason="failed its checks"),
            "down (failed its checks)",
        ),
        (
            StandingView(standing=Standing.EJECTED, reason="failures", left_s=12.2),
            "ejected for 13 s (failures)",
        ),
        (StandingView(standing=Standing.PROBATION, reason="flapping"), "probation (flapping)"),
        (StandingView(standing=Standing.SLOW_START, left_s=29.0), "slow start for 29 s"),
    ],
)
def test_a_replica_is_shown_with_what_holds_requests_off(
    standing: StandingView, words: str
) -> None:
    view = structs.replace(VIEW, standing=standing)
    assert health(view) == words
    assert health(structs.replace(view, draining=True)) == "draining"


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
