"""What follows a failed attempt: budget, patience, deadline, and where a suspect may go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from router.account import Call
from router.endpoint import Endpoint
from router.error import (
    NoDescriptorError,
    NoReplicaError,
    QuarantinedError,
    ReplicaBusyError,
    ReplicaClosedError,
    ReplicaConnectTimeoutError,
    ReplicaDiedError,
    ReplicaError,
    ReplicaSilentError,
    ReplicaTimeoutError,
    ReplicaUnreachableError,
)
from router.fleet import Member
from router.quarantine import Quarantine, QuarantineSettings
from router.recovery import Recovery, RecoveryParts
from router.retry import RetryReason
from router.retry_budget import RetryBudget
from router.retry_setting import RetrySettings
from router.verdict import of_relayed
from state.model import ReplicaId
from support.verdicts import answer

if TYPE_CHECKING:
    from collections.abc import Collection

MEMBERS = {
    ReplicaId(name): Member(replica=ReplicaId(name), endpoint=Endpoint("127.0.0.1", 9_000 + at))
    for at, name in enumerate("abcd")
}
A, B, C, D = MEMBERS
BODY = b'{"model":"m"}'


class Rig:
    """Recovery on a fleet of four of which ``dead`` refuse connections; waiting takes no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, settings: RetrySettings) -> None:
        self.now_s = 0.0
        self.standing = (0, 1)
        self.waits = 0
        self.dead: set[ReplicaId] = set()
        self.buried: list[ReplicaId] = []
        self.doubted: list[ReplicaId] = []
        self.failed: list[ReplicaError] = []
        self.examined = 0
        self.quarantine = Quarantine(QuarantineSettings(), b"s" * 32)
        self.budget = RetryBudget(settings, 0.0)
        stand_in: Any = self
        self.recovery = Recovery(
            RecoveryParts(
                settings=settings,
                fleet=cast("Any", SimpleNamespace(members=lambda: MEMBERS)),
                health=cast(
                    "Any",
                    SimpleNamespace(refused=self.buried.append, doubt=self.doubted.append),
                ),
                availability=stand_in.availability(),
                budget=self.budget,
                quarantine=self.quarantine,
                autopsy=stand_in,
                clock=lambda: self.now_s,
                standing=lambda: self.standing,
            )
        )
        monkeypatch.setattr("router.recovery.asyncio.sleep", self.sleep)

    def availability(self) -> Any:
        def candidates(_: str | None, tried: Collection[ReplicaId]) -> list[Member]:
            return [member for name, member in MEMBERS.items() if name not in tried]

        return SimpleNamespace(
            candidates=candidates,
            failed=lambda _, error: self.failed.append(error),
            answered=lambda _, relayed: of_relayed(relayed),
        )

    async def sleep(self, for_s: float) -> None:
        self.waits += 1
        self.now_s += for_s

    async def is_dead(self, member: Member) -> bool:
        self.examined += 1
        return member.replica in self.dead

    def call(self) -> Call:
        call = Call(
            request_id="r", client_request_id=None, path="/v1/completions", started_s=self.now_s,
            started_unix_s=0.0,
        )  # fmt: skip
        self.recovery.admit(call, BODY, 1)
        return call

    async def settle(
        self,
        call: Call,
        error: ReplicaError,
        replica: ReplicaId = A,
        body: bytes = BODY,
        open_requests: int = 10,
        *,
        others: bool = True,
    ) -> set[ReplicaId]:
        """Return who is not to get the next try; ``others``: there is somebody else."""
        tried: set[ReplicaId] = set() if others else set(MEMBERS)
        call.attempts.append(cast("Any", None))
        await self.recovery.settle(error, call, body, MEMBERS[replica], tried, open_requests)
        return tried


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch, RetrySettings(per_s=1_000.0))


async def test_a_refused_connection_takes_the_replica_out_and_goes_elsewhere(rig: Rig) -> None:
    assert await rig.settle(rig.call(), ReplicaUnreachableError("m")) == {A}
    assert (rig.buried, rig.examined) == ([A], 0)


async def test_a_slow_connection_only_asks_for_a_check(rig: Rig) -> None:
    assert await rig.settle(rig.call(), ReplicaConnectTimeoutError("m")) == {A}
    assert (rig.buried, rig.doubted) == ([], [A])


