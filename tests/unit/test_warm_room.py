"""When a replica has room for a request that nobody waits for, and when such a one has to go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from msgspec import structs

from router.availability import Standing
from router.endpoint import Endpoint
from router.fleet import Member
from router.overload import LoadRung
from router.warm_room import WarmRoom
from state.lease import LeaseBook
from state.model import LeaseTotals, ReplicaId, ReplicaLoad

if TYPE_CHECKING:
    from router.fleet import FleetTable
    from state.lease import Lease
    from state.store import FleetReader

A = ReplicaId("a")


class Site:
    """A replica with clients; ``room`` judges it."""

    def __init__(self) -> None:
        self.leases = LeaseBook()
        self.foreign = LeaseTotals()
        self.waiting = 0
        self.limit: int | None = None
        self.standing = Standing.UP
        self.rung = LoadRung.NORMAL
        self.member = Member(replica=A, endpoint=Endpoint.configured("http://127.0.0.1:1"))
        self.own = 0
        self.now_s = 0.0
        admission = SimpleNamespace(
            limit=lambda _: self.limit, inflight=self.leases.inflight, cap=10
        )
        entrance = SimpleNamespace(
            overload=self,
            waiting=lambda: self.waiting,
            admission=admission,
        )
        self.room = WarmRoom(
            fleet=cast("FleetTable", SimpleNamespace(members=lambda: {A: self.member})),
            reader=cast("FleetReader", SimpleNamespace(foreign_leases=lambda: {A: self.foreign})),
            leases=self.leases,
            standing=cast("Any", lambda _: SimpleNamespace(standing=self.standing)),
            entrance=cast("Any", entrance),
            own=lambda _: self.own,
            clock=lambda: self.now_s,
        )

    def client(self, *, tells_first: bool = True) -> Lease:
        """Let a client's prompt of one second come."""
        return self.leases.acquire(
            A, 8_000, self.now_s, prefill_ms=1_000.0, tells_first=tells_first
        )


@pytest.fixture
def site() -> Site:
    return Site()


def test_an_idle_replica_has_room_and_nothing_has_to_go(site: Site) -> None:
    assert site.room.has_room(site.member)
    assert not site.room.must_yield(A, 0)


@pytest.mark.parametrize("standing", set(Standing) - {Standing.UP, Standing.SLOW_START})
def test_a_replica_that_is_held_gets_nothing(site: Site, standing: Standing) -> None:
    site.standing = standing
    assert not site.room.has_room(site.member)
    assert site.room.must_yield(A, 0)


def test_slow_start_is_when_it_is_warmed_and_a_drain_is_not(site: Site) -> None:
    site.standing = Standing.SLOW_START
    assert site.room.has_room(site.member)
    site.member = structs.replace(site.member, is_draining=True)
    assert not site.room.has_room(site.member)
    assert site.room.must_yield(A, 0)


def test_a_client_that_waits_for_its_first_token_goes_first_here_or_elsewhere(site: Site) -> None:
    lease = site.client()
    assert not site.room.has_room(site.member)
    assert site.room.must_yield(A, 0)
    lease.first_byte(0.5)
    assert site.room.has_room(site.member)
    assert not site.room.must_yield(A, 0)
    site.foreign = LeaseTotals(inflight=1, prefilling=1, backlog_ms=5.0)
    assert not site.room.has_room(site.member)
    assert site.room.must_yield(A, 0)


def test_a_whole_answer_that_is_being_made_is_in_nobodys_way(site: Site) -> None:
    """It tells nothing before its end: its prompt counts as computed after its time."""
    site.client(tells_first=False)
    assert not site.room.has_room(site.member)
    site.now_s = 1.5
    assert site.room.has_room(site.member)
    assert not site.room.must_yield(A, site.room.clients(A))
    site.client(tells_first=False)
    assert site.room.must_yield(A, 1)


def test_its_own_request_is_no_client(site: Site) -> None:
    site.client(tells_first=False)
    site.own = 1
    assert site.room.clients(A) == 0
    assert not site.room.must_yield(A, 0)


@pytest.mark.parametrize(
    ("load", "has_room"),
    [
        (ReplicaLoad(running=9, queued=0, kv_used_fraction=0.5), True),
        (ReplicaLoad(queued=1), False),
        (ReplicaLoad(kv_used_fraction=0.9), False),
        (ReplicaLoad(), True),
    ],
)
def test_an_engine_with_a_queue_or_full_memory_has_no_room(
    site: Site, load: ReplicaLoad, *, has_room: bool
) -> None:
    site.member = structs.replace(site.member, load=load)
    assert site.room.has_room(site.member) is has_room


def test_who_waits_in_the_router_or_an_overload_leaves_no_room(site: Site) -> None:
    site.waiting = 1
    assert not site.room.has_room(site.member)
    assert site.room.must_yield(A, 0)
    site.waiting, site.rung = 0, LoadRung.SHED_LOW
    assert not site.room.has_room(site.member)


def test_a_place_is_left_for_the_next_client(site: Site) -> None:
    site.limit = 2
    site.client().first_byte(0.1)
    assert not site.room.has_room(site.member), "the second place is a client's"
    assert not site.room.must_yield(A, 0)
    site.client().first_byte(0.1)
    assert site.room.must_yield(A, 0)
    site.limit = 4
    assert site.room.has_room(site.member)
    for _ in range(7):
        site.leases.acquire(ReplicaId("b"), 1, 0.0)
    site.limit = None
    assert not site.room.has_room(site.member), "nine of the router's ten places are taken"
