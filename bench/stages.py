"""Time by stage: wraps the functions that begin one, and counts what they spend themselves."""

from __future__ import annotations

import inspect
import time
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import router.proxy
from policies.hot import HeatMap
from prompt.model import PromptTokens
from prompt.reader import PromptReader
from router.attempt import Attempts
from router.chooser import Choice, Chooser
from router.client import ClientConnection
from router.exchange import Exchange
from router.feedback import Feedback
from router.fleet import FleetTable
from router.footprint import Footprint, Footprints
from router.intake import Intake
from router.metrics import Metrics
from router.outlook import Outlook
from router.proxy import Proxy
from router.trace import DecisionTrace
from state.lease import Lease, LeaseBook
from state.placement import Placements

if TYPE_CHECKING:
    from collections.abc import Callable

STAGES: Final[dict[str, tuple[tuple[Any, str], ...]]] = {
    "intake": ((Intake, "feed"), (Intake, "release")),
    "body": ((Proxy, "_receive"),),
    "read prompt": ((PromptReader, "read"),),
    "chain": ((PromptTokens, "chain"), (Outlook, "branch")),
    "look-ups": ((Outlook, "_look_up"),),
    "views": ((Outlook, "views"),),
    "candidates": ((FleetTable, "candidates"),),
    "heat": ((HeatMap, "observe"),),
    "policy": (),
    "choose": ((Chooser, "route"), (Chooser, "choose"), (Proxy, "_route")),
    "lease": ((LeaseBook, "acquire"), (Lease, "first_byte"), (Lease, "finish")),
    "placements": ((Placements, "place"),),
    "footprint": ((Footprints, "take"), (Footprint, "end")),
    "head": ((Attempts, "_outbound"), (Attempts, "_receipts"), (Exchange, "__init__")),
    "reply": ((Exchange, "on_reply"), (Exchange, "on_end")),
    "choice": ((Choice, "first_byte"), (Choice, "finish")),
    "metrics": ((Metrics, "decided"), (Metrics, "finished")),
    "record": ((router.proxy, "record_of"),),
    "trace": ((DecisionTrace, "add"),),
    "feedback": ((Feedback, "note"),),
    "account": ((Proxy, "_account"),),
    "answer": ((ClientConnection, "_finish"),),
}
"""What begins each stage; the policy's is that of the router at hand."""


class Stages:
    """Wraps for the life of the process. ``take`` returns what was spent since the last one."""

    def __init__(self, policy: type[object]) -> None:
        self._spent_ns: dict[str, int] = {}
        self._stack: list[str] = []
        self._since_ns = 0
        for stage, places in STAGES.items():
            for owner, name in places or ((policy, "pick"),):
                setattr(owner, name, self._timed(stage, getattr(owner, name)))

    def take(self) -> dict[str, int]:
        """Return nanoseconds by stage, and begin anew."""
        spent_ns, self._spent_ns = self._spent_ns, {}
        return spent_ns

    def _timed(self, stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(work)
        def timed(*args: Any, **named: Any) -> Any:
            self._enter(stage)
            try:
                return work(*args, **named)
            finally:
                self._leave()

        @wraps(work)
        async def awaited(*args: Any, **named: Any) -> Any:
            self._enter(stage)
            try:
                return await work(*args, **named)
            finally:
                self._leave()

        return awaited if inspect.iscoroutinefunction(work) else timed

    def _enter(self, stage: str) -> None:
        self._charge(time.perf_counter_ns())
        self._stack.append(stage)
        self._since_ns = time.perf_counter_ns()

    def _leave(self) -> None:
        self._charge(time.perf_counter_ns())
        self._stack.pop()
        self._since_ns = time.perf_counter_ns()

    def _charge(self, now_ns: int) -> None:
        if self._stack:
            stage = self._stack[-1]
            self._spent_ns[stage] = self._spent_ns.get(stage, 0) + now_ns - self._since_ns
