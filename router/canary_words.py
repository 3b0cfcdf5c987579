"""A canary's figures in words: the same in the history, on the command line and on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from router.confidence import LEAST_GROUPS
from router.split import GROUPS, TENANT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from router.canary_setting import CanarySettings
    from router.canary_verdict import CanaryVerdict, Measure

NAMES: Final = {
    "ttft_mean": "mean TTFT",
    "ttft_p95": "p95 of TTFT",
    "errors": "errors",
    "token_hits": "token hits",
    "imbalance": "imbalance",
}
NOTED_REQUESTS: Final = 30
"""From so many on it is no chance that few groups have them."""
FEW_GROUPS: Final = 4
SPLIT_PAGE: Final = "docs/canary.md#who-gets-the-candidate"


def change_of(measure: Measure) -> str:
    """Return a change and its interval, in the unit of the figure."""
    if measure.change is None:
        return measure.why
    low = "0" if measure.low is None else _number(measure, measure.low)
    high = "any" if measure.high is None else _number(measure, measure.high)
    if measure.kind == "ratio":
        return f"{measure.change:.3f} times the control's ({low} to {high})"
    return f"{100 * measure.change:+.2f} points ({low} to {high})"


def limit_of(measure: Measure) -> str:
    """Return the limit in the same unit; nothing without one."""
    return "" if measure.limit is None else f"limit {_number(measure, measure.limit)}"


def reason_of(measures: Iterable[Measure]) -> str:
    """Return figures and limits in one line."""
    return "; ".join(f"{NAMES[one.name]} {change_of(one)}, {limit_of(one)}" for one in measures)


def counts_of(verdict: CanaryVerdict) -> str:
    """Return how many requests each side had."""
    return (
        f"{verdict.candidate_requests} requests of the candidate,"
        f" {verdict.control_requests} of the control"
    )


def note_of(verdict: CanaryVerdict, settings: CanarySettings) -> str:
    """Return why a split cannot tell anything, in a line; nothing where it can, or may yet."""
    candidate, control = verdict.candidate_requests, verdict.control_requests
    groups = (verdict.candidate_groups or 0) + (verdict.control_groups or 0)
    is_one_sided = not candidate or not control
    if candidate + control < NOTED_REQUESTS or not groups:
        return ""
    if not is_one_sided and groups >= FEW_GROUPS:
        return ""
    if is_one_sided:
        side = "candidate" if candidate else "control"
        what = f"all {candidate + control} requests fell on one side, the {side}'s"
    else:
        what = f"all {candidate + control} requests fell into {groups} groups"
    by_tenant = settings.split == TENANT
    if settings.tenants and is_one_sided:
        why = f"{'all' if candidate else 'none'} of them are of the tenants that are named"
    elif groups < LEAST_GROUPS:
        why = "they are of few tenants" if by_tenant else "they begin in few ways"
    else:
        whole = "tenants" if by_tenant else "conversations"
        share = f"{settings.percent or 0:g} % of {whole}"
        why = f"the share is small ({share}): wait, or take a larger one"
    return f"{what}: {why} ({SPLIT_PAGE})"


def verdict_lines(verdict: CanaryVerdict) -> Iterator[str]:
    """Yield a verdict for people."""
    yield f"{verdict.word.value}: {counts_of(verdict)}"
    if verdict.candidate_groups is not None and verdict.control_groups is not None:
        yield (
            f"groups of conversations, or tenants, with any request: {verdict.candidate_groups} of"
            f" {GROUPS} of the candidate, {verdict.control_groups} of {GROUPS} of the control"
        )
    for one in verdict.measures:
        state = "BROKEN, " if one.is_broken else "within, " if one.is_within else ""
        limit = f"  [{state}{limit_of(one)}]" if one.limit is not None else ""
        sides = f"{_side(one, one.candidate)} against {_side(one, one.control)}"
        yield f"  {NAMES[one.name]:<12} {one.word.value:<23} {sides:<24} {change_of(one)}{limit}"
    yield f"Intervals hold together, at every look, with {100 * verdict.confidence:.4g} %."


def _number(measure: Measure, value: float) -> str:
    return f"{value:.3f}" if measure.kind == "ratio" else f"{100 * value:+.2f}"


def _side(measure: Measure, value: float | None) -> str:
    if value is None:
        return "-"
    if measure.name.startswith("ttft"):
        return f"{1e3 * value:.4g} ms"
    return f"{value:.3f}" if measure.kind == "ratio" else f"{100 * value:.2f} %"
