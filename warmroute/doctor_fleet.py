"""What is wrong with the router's own side: its store, its prompts, what clients send. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prompt.model import Unroutable
from state.model import Rung
from warmroute.doctor_case import Case, Code, Report
from warmroute.doctor_judge import judge_replica
from warmroute.doctor_text import found

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from warmroute.doctor_case import Finding

MOST: Final = 0.5
LEAST_REQUESTS: Final = 10
NAMED_MOST: Final = 4
_AS_TOLD: Final = str(Unroutable.LOAD_ONLY)
"""Requests that are routed by load by their nature, such as those of ``paths``."""
_FILES: Final = "warmroute serve --model NAME=DIR with the model's tokenizer.json and template"
_ADVICE: Final = {
    str(Unroutable.NO_TOKENIZER): _FILES,
    str(Unroutable.NO_TEMPLATE): _FILES,
    str(Unroutable.WRONG_TOKENS): _FILES,
    str(Unroutable.TEMPLATE): "correct the template in models[].tokenizer: it refuses these chats",
    str(Unroutable.BUSY): "give the router more CPU, or run more routers on the same store",
}
_OTHER_ADVICE: Final = (
    "send chats of plain text, without a template or a truncation of their own: the prefix of "
    "others is known to nobody but the engine"
)
_STORE_ADVICE: Final = (
    "check that the store runs, answers the router's host and takes writes: redis-cli -u URL ping"
)
_PRIVATE_ADVICE: Final = (
    "the router starts it again when it ended; where that does not help, see the router's log, "
    "and whether a valkey-server of it hangs"
)


def judge(case: Case) -> Report:
    """Return everything that is wrong, the fleet's own first."""
    findings = [*case.findings, *_of_fleet(case), *_of_router(case)]
    for replica in case.replicas:
        findings += judge_replica(replica, case)
    return Report(
        replicas=tuple(replica.name for replica in case.replicas),
        findings=tuple(findings),
        unchecked=case.unchecked,
    )


def _of_fleet(case: Case) -> Iterator[Finding]:
    """Who gets nothing new, and who is not there any more, as the router tells."""
    router, fleet = case.router, case.fleet
    if router is None or fleet is None:
        return
    models = sorted({model for view in fleet for model in view.models})
    drained = [
        model
        for model in models
        if all(view.draining for view in fleet if model in view.models or not view.models)
    ]
    if fleet and all(view.draining for view in fleet):
        what = f"The whole fleet is drained: {_some([view.replica for view in fleet])}"
    elif drained:
        names = [view.replica for view in fleet if set(drained) & set(view.models)]
        what = f"All replicas of {_some(drained)} are drained: {_some(names)}"
    else:
        what = ""
    if what:
        yield found(
            Code.FLEET_DRAINED,
            None,
            seen=f"{what}.",
            fix="warmroute undrain REPLICA --reason ..., or start replicas that do not end",
        )
    present = {view.replica for view in fleet}
    recent = router.recent
    for name, answered in sorted(recent.answered.items()):
        if name not in present:
            yield found(
                Code.REPLICA_LEFT,
                name,
                seen=(
                    f"It answered {answered} of the last {recent.requests} requests, and is not in "
                    "the fleet any more."
                ),
                fix=(
                    "check that the engine and its sidecar run, and that the sidecar reaches the "
                    "router's store; see the sidecar's log for why it deregistered"
                ),
            )


def _some(names: Sequence[str]) -> str:
    """Return some of the names, and how many more there are."""
    more = len(names) - NAMED_MOST
    return ", ".join(names[:NAMED_MOST]) + (f" and {more} more" if more > 0 else "")


def _of_router(case: Case) -> Iterator[Finding]:
    router = case.router
    if router is None:
        return
    if router.rung is not Rung.LIVE:
        store = f"the store at {router.state}" if router.state else "its private server"
        yield found(
            Code.STATE_NOT_LIVE,
            None,
            seen=(
                f"The router's view of {store} is {router.rung.value}, "
                f"{router.state_age_s:.1f} s old."
            ),
            fix=_STORE_ADVICE if router.state else _PRIVATE_ADVICE,
        )
    recent = router.recent
    unread = {why: n for why, n in recent.unroutable.items() if why != _AS_TOLD}
    known = recent.requests - sum(recent.unroutable.values())
    if recent.requests >= LEAST_REQUESTS and sum(unread.values()) > MOST * recent.requests:
        reasons = ", ".join(f"{count} {why}" for why, count in sorted(unread.items()))
        yield found(
            Code.PROMPTS_UNREAD,
            None,
            seen=f"Of the last {recent.requests} requests: {reasons}.",
            fix=_ADVICE.get(max(unread, key=unread.__getitem__), _OTHER_ADVICE),
        )
    has_events = any(each.view is not None and each.view.has_events for each in case.replicas)
    if known >= LEAST_REQUESTS and recent.inexact > MOST * known and has_events:
        yield found(
            Code.PROMPTS_UNREAD,
            None,
            seen=f"{recent.inexact} of the last {known} prompts are known by their bytes only.",
            fix=f"{_FILES}; or let engines answer /tokenize (tokens.source: engine)",
        )
    if known >= LEAST_REQUESTS and recent.short > MOST * known:
        yield found(
            Code.PROMPTS_SHORT,
            None,
            seen=f"{recent.short} of the last {known} prompts are shorter than a block.",
            fix="warmroute sidecar --block-tokens N, as small as the engine's page allows",
        )
