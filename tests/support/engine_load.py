"""Conversations that take turns at engines with small caches, and how right predictions were."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import openai
from msgspec import Struct

from support.conversation import Answered, ask, at_once

if TYPE_CHECKING:
    from collections.abc import Sequence

WORDS: Final = (
    *("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "while", "replicas"),
    *("cache", "prefixes", "of", "prompts", "You", "are", "a", "helpful", "assistant", "Answer"),
    *("in", "short", "sentences", "and", "name", "your", "sources", "Größe", "naïve", "你好世界"),
    *("🦙", "llamas"),
)
SYSTEM: Final = ("system", "You are a helpful assistant. Answer in short sentences. " * 12)
REST: Final = 8
TRIES: Final = 8
RETRY_PAUSE_S: Final = 0.5


@dataclass(slots=True, eq=False)
class Talk:
    """One conversation; its next turn begins when the last one has ended."""

    number: int
    questions: list[str]
    messages: list[tuple[str, str]] = field(default_factory=lambda: [SYSTEM])
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    known_tokens: int = 0
    ended_s: float = float("-inf")
    answers: list[str] = field(default_factory=list)
    """What was answered in reality, and goes on as if the engine had said it."""
    salt: str | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a turn of it is being asked."""
        return self.lock.locked()


class Turn(Struct, frozen=True, kw_only=True):
    """One answered turn.

    ``messages`` are its prompt; ``known_tokens``: the part of it that was a prompt before;
    ``rested_s``: how long its conversation had been quiet.
    """

    phase: str
    talk: int
    messages: tuple[tuple[str, str], ...]
    answered: Answered
    known_tokens: int
    rested_s: float
    tries: int
    salt: str | None = None

    def pages(self, page_tokens: int) -> tuple[int, int]:
        """Return the whole pages that were predicted and reported."""
        told = self.answered
        return told.predicted_tokens // page_tokens, told.cached_tokens // page_tokens

    def is_right(self, page_tokens: int) -> bool:
        """Return whether as many pages were cached as predicted."""
        predicted, reported = self.pages(page_tokens)
        return predicted == reported

    def is_cut(self, page_tokens: int) -> bool:
        """Return whether pages that an engine had computed before were not there."""
        return self.answered.cached_tokens // page_tokens < self.known_tokens // page_tokens


def make_talks(count: int, turns: int, words: tuple[int, int], seed: int) -> list[Talk]:
    """Return conversations whose questions have between ``words`` words."""
    rng = random.Random(seed)
    return [
        Talk(
            number,
            [
                f"{number}.{turn} " + " ".join(rng.choices(WORDS, k=rng.randint(*words)))
                for turn in range(turns)
            ],
        )
        for number in range(count)
    ]


def in_turns(talks: Sequence[Talk], active: int, seed: int) -> list[Talk]:
    """Return whose turn it is, for all turns: any of ``active`` talks, each until its end.

    A talk rests for ``REST`` turns of others, as long as there are others: people read first.
    """
    rng = random.Random(seed)
    left = {talk.number: len(talk.questions) for talk in talks}
    waiting = list(talks)
    running: list[Talk] = []
    order: list[Talk] = []
    while waiting or running:
        while waiting and len(running) < active:
            running.append(waiting.pop(0))
        rested = [talk for talk in running if talk not in order[-REST:]]
        talk = rng.choice(rested or running)
        order.append(talk)
        left[talk.number] -= 1
        if not left[talk.number]:
            running.remove(talk)
    return order


@dataclass(slots=True)
class Players:
    """Clients that ask the next questions; a failed one is asked again."""

    client: openai.AsyncOpenAI
    model: str
    at_once: int
    output_tokens: int
    turns: list[Turn] = field(default_factory=list)

    async def play(self, phase: str, order: Sequence[Talk]) -> None:
        """Ask the next question of each talk in ``order``."""
        await at_once(order, self.at_once, lambda talk: self.turn(phase, talk))

    async def turn(self, phase: str, talk: Talk) -> Turn:
        """Ask the next question of ``talk``."""
        async with talk.lock:
            talk.messages.append(("user", talk.questions.pop(0)))
            began_s = time.monotonic()
            answered, tries = await self._answer(talk)
            turn = Turn(
                phase=phase,
                talk=talk.number,
                messages=tuple(talk.messages),
                answered=answered,
                known_tokens=talk.known_tokens,
                rested_s=began_s - talk.ended_s,
                tries=tries,
                salt=talk.salt,
            )
            self.turns.append(turn)
            said = talk.answers.pop(0) if talk.answers else answered.text
            talk.messages.append(("assistant", said))
            talk.known_tokens = answered.prompt_tokens
            talk.ended_s = time.monotonic()
            return turn

    async def _answer(self, talk: Talk) -> tuple[Answered, int]:
        for number in range(1, TRIES):
            try:
                return await self._ask(talk), number
            except openai.OpenAIError:
                await asyncio.sleep(RETRY_PAUSE_S)
        return await self._ask(talk), TRIES

    async def _ask(self, talk: Talk) -> Answered:
        extra = {} if talk.salt is None else {"cache_salt": talk.salt}
        return await ask(
            self.client, self.model, talk.messages, self.output_tokens, temperature=0, **extra
        )
