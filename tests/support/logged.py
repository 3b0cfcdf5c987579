"""Decision logs without a router around them: a chooser decides, the log is told."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import msgspec

from policies.weighted import Weighted
from prompt.model import PromptTokens, ReadPrompt
from router.decision_log import DecisionLogSettings, open_decision_log
from router.trace import Attempt, DecisionRecord
from state.lease import Outcome
from state.memory import MemoryState
from state.model import Generation, ReplicaId, ReplicaLoad, ReplicaRecord, RouterId, Rung
from state.prefix import pack_tokens
from support.choosing import IDENTITY, Choosing, member_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from policies.union import AnyPolicy
    from router.chooser import Choice, Routed
    from router.decision_log import DecisionLog
    from router.fleet import Member

POLICY = Weighted()


def record_of(choices: list[Choice], routed: Routed, **changes: Any) -> DecisionRecord:
    """Return the record of a request that went as ``choices``; the last one served it."""
    number = routed.ordinal
    attempts = [Attempt(decision=one.decision, outcome="failed", error="gone") for one in choices]
    attempts[-1:] = [Attempt(decision=choices[-1].decision, outcome="done")]
    record = DecisionRecord(
        request_id=f"r{number}",
        client_request_id="CANARY-of-the-client",
        ordinal=number,
        seed=1,
        started_unix_s=1_700_000_000.0 + number / 8,
        path="/v1/completions",
        model="m",
        policy="Weighted",
        prompt_tokens=routed.prompt_tokens,
        is_exact=routed.is_exact,
        unroutable=None,
        rung=Rung.LIVE,
        state_age_s=0.0,
        hot_prefix_tokens=None,
        hot_holders=(),
        attempts=tuple(attempts),
        status=200,
        outcome="done",
        ttft_s=0.1,
        duration_s=0.3,
        reported_prompt_tokens=routed.prompt_tokens,
        reported_cached_tokens=0,
        reported_output_tokens=20,
    )
    return msgspec.structs.replace(record, **changes)


class Logging:
    """A chooser on eight replicas with uneven loads, whose choices go to a log."""

    def __init__(self, policy: AnyPolicy = POLICY, replicas: int = 8) -> None:
        self.rng = random.Random(4)
        self.state = MemoryState(clock=lambda: 100.0)
        self.policy = policy
        self.choosing = Choosing(self.state.reader(RouterId("me")), policy)
        self.replicas = replicas
        self._open: list[Choice] = []

    def members(self) -> list[Member]:
        """Return the replicas as they are now, each with some load of its own."""
        names = [ReplicaId(f"gpu-{number}") for number in range(self.replicas)]
        return [
            msgspec.structs.replace(
                member_of(
                    ReplicaRecord(
                        replica=name,
                        endpoint="http://127.0.0.1:1",
                        generation=Generation("g"),
                        identity=IDENTITY,
                        page_tokens=16,
                        sidecar=f"s-{name}",
                    )
                ),
                load=ReplicaLoad(running=self.rng.randrange(9), queued=self.rng.randrange(4)),
            )
            for name in names
        ]

    def decide(self, *prompts: range, attempts: int = 1) -> tuple[list[Choice], Routed]:
        """Return the choices of one request; time passes, some requests end."""
        choosing, members = self.choosing, self.members()
        choosing.now_s += self.rng.random()
        tokens = tuple(PromptTokens(packed=pack_tokens(one), is_exact=True) for one in prompts)
        routed = choosing.chooser.route(ReadPrompt(model="m", is_stream=True, prompts=tokens))
        choices = []
        for _ in range(attempts):
            choice = choosing.chooser.choose(routed, members)
            assert choice is not None
            members = [one for one in members if one.replica != choice.member.replica]
            choices.append(choice)
        self._open += choices
        if len(self._open) > 6:
            done = self._open.pop(self.rng.randrange(len(self._open)))
            done.finish(Outcome.DONE, had_first_byte=True)
        return choices, routed

    def decide_any(self) -> tuple[list[Choice], Routed]:
        """Return the choices of a request in one of a few conversations, now and then a retry."""
        start = self.rng.randrange(5) * 10_000
        prompt = range(start, start + self.rng.randrange(100, 3_000))
        return self.decide(prompt, attempts=1 + (self.rng.random() < 0.1))

    async def write(self, path: Path, requests: int, **settings: Any) -> DecisionLog:
        """Log so many requests at ``path``, and return the closed log."""
        log = open_log(path, self.policy, **settings)
        for _ in range(requests):
            choices, routed = self.decide_any()
            log.add(record_of(choices, routed), choices, routed)
        await log.close()
        return log


def open_log(path: Path, policy: AnyPolicy = POLICY, **settings: Any) -> DecisionLog:
    """Return a log that writes ``path``."""
    chosen = DecisionLogSettings(path=str(path), **settings)
    log = open_decision_log(chosen, policy, "router-1", clock=time.monotonic, unix_s=1.7e9)
    assert log is not None
    return log


def rewrite(path: Path, number: int, change: Callable[[Any], None]) -> None:
    """Let ``change`` alter the value in one line of a log."""
    lines = path.read_bytes().splitlines()
    value = msgspec.json.decode(lines[number])
    change(value)
    lines[number] = msgspec.json.encode(value)
    path.write_bytes(b"\n".join(lines) + b"\n")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return what is in one file of a log."""
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
