"""An entrance without sockets: the rules of admission, the queue, and replicas that take leases."""

from __future__ import annotations

import asyncio
import selectors
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from policies.hold import HoldEnd, HoldSettings
from router.account import Call
from router.admission import Admission, AdmissionParts
from router.admission_setting import AdmissionSettings, Priority
from router.hold import Hold
from router.overload import LoadRung
from router.shed import ShedError
from state.lease import LeaseBook, Outcome
from state.model import LeaseTotals, ReplicaId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.chooser import Choice, Routed
    from router.concurrency import ReplicaLimits
    from router.fleet import FleetTable, Member, Pulse
    from router.overload import Overload
    from router.request import Request
    from state.lease import Lease
    from state.store import FleetReader


class _Jump(selectors.SelectSelector):
    """Waits for nothing: the time that a wait would take is added to ``slept_s``."""

    def __init__(self) -> None:
        super().__init__()
        self.slept_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        """Return what is ready now."""
        self.slept_s += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on which sleeping takes no time."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Return the time slept so far."""
        return self._jump.slept_s


class Placed:
    """What a choice takes, as far as a queue cares."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def finish(self, outcome: Outcome, *, had_first_byte: bool) -> None:
        """Give the lease back."""
        assert not had_first_byte
        assert self.lease.finish(outcome), "a lease is given back once"


class Desk:
    """Admits requests to replicas by their load; ``models`` says which replica has which."""

    def __init__(
        self,
        replicas: Sequence[str] = ("a", "b"),
        *,
        models: Mapping[str, Sequence[str]] | None = None,
        limits: ReplicaLimits | None = None,
        **settings: Any,
    ) -> None:
        self.up = [ReplicaId(name) for name in replicas]
        self.models = models or {"": replicas}
        self.rung = LoadRung.NORMAL
        self.foreign: dict[ReplicaId, LeaseTotals] = {}
        self.leases = LeaseBook()
        self.sent: list[str] = []
        self.ends: list[HoldEnd] = []
        self.settings = AdmissionSettings(**settings)
        self.admission = Admission(self.settings, self._parts(limits))
        self.hold = Hold(
            HoldSettings(),
            clock=asyncio.get_running_loop().time,
            note=lambda end, _: self.ends.append(end),
            tenant_of=lambda routed: routed.tenant or "",
            places=self.admission,
        )

    def _parts(self, limits: ReplicaLimits | None) -> AdmissionParts:
        def members() -> dict[ReplicaId, Member]:
            return {name: self.member(name) for name in self.up}

        fleet = SimpleNamespace(members=members)
        reader = SimpleNamespace(foreign_leases=lambda: MappingProxyType(self.foreign))
        return AdmissionParts(
            leases=self.leases,
            reader=cast("FleetReader", reader),
            fleet=cast("FleetTable", fleet),
            pulse=cast("Pulse", SimpleNamespace(is_up=lambda name: name in self.up)),
            candidates=self.candidates,
            overload=cast("Overload", SimpleNamespace(rung=self.rung)),
            limits=limits,
        )

    def member(self, name: ReplicaId) -> Member:
        """Return a member as far as admission cares."""
        return cast("Member", SimpleNamespace(replica=name, is_draining=False))

    def candidates(self, model: str | None) -> list[Member]:
        """Return the live replicas that have ``model``."""
        return [self.member(name) for name in self.up if name in self.models[model or ""]]

    def routed(self, model: str = "", tenant: str = "", tokens: int = 100) -> Routed:
        """Return a request as far as admission cares."""
        prompt = SimpleNamespace(prompts=(), model=model)
        return cast("Routed", SimpleNamespace(prompt=prompt, tenant=tenant, prompt_tokens=tokens))

    def enter(
        self, open_requests: int = 1, priority: Priority = Priority.NORMAL, asked: str = ""
    ) -> Call:
        """Admit a request by its headers; return its account."""
        headers = SimpleNamespace(priority=Priority(asked) if asked else None)
        call = Call("r", None, "/", 0.0, 0.0, tenant=cast("Any", SimpleNamespace(name="t")))
        call.tenant = cast("Any", SimpleNamespace(name="t", priority=priority))
        request = SimpleNamespace(headers=headers, keep_alive=True)
        self.admission.enter(cast("Request", request), call, open_requests)
        return call

    async def ask(
        self,
        name: str,
        *,
        model: str = "",
        tenant: str = "",
        tokens: int = 100,
        priority: Priority = Priority.NORMAL,
    ) -> Placed:
        """Return what the request took, once there was a place; raises ShedError."""
        routed = self.routed(model, tenant, tokens)

        def choose(_: object) -> Choice:
            able = self.admission.with_place(self.candidates(model))
            assert able, "nobody is sent where there is no place"
            best = min(able, key=lambda member: self.leases.inflight(member.replica))
            self.sent.append(name)
            return cast("Choice", Placed(self.leases.acquire(best.replica, tokens, 0.0)))

        placed, waited_s = await self.hold.choose(routed, lambda: None, choose, priority.rank)
        assert waited_s >= 0
        return cast("Placed", placed)

    def start(self, name: str, **asked: Any) -> asyncio.Task[Placed]:
        """Ask in a task."""
        return asyncio.create_task(self.ask(name, **asked))

    def free(self, placed: Placed) -> None:
        """End a request."""
        assert placed.lease.finish(Outcome.DONE), "a lease is given back once"
        self.hold.wake()


async def shed_reason(task: asyncio.Task[Placed]) -> str:
    """Return why a request was shed."""
    try:
        await task
    except ShedError as error:
        return error.reason.value
    message = "it was not shed"
    raise AssertionError(message)