async def test_a_closed_connection_is_a_death_where_nobody_listens_any_more(rig: Rig) -> None:
    with pytest.raises(ReplicaClosedError):
        await rig.settle(rig.call(), ReplicaClosedError("m"))
    assert rig.buried == []
    rig.dead.add(A)
    call = rig.call()
    assert await rig.settle(call, ReplicaClosedError("m")) == {A}
    assert (rig.buried, call.was_sent) == ([A], True)


async def test_what_died_with_two_replicas_is_not_sent_to_a_third(rig: Rig) -> None:
    """C-25: nor is the next one like it."""
    call = rig.call()
    await rig.settle(call, ReplicaDiedError("m"), A)
    with pytest.raises(QuarantinedError) as raised:
        await rig.settle(call, ReplicaDiedError("m"), B)
    assert raised.value.retry_after_s == 600
    with pytest.raises(QuarantinedError):
        rig.call()
    assert rig.quarantine.refused == 2


async def test_suspects_go_to_different_replicas_as_long_as_there_are_any(rig: Rig) -> None:
    calls = [rig.call() for _ in range(4)]
    for number, call in enumerate(calls):
        tried = await rig.settle(call, ReplicaDiedError("m"), A, b"body %d" % number, 100)
        free = [each for each in (B, C, D) if each not in tried] or [B]
        rig.recovery.began(call, free[0])
    assert [call.suspect_on for call in calls] == [B, C, D, B]
    for call in calls:
        rig.recovery.ended(call)
        rig.recovery.ended(call)
    assert await rig.settle(rig.call(), ReplicaDiedError("m"), A, b"last") == {A}


@pytest.mark.parametrize(
    ("rank", "routers", "wanted"),
    [(0, 2, [C, B, D]), (1, 2, [B, D, C]), (2, 3, [C, B, D]), (3, 4, [D, B, C]), (7, 8, [B, C, D])],
)
async def test_suspects_of_several_routers_go_to_different_parts_of_the_fleet(
    rig: Rig, rank: int, routers: int, wanted: list[ReplicaId]
) -> None:
    """Or the one that kills its second replica takes with it what another router sent there."""
    rig.standing = (rank, routers)
    calls = [rig.call() for _ in wanted]
    for number, call in enumerate(calls):
        tried = await rig.settle(call, ReplicaDiedError("m"), A, b"body %d" % number, 100)
        rig.recovery.began(call, next(each for each in (B, C, D) if each not in tried))
    assert [call.suspect_on for call in calls] == wanted


async def test_nobody_else_is_kept_from_a_part_of_the_fleet(rig: Rig) -> None:
    rig.standing = (0, 2)
    assert await rig.settle(rig.call(), ReplicaUnreachableError("m"), A) == {A}


async def test_where_a_replica_was_lost_a_request_waits_for_its_turn(rig: Rig) -> None:
    claims = [rig.budget.take(10, 0.0, is_lost=True) for _ in range(3)]
    with pytest.raises(ReplicaUnreachableError):
        await rig.settle(rig.call(), ReplicaUnreachableError("m"))
    assert 9.9 <= rig.now_s <= 10.1
    assert claims[0] is not None
    claims[0].end()
    await rig.settle(rig.call(), ReplicaUnreachableError("m"))
    assert rig.budget.in_progress == 3


