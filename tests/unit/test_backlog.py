"""What waits for a slow state store is bounded."""

from __future__ import annotations

from sidecar.backlog import Backlog
from sidecar.change import BlockChange, Fold
from state.model import BlockId, NamespaceId, Tier


def fold(stored: int = 0, removed: int = 0, *, is_clear: bool = False) -> Fold:
    names = [BlockId(bytes([number] * 16)) for number in range(stored + removed)]
    change = BlockChange(
        namespace=NamespaceId("n"),
        tier=Tier.GPU,
        stored=tuple(names[:stored]),
        removed=tuple(names[stored:]),
    )
    return Fold(changes=(change,) if names else (), is_clear=is_clear)


def test_what_waits_is_handed_on_in_order() -> None:
    backlog = Backlog(10)
    folds = [fold(2), fold(1, 2), fold(4)]
    assert all(map(backlog.add, folds))
    assert (len(backlog), backlog.blocks) == (3, 9)
    assert backlog.take() == folds
    assert (len(backlog), backlog.blocks) == (0, 0)


def test_too_much_leaves_nothing() -> None:
    backlog = Backlog(10)
    assert backlog.add(fold(10))
    assert not backlog.add(fold(0, 1))
    assert (backlog.take(), backlog.blocks) == ([], 0)
    assert backlog.add(fold(10))


def test_a_clear_takes_the_place_of_all_before_it() -> None:
    backlog = Backlog(10)
    backlog.add(fold(9))
    cleared = fold(3, is_clear=True)
    assert backlog.add(cleared)
    assert backlog.take() == [cleared]
    assert all(backlog.add(fold(is_clear=True)) for _ in range(100))
    assert len(backlog) == 1
