"""Lives of caches: what a sidecar calls them, and what routers make of it."""

from __future__ import annotations

from msgspec import structs

from router.life import LIVES_KEPT, LifeBook
from sidecar.life import CacheLife
from sidecar.metrics import RenewalReason
from sidecar.profile import EngineProfile
from state.model import Generation, ModelIdentity, ReplicaId, ReplicaRecord

PROFILE = EngineProfile(identity=ModelIdentity(model="m"), page_tokens=16, started_at_s=1000.25)


def began(*steps: tuple[EngineProfile, RenewalReason], is_known: bool = True) -> CacheLife:
    life = CacheLife()
    for profile, reason in steps:
        life.begin(profile, reason, is_known=is_known)
    return life


def test_two_sidecars_of_one_process_call_its_cache_the_same() -> None:
    first = began((PROFILE, RenewalReason.START))
    second = began((PROFILE, RenewalReason.START), (PROFILE, RenewalReason.LOST))
    assert first.name == second.name != ""
    assert "1000" not in first.name


def test_another_process_and_other_weights_are_other_lives() -> None:
    later = structs.replace(PROFILE, started_at_s=1000.26)
    identity = structs.replace(PROFILE.identity, weights_revision="two")
    other = structs.replace(PROFILE, identity=identity)
    names = {began((each, RenewalReason.START)).name for each in (PROFILE, later, other)}
    assert len(names) == 3


def test_a_cache_that_was_voided_within_a_process_is_another_life_until_the_next_process() -> None:
    for reason in (RenewalReason.WEIGHTS, RenewalReason.ASKED):
        life = began((PROFILE, RenewalReason.START))
        before = life.name
        life.begin(PROFILE, reason, is_known=True)
        voided = life.name
        assert voided != before
        life.begin(PROFILE, RenewalReason.LOST, is_known=True)
        assert life.name == voided
        life.begin(PROFILE, reason, is_known=True)
        assert life.name not in {before, voided}


def test_an_engine_that_tells_nothing_has_no_name_for_its_life() -> None:
    untold = structs.replace(PROFILE, started_at_s=None)
    assert began((untold, RenewalReason.START)).name == ""
    assert began((untold, RenewalReason.START)).settled(untold) == ""


def test_a_restart_that_events_told_of_has_a_name_once_the_engine_was_asked() -> None:
    later = structs.replace(PROFILE, started_at_s=2000.0)
    life = began((PROFILE, RenewalReason.START))
    life.begin(PROFILE, RenewalReason.RESTARTED, is_known=False)
    assert life.name == ""
    assert life.settled(later) == began((later, RenewalReason.START)).name
    assert life.settled(PROFILE) == life.name


def test_a_restart_that_was_none_is_the_life_that_it_was() -> None:
    """A replay that did not come in time looks like one: the process says that it is the same."""
    life = began((PROFILE, RenewalReason.START))
    before = life.name
    life.begin(PROFILE, RenewalReason.RESTARTED, is_known=False)
    assert life.settled(PROFILE) == before


def record(generation: str, life: str = "", replica: str = "gpu-0") -> ReplicaRecord:
    return ReplicaRecord(
        replica=ReplicaId(replica),
        endpoint="http://127.0.0.1:9",
        generation=Generation(generation),
        identity=ModelIdentity(model="m"),
        page_tokens=16,
        sidecar="one",
        cache_life=life,
    )


def test_a_life_goes_on_in_its_generation_and_under_its_name() -> None:
    book = LifeBook()
    told = [
        (record("1", "a"), False),
        (record("1", "a"), False),
        (record("2", "a"), False),
        (record("3", "b"), True),
        (record("3", "c"), False),  # its name is told later
        (record("4", "c"), False),
        (record("5", ""), True),
        (record("6", ""), True),
        (record("6", "d"), False),
    ]
    assert [book.look(each) for each, _ in told] == [is_other for _, is_other in told]


def test_a_replica_has_returned_where_it_was_there_before_in_the_same_life() -> None:
    book = LifeBook()
    assert not book.has_returned(record("1", "a"))
    book.look(record("1", "a"))
    assert not book.has_returned(record("1", "a"))  # it came, for the first time
    assert book.has_returned(record("2", "a"))
    assert not book.has_returned(record("2", "b"))
    book.look(record("2", "a"))
    assert book.has_returned(record("2", "a"))
    book.look(record("3", "b"))
    assert not book.has_returned(record("3", "b"))


def test_a_replica_that_left_and_is_back_in_its_generation_has_returned() -> None:
    book = LifeBook()
    book.leave(ReplicaId("gpu-0"))
    book.look(record("1"))
    book.leave(ReplicaId("gpu-0"))
    assert book.has_returned(record("1"))
    assert not book.has_returned(record("2"))


def test_only_so_many_lives_are_kept_and_the_oldest_go_first() -> None:
    book = LifeBook()
    for number in range(LIVES_KEPT + 1):
        book.look(record("1", "a", f"r{number}"))
    assert not book.is_same(record("1", "a", "r0"))
    assert book.is_same(record("1", "a", "r1"))
