"""A canary in a line: what snapshots and ``warmroute top`` show of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from router.settings import leaves

if TYPE_CHECKING:
    from policies.union import AnyPolicy
    from router.canary_admin import CanaryView


class CanaryRow(Struct, frozen=True, kw_only=True):
    """A canary that is in the settings; ``state`` as ``/admin/canary`` has it.

    ``candidate`` is its policy in words. ``percent`` is that of conversations or, ``split`` by
    tenant, of tenants; None where ``tenants`` are named. ``word`` is None before anything was
    counted. ``is_alone``: the figures are those of one router process.
    """

    id: str
    state: str
    candidate: str
    split: str
    percent: float | None
    tenants: tuple[str, ...]
    control_requests: int
    candidate_requests: int
    word: str | None
    is_alone: bool = False


def row_of(view: CanaryView, control: AnyPolicy) -> CanaryRow | None:
    """Return the row of a view, beside the policy in force; None where there is no canary."""
    settings, verdict = view.settings, view.verdict
    if settings is None:
        return None
    return CanaryRow(
        id=settings.id,
        state=view.state,
        candidate=candidate_words(settings.policy, control),
        split=settings.split,
        percent=settings.percent,
        tenants=settings.tenants,
        control_requests=verdict.control_requests if verdict is not None else 0,
        candidate_requests=verdict.candidate_requests if verdict is not None else 0,
        word=verdict.word.value if verdict is not None else None,
        is_alone=bool(view.fault),
    )


def candidate_words(candidate: AnyPolicy, control: AnyPolicy) -> str:
    """Return its kind, and what differs from the control, or of another kind from its defaults."""
    usual = control if type(candidate) is type(control) else type(candidate)()
    known, told = _leaves(usual), _leaves(candidate)
    kind = told.pop("kind")
    changed = (
        f"{key}={msgspec.json.encode(value).decode()}"
        for key, value in told.items()
        if key not in known or known[key] != value
    )
    return " ".join((str(kind), *changed))


def _leaves(policy: AnyPolicy) -> dict[str, Any]:
    return dict(leaves(msgspec.to_builtins(policy)))
