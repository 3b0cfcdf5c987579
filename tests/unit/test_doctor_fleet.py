"""What the doctor says of a fleet as a whole: who is drained, and who is not there any more."""

from __future__ import annotations

from typing import Any

from router.replica_view import ReplicaView, RequestCounts, RouterView
from state.model import Rung
from warmroute.doctor_case import Case, Code
from warmroute.doctor_fleet import judge


def view(name: str, *, draining: bool = False, models: tuple[str, ...] = ("m",)) -> ReplicaView:
    return ReplicaView(
        replica=name,
        endpoint="http://10.0.0.7:8000",
        up=True,
        draining=draining,
        has_events=True,
        can_fetch=False,
        models=models,
        inflight=0,
        inflight_elsewhere=0,
        load=None,
        resident_blocks=0,
        capacity_tokens=None,
    )


def of_fleet(*views: ReplicaView, **recent: Any) -> list[tuple[Code, str | None, str]]:
    router = RouterView(
        rung=Rung.LIVE,
        state_age_s=0.1,
        state=None,
        lookup="mirror",
        policy="expected_ttft",
        recent=RequestCounts(requests=100, **recent),
    )
    report = judge(Case(router=router, fleet=views))
    return [(each.code, each.replica, each.seen) for each in report.findings]


def test_a_fleet_that_is_drained_is_said_and_one_that_is_not_quite_is_not() -> None:
    names = [f"r{number}" for number in range(6)]
    ((code, replica, seen),) = of_fleet(*(view(name, draining=True) for name in names))
    assert (code, replica) == (Code.FLEET_DRAINED, None)
    assert "whole fleet is drained: r0, r1, r2, r3 and 2 more." in seen
    assert of_fleet(*(view(name, draining=name != "r5") for name in names)) == []
    assert of_fleet() == []


def test_a_fleet_of_which_nobody_is_left_is_told_by_who_was_there() -> None:
    assert [name for _, name, _ in of_fleet(answered={"a": 1, "b": 2})] == ["a", "b"]


def test_a_model_whose_replicas_are_all_drained_is_named_with_them() -> None:
    ((code, _, seen),) = of_fleet(
        view("a", draining=True, models=("m", "n")), view("b", models=("n",))
    )
    assert code is Code.FLEET_DRAINED
    assert "All replicas of m are drained: a." in seen
    unknown = view("b", models=())  # its models are not known yet
    assert of_fleet(view("a", draining=True), unknown) == []


def test_a_replica_that_left_is_named_by_what_it_answered() -> None:
    left = of_fleet(view("r1"), answered={"r1": 60, "gone": 40})
    assert [(code, replica) for code, replica, _ in left] == [(Code.REPLICA_LEFT, "gone")]
    assert "40 of the last 100 requests" in left[0][2]
    assert judge(Case()).findings == ()
