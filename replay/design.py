"""Where to look: a Latin hypercube for the whole space, a pattern around one place of it.

Places are in the unit cube: 0 is the low end of a dimension's range and 1 its high end.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

Place: TypeAlias = tuple[float, ...]

CANDIDATES: Final = 24
"""So many hypercubes are drawn; the one whose closest two places are farthest apart is used."""


def latin_hypercube(places: int, dimensions: int, seed: int) -> tuple[Place, ...]:
    """Return ``places``, in each dimension one per stratum of width ``1 / places``.

    McKay, Beckman and Conover 1979; the maximin choice is Morris and Mitchell's, 1995.
    """
    draw = random.Random(seed)  # noqa: S311 - a design, not a secret
    drawn = [_one_hypercube(places, dimensions, draw) for _ in range(CANDIDATES)]
    return max(drawn, key=_closest_pair)


def pattern(center: Place, step: float) -> tuple[Place, ...]:
    """Return the places one ``step`` from ``center`` along each axis, cut off at the cube."""
    around = []
    for axis, value in enumerate(center):
        for moved in (value - step, value + step):
            inside = min(max(moved, 0.0), 1.0)
            if inside != value:
                around.append((*center[:axis], inside, *center[axis + 1 :]))
    return tuple(around)


def _one_hypercube(places: int, dimensions: int, draw: random.Random) -> tuple[Place, ...]:
    columns = []
    for _ in range(dimensions):
        strata = list(range(places))
        draw.shuffle(strata)
        columns.append([(stratum + draw.random()) / places for stratum in strata])
    return tuple(zip(*columns, strict=True))


def _closest_pair(places: Sequence[Place]) -> float:
    """Return the squared distance of the two closest places."""
    return min(
        (
            sum((a - b) ** 2 for a, b in zip(one, other, strict=True))
            for row, one in enumerate(places)
            for other in places[:row]
        ),
        default=0.0,
    )
