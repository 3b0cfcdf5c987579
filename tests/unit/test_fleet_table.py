"""Who is in the fleet: registered and configured replicas, merged; unusable records left out."""

from __future__ import annotations

import pytest

from router.config import StaticReplica
from router.fleet import FleetTable, registered_member
from state.memory import MemoryState
from state.model import (
    Generation,
    ModelIdentity,
    ReplicaId,
    ReplicaRecord,
    ReplicaState,
    RouterId,
)


class Up:
    """Every replica is up; configured ones serve ``m``."""

    def is_up(self, replica: ReplicaId) -> bool:
        return replica != "down"

    def served_models(self, replica: ReplicaId) -> frozenset[str]:
        return frozenset({"m"} if replica.startswith("static") else set())


def record(name: str, endpoint: str, *, model: str = "m") -> ReplicaRecord:
    return ReplicaRecord(
        replica=ReplicaId(name),
        endpoint=endpoint,
        generation=Generation("g"),
        identity=ModelIdentity(model=model),
        page_tokens=16,
        sidecar=name,
    )


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "[fe80::1]",
        "[::ffff:169.254.169.254]",
        "0.0.0.0",  # noqa: S104 - refused here
        "[::]",
        "224.0.0.1",
    ],
)
def test_an_address_that_no_replica_has_is_left_out(host: str) -> None:
    """Whoever can write a record must not make the router call a cloud's metadata service."""
    state = ReplicaState(record=record("r", f"http://{host}:80"))
    assert registered_member(state) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7", "[::1]", "gpu-0.example"])
def test_an_address_that_a_replica_may_have_is_taken(host: str) -> None:
    assert registered_member(ReplicaState(record=record("r", f"http://{host}:80"))) is not None


async def test_a_configured_replica_that_a_sidecar_registers_is_one_replica() -> None:
    state = MemoryState(clock=lambda: 0.0)
    configured = (
        StaticReplica(url="http://127.0.0.1:1", name="static-1"),
        StaticReplica(url="http://127.0.0.1:2", name="static-2"),
    )
    table = FleetTable(state.reader(RouterId("me")), configured)
    assert list(table.members()) == ["static-1", "static-2"]
    await state.register(record("known", "http://127.0.0.1:1"))
    assert list(table.members()) == ["known", "static-2"]
    assert table.members()[ReplicaId("known")].has_events


async def test_a_registered_replica_is_configured_by_its_name_or_its_address() -> None:
    state = MemoryState(clock=lambda: 0.0)
    for name, port in (("by-name", 1), ("by-address", 8001), ("neither", 2)):
        await state.register(record(name, f"http://127.0.0.1:{port}"))
    own = [
        StaticReplica(url="http://127.0.0.1:9", name="by-name"),
        StaticReplica(url="http://127.0.0.1:8001", name="static"),
    ]
    fleet = FleetTable(state.reader(RouterId("me")), own)
    told = {name: fleet.is_configured(member) for name, member in fleet.members().items()}
    assert told == {"by-name": True, "by-address": True, "neither": False}


async def test_only_replicas_that_live_serve_the_model_and_were_not_tried_are_candidates() -> None:
    """B44, C12: what is known of a replica never makes it a candidate; being alive does."""
    state = MemoryState(clock=lambda: 0.0)
    table = FleetTable(state.reader(RouterId("me")), ())
    for name, model in (("a", "m"), ("b", "m"), ("down", "m"), ("other", "n")):
        await state.register(record(name, "http://127.0.0.1:1", model=model))
    names = [member.replica for member in table.candidates("m", Up(), {ReplicaId("b")})]
    assert names == ["a"]
    assert len(table.candidates(None, Up())) == 3
    assert table.models(Up()) == {"m", "n"}
