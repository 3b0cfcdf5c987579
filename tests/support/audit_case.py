"""Transitions of a small cache, and what a replay makes of them."""

from __future__ import annotations

from typing import Any

from sidecar.audit import AuditReplay
from sidecar.journal import Transition

PAGES = 6


def opened(**fields: Any) -> Transition:
    totals = {tier: {"free": PAGES} for tier in ("device", "host")}
    return Transition(op="open", **{"totals": totals, **fields})


def device(**states: int) -> dict[str, dict[str, int]]:
    return {"device": {**states, "free": PAGES - sum(states.values())}}


def replayed(*transitions: Transition) -> AuditReplay:
    replay = AuditReplay()
    for transition in (opened(), *transitions):
        replay.feed(transition)
    return replay


def t(op: Any, *pages: int, **fields: Any) -> Transition:
    return Transition(op=op, pages=list(pages), **fields)


LIFE = (
    t("create", 0, 1, request="a", tenant="x"),
    t("index", 0),
    t("share", 0, request="b"),
    t("fill", 0, 1),
)


def states_of(replay: AuditReplay, tier: str = "device") -> dict[str, int]:
    return {state: n for state, n in replay.summary().final_pages[tier].items() if n}
