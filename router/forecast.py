"""What was known of a prompt on a replica, before the trust in that replica was applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from policies.view import Warmth
from router.trust import Ground

if TYPE_CHECKING:
    from router.chooser import Choice, Routed
    from state.model import ReplicaId

BYTES: Final = Ground.BYTES
EVENTS: Final = Ground.EVENTS
PLACEMENTS: Final = Ground.PLACEMENTS
"""By names of their own: an enumeration's members are slow to reach."""


class Forecast(NamedTuple):
    """What was known of a prompt on a replica, in tokens, before ``credit`` was applied.

    Up to ``reach_tokens`` by events or placements, of which ``certain_tokens`` are computed and in
    GPU memory; ``learned_tokens`` more are proved by reports.
    """

    certain_tokens: int
    reach_tokens: int
    learned_tokens: int = 0
    credit: float = 1.0

    @property
    def promised_tokens(self) -> int:
        """All that would count if the replica were trusted."""
        return self.reach_tokens + self.learned_tokens


def ground_of(routed: Routed, *, is_told: bool) -> Ground:
    """Return what predictions are made of; ``is_told``: events tell, and the state is live."""
    if not routed.is_exact:
        return BYTES
    return EVENTS if is_told else PLACEMENTS


def forecast_of(routed: Routed, choice: Choice) -> Forecast:
    """Return what was known of the chosen replica when it was chosen."""
    replica = choice.member.replica
    forecast = routed.forecasts.get(replica) if routed.forecasts else None
    if forecast is not None:
        return forecast
    for view in choice.views:
        if view.replica == replica:
            certain_tokens = view.cached_tokens - view.pending_tokens
            return Forecast(certain_tokens, view.cached_tokens + view.lower_tier_tokens)
    return Forecast(0, 0)


def credits_of(routed: Routed | None) -> dict[str, float]:
    """Return by what the last view of each replica was multiplied, where that is not 1."""
    forecasts = routed.forecasts if routed is not None else None
    if not forecasts:
        return {}
    return {replica: one.credit for replica, one in forecasts.items() if one.credit < 1.0}


def promised_tokens(routed: Routed | None, replica: ReplicaId) -> int | None:
    """Return what a replica's prediction would be if it were trusted; None where it is."""
    forecast = routed.forecasts.get(replica) if routed is not None and routed.forecasts else None
    if forecast is None or forecast.credit >= 1.0:
        return None
    return forecast.promised_tokens


def credited(warmth: Warmth, credit: float) -> Warmth:
    """Return the part of ``warmth`` that counts; what this router sent there stays a fact."""
    return Warmth(
        round(warmth.cached_tokens * credit),
        round(warmth.pending_tokens * credit),
        round(warmth.lower_tier_tokens * credit),
        warmth.placed_tokens,
    )
