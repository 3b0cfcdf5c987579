"""Who of several routers does a piece of work, and what all of them have spent on it.

``wr:1:{subject}:warm:...:owner`` is a STRING with the router that has the claim; it expires soon
after that one stops renewing it, and another one goes on. ``...:account`` is a STRING with the
tokens that were spent; it outlives claims, so that no budget is spent twice.
"""

from __future__ import annotations

import enum
import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from state.client import command_client, state_errors
from state.schema import KEY_PREFIX
from state.script import Script, run_scripts

if TYPE_CHECKING:
    from collections.abc import Callable

    from state.client import Argument, Client, RedisSettings
    from state.model import ReplicaId, RouterId

CLAIM_S: Final = 5.0
"""So long after its last sign of life a router's claim ends."""
ACCOUNT_S: Final = 3_600.0


class Answer(enum.StrEnum):
    """What a store says to a claim."""

    GRANTED = "granted"
    TAKEN = "taken"
    """Another router has the claim; nothing was spent."""
    SPENT = "spent"
    """The budget has not so many tokens left; nothing was spent, and the claim is ours."""


class Claimed(NamedTuple):
    """The answer, and the tokens that all routers have spent so far."""

    answer: Answer
    spent_tokens: int


class Subject(NamedTuple):
    """What is worked on: ``work`` on one life of a replica."""

    replica: ReplicaId
    work: str
    life: str


class WarmClaims(Protocol):
    """Raises StateError where the store does not answer: then nobody has a claim."""

    async def take(self, subject: Subject, tokens: int, budget_tokens: int) -> Claimed:
        """Take the claim or renew it, and spend ``tokens`` unless the budget has them not."""
        ...

    async def give_back(self, subject: Subject) -> None:
        """End the claim, if it is ours."""
        ...

    async def aclose(self) -> None:
        """Give back what is open."""
        ...


class MemoryWarmClaims:
    """The same in one process: ``rivals`` with one ``book`` are routers with one store."""

    def __init__(
        self,
        router: RouterId,
        clock: Callable[[], float],
        book: dict[Subject, tuple[RouterId | None, float, int]] | None = None,
    ) -> None:
        self._router = router
        self._clock = clock
        self._book = {} if book is None else book

    async def take(self, subject: Subject, tokens: int, budget_tokens: int) -> Claimed:
        """Take the claim or renew it, and spend."""
        owner, until_s, spent = self._book.get(subject, (None, 0.0, 0))
        now_s = self._clock()
        if owner not in (None, self._router) and now_s < until_s:
            return Claimed(Answer.TAKEN, spent)
        answer = Answer.GRANTED
        if tokens and spent + tokens > budget_tokens:
            answer = Answer.SPENT
        else:
            spent += tokens
        self._book[subject] = (self._router, now_s + CLAIM_S, spent)
        return Claimed(answer, spent)

    async def give_back(self, subject: Subject) -> None:
        """End the claim, if it is ours."""
        owner, _, spent = self._book.get(subject, (None, 0.0, 0))
        if owner == self._router:
            self._book[subject] = (None, 0.0, spent)

    async def aclose(self) -> None:
        """Do nothing: nothing is open."""


class RedisWarmClaims:
    """The same in Redis; one script, one round trip."""

    def __init__(self, settings: RedisSettings, router: RouterId) -> None:
        self._client: Client = command_client(settings)
        self._router = router
        self._script = Script("warm_claim")

    async def take(self, subject: Subject, tokens: int, budget_tokens: int) -> Claimed:
        """Take the claim or renew it, and spend."""
        return await self._call(subject, CLAIM_S, tokens, budget_tokens)

    async def give_back(self, subject: Subject) -> None:
        """End the claim, if it is ours."""
        await self._call(subject, 0.0, 0, 0)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _call(
        self, subject: Subject, claim_s: float, tokens: int, budget_tokens: int
    ) -> Claimed:
        base = key_base(subject)
        arguments: list[Argument] = [
            self._router,
            round(claim_s * 1000),
            round(ACCOUNT_S * 1000),
            tokens,
            budget_tokens,
        ]
        call = self._script.call([f"{base}:owner", f"{base}:account"], arguments)
        with state_errors("a claim on a warm-up"):
            [reply] = await run_scripts(self._client, [call])
            answer, spent = reply
            return Claimed(Answer(bytes(answer).decode()), int(spent))


def key_base(subject: Subject) -> str:
    """Return what both keys of a subject begin with: in one slot, and of bounded length."""
    told = f"{subject.work}\0{subject.life}".encode()
    life = hashlib.blake2b(told, digest_size=8).hexdigest()
    return f"{KEY_PREFIX}:{{{subject.replica}}}:warm:{life}"
