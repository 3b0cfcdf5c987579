"""What a decision was made on, packed while its answer goes on for long, and made again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import pytest

from policies.model import Candidate, Decision, Reason, ReplicaView
from router.chooser import Choice
from router.packed_look import PackedLook, pack, unpack
from state.model import ReplicaId

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = [ReplicaId(f"replica-{number}.example:8000") for number in range(64)]
TERMS = {"wait": 1.5, "prefill": math.inf, "stall": 0.0, "copy": -0.25, "active": 3.0}
BYTES_A_REPLICA = 256


def views_of(names: Sequence[ReplicaId]) -> tuple[ReplicaView, ...]:
    return tuple(
        ReplicaView(
            name, at, None, 0.1 + at, 6_400, 64, 0, 2, 1_000, 3.75, 0.5, 1.25, 77, 2.5, 1 << 40,
            None, 3, 0.125, 0, at, can_fetch=at % 2 == 0,
        )
        for at, name in enumerate(names)
    )  # fmt: skip


def choice_of(views: tuple[ReplicaView, ...], scored: Sequence[ReplicaId]) -> Choice:
    """Return a choice of the last one."""
    candidates = tuple(
        Candidate(name, 0.5 * at, dict(TERMS), 6_400, at) for at, name in enumerate(scored)
    )
    choice = Choice(*[cast("Any", None)] * 7)  # what it took is of no interest here
    choice.views = views
    choice.decision = Decision(NAMES[-1], Reason.SPILL, 9, candidates, 1, 2.5, NAMES[0])
    return choice


@pytest.mark.parametrize(
    "scored",
    [NAMES, NAMES[::-1], NAMES[:1], []],
    ids=["of all", "in another order", "of one", "of none"],
)
def test_views_and_candidates_go_and_come_back_as_they_were(scored: list[ReplicaId]) -> None:
    choice = choice_of(views_of(NAMES), scored)
    views, decision = choice.views, choice.decision
    pack(choice)
    pack(choice)
    assert (choice.views, choice.decision.candidates) == ((), ())
    assert (choice.decision.replica, choice.decision.reason) == (NAMES[-1], Reason.SPILL)
    unpack(choice)
    assert (choice.views, choice.decision, choice.packed) == (views, decision, None)
    assert all(view.replica is name for view, name in zip(choice.views, NAMES, strict=True))
    unpack(choice)
    assert (choice.views, choice.decision) == (views, decision)


def test_what_is_kept_of_a_large_fleet_is_small() -> None:
    choice = choice_of(views_of(NAMES), NAMES)
    packed = PackedLook(choice.views, choice.decision)
    assert packed.packed_bytes <= BYTES_A_REPLICA * len(NAMES)