async def test_of_many_that_wait_each_looks_again_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replica with thousands of requests that dies must not busy the loop with their waiting."""
    rig = Rig(monkeypatch, RetrySettings(reserve=0, ratio=0.0, patience_s=10.0))
    monkeypatch.setattr(rig.recovery, "_waiting", 4_999)
    with pytest.raises(ReplicaUnreachableError):
        await rig.settle(rig.call(), ReplicaUnreachableError("m"))
    assert rig.waits == 2
    assert rig.now_s == pytest.approx(10.0)


async def test_after_an_answer_nobody_waits_for_the_budget(rig: Rig) -> None:
    for _ in range(3):
        assert rig.budget.take(10, 0.0, is_lost=True) is not None
    with pytest.raises(ReplicaBusyError):
        await rig.settle(rig.call(), ReplicaBusyError(503, None))
    assert rig.waits == 0


async def test_a_claim_ends_with_the_attempt_it_was_for(rig: Rig) -> None:
    call = rig.call()
    await rig.settle(call, ReplicaUnreachableError("m"))
    assert rig.budget.in_progress == 1
    await rig.settle(call, ReplicaUnreachableError("m"), B)
    assert rig.budget.in_progress == 1
    with pytest.raises(ReplicaUnreachableError):
        await rig.settle(call, ReplicaUnreachableError("m"), C)
    assert rig.budget.in_progress == 0


def told(rig: Rig, reason: str) -> float:
    """Return how often a try was denied for ``reason``."""
    samples = rig.recovery.denied.metric().samples
    return sum(each.value for each in samples if each.labels.get("reason") == reason)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ReplicaTimeoutError("m"), ReplicaTimeoutError),
        (ReplicaSilentError("m"), ReplicaSilentError),
        (ReplicaUnreachableError("m"), NoReplicaError),
        (ReplicaBusyError(503, None), NoReplicaError),
    ],
)
async def test_where_no_replica_is_left_nothing_is_spent_and_that_is_counted(
    rig: Rig, error: ReplicaError, raised: type[Exception]
) -> None:
    """Both kinds of the budget are whole afterwards, and a late replica is told as late."""
    for _ in range(10):
        with pytest.raises(raised):
            await rig.settle(rig.call(), error, others=False)
    assert told(rig, "no_replica") == 10
    assert told(rig, "budget") == 0
    assert (rig.budget.in_progress, rig.waits) == (0, 0)
    fresh = RetryBudget(RetrySettings(per_s=1_000.0), 0.0)
    for _ in range(10):
        fresh.deposit()
    for budget in (rig.budget, fresh):
        claims = [budget.take(1_000, 0.0, is_lost=False) for _ in range(20)]
        assert sum(claim is not None for claim in claims) == 5  # 3, and a fifth of 10


async def test_a_try_that_found_nobody_after_all_gives_back_what_it_took(rig: Rig) -> None:
    """Who was left may be gone by the time that it is chosen."""
    for outcome, count in (("failed", 1), ("cancelled", 1)):
        call = rig.call()
        await rig.settle(call, ReplicaTimeoutError("m"))
        call.outcome = outcome
        rig.recovery.ended(call)
        rig.recovery.ended(call)
        assert told(rig, "no_replica") == count
    assert rig.budget.in_progress == 0
    claims = [rig.budget.take(1_000, 0.0, is_lost=False) for _ in range(9)]
    assert sum(claim is not None for claim in claims) == 3


async def test_what_a_silent_replica_had_is_moved_like_what_a_dead_one_had(rig: Rig) -> None:
    """It waits for its turn, and is no suspect."""
    rig.budget.take(0, 0.0, is_lost=True)
    call = rig.call()
    assert await rig.settle(call, ReplicaSilentError("m")) == {A}
    assert call.retry_reason is RetryReason.SILENT
    assert not call.is_suspect
    with pytest.raises(ReplicaSilentError):
        await rig.settle(call, ReplicaSilentError("m"), B)


async def test_another_try_is_counted_once_and_not_before_it_goes_out(rig: Rig) -> None:
    """There may be no replica left for it."""

    def counted() -> float:
        return sum(sample.value for sample in rig.recovery.retries.metric().samples)

    call = rig.call()
    await rig.settle(call, ReplicaUnreachableError("m"))
    assert counted() == 0
    rig.recovery.began(call, B)
    rig.recovery.began(call, B)
    assert counted() == 1


async def test_no_try_begins_after_the_deadline_and_none_lasts_beyond_it(rig: Rig) -> None:
    call = rig.call()
    assert rig.recovery.first_byte_timeout_s(call, 300.0) is None
    rig.now_s = 300.0
    await rig.settle(call, ReplicaTimeoutError("m"))
    assert rig.recovery.first_byte_timeout_s(call, 300.0) == 30.0
    assert rig.recovery.first_byte_timeout_s(call, 20.0) is None
    late = rig.call()
    rig.now_s = 631.0
    with pytest.raises(ReplicaUnreachableError):
        await rig.settle(late, ReplicaUnreachableError("m"))


async def test_a_router_without_descriptors_blames_nobody(rig: Rig) -> None:
    with pytest.raises(NoDescriptorError):
        await rig.settle(rig.call(), NoDescriptorError("m"))
    assert (rig.buried, rig.doubted, rig.quarantine.marked) == ([], [], {})


async def test_an_answer_cut_short_by_a_death_makes_a_suspect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch, RetrySettings())
    monkeypatch.undo()
    rig.dead = {A, B}
    for replica in (A, B):
        call = rig.call()
        call.relayed = answer(outcome="failed", reason="truncated")
        rig.recovery.answered(call, BODY, MEMBERS[replica])
        for task in list(rig.recovery._examinations):
            await task
    with pytest.raises(QuarantinedError):
        rig.call()
    assert rig.buried == [A, B]
