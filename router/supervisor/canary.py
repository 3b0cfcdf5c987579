"""A canary as several processes tell of it, put together. Pure functions.

Processes are routers to each other: their figures meet in the state store, so that each knows those
of all, a second old. Where they differ the one counts that has ended it, then those that the store
answers, then the one that has counted most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from router.canary_admin import ProcessCanary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.canary_admin import CanaryView
    from router.canary_row import CanaryRow
    from router.snapshot import Snapshot

ENDING = "ending"


def canary(told: Mapping[int, CanaryView]) -> CanaryView:
    """Return how a canary stands in all processes, which are told by their numbers.

    It is ``ending`` where one of them has ended it by itself.
    """
    version = max(view.settings_version for view in told.values())
    newest = [view for view in told.values() if view.settings_version == version]
    counts = max(newest, key=_rank)
    return structs.replace(
        counts,
        processes=tuple(
            ProcessCanary(
                process=number,
                state=view.state,
                settings_version=view.settings_version,
                own=view.own,
                fault=view.fault,
            )
            for number, view in sorted(told.items())
        ),
    )


def _rank(view: CanaryView) -> tuple[bool, bool, int]:
    verdict = view.verdict
    counted = 0 if verdict is None else verdict.control_requests + verdict.candidate_requests
    return view.state == ENDING, not view.fault, counted


def canary_row(told: Sequence[Snapshot]) -> CanaryRow | None:
    """Return the same in a line; None where the newest settings have none."""
    version = max(one.router.settings_version for one in told)
    newest = [one.canary for one in told if one.router.settings_version == version]
    return max((row for row in newest if row is not None), key=_row_rank, default=None)


def _row_rank(row: CanaryRow) -> tuple[bool, bool, int]:
    counted = row.control_requests + row.candidate_requests
    return row.state == ENDING, not row.is_alone, counted
