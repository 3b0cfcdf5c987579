"""Who is beaten by nobody in everything."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def is_dominated(one: Sequence[float], other: Sequence[float]) -> bool:
    """Say whether ``other`` is as low as ``one`` in everything, and lower in something."""
    pairs = list(zip(one, other, strict=True))
    return all(b <= a for a, b in pairs) and any(b < a for a, b in pairs)


def pareto_front(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Return the indexes of ``costs`` that no other dominates, in order; lower is better."""
    return tuple(
        index
        for index, one in enumerate(costs)
        if not any(is_dominated(one, other) for other in costs)
    )
