"""Random choices without a generator: each draw is a hash of the request's seed and ordinal.

The same request draws the same number in every process, so a replay repeats each decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from policies.model import Candidate, RoutingRequest

_BITS: Final = 64
_MASK: Final = 2**_BITS - 1
_STEP: Final = 0x9E3779B97F4A7C15
"""2^64 / golden ratio: consecutive ordinals land far apart (Weyl sequence)."""


def _mixed(value: int) -> int:
    """Return 64 bits, each of which depends on every bit of ``value`` (SplitMix64's finalizer)."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def draw_below(bound: int, request: RoutingRequest, stream: int = 0) -> int:
    """Return a number in [0, bound), uniform over ordinals; streams are independent."""
    start = _mixed(request.seed + _STEP * (stream + 1))
    return _mixed(start + _STEP * request.ordinal) * bound >> _BITS


def draw_near_best(
    candidates: tuple[Candidate, ...], tie_margin: float, request: RoutingRequest
) -> Candidate:
    """Return one of the candidates within ``tie_margin`` of the lowest score, each as likely.

    The order of ``candidates`` does not matter. Raises ValueError when there are none.
    """
    limit = min([candidate.score for candidate in candidates]) + tie_margin
    near = [candidate for candidate in candidates if candidate.score <= limit]
    if len(near) == 1:
        return near[0]
    near.sort(key=lambda candidate: candidate.replica)
    return near[draw_below(len(near), request)]
