"""A multi-turn agent workload that follows from a seed.

Agents of a few types share their type's long system prompt. A session is one task: the user says
what to do, then the model and a tool take turns, and each request carries everything so far. What
the model says is not part of the workload: the driver puts the real replies between the turns.
"""

from __future__ import annotations

import random
from typing import Final

from msgspec import Struct, structs

from warmroute.corpus import Prose

SYSTEM_CHARS: Final = (5_000, 9_000)
TASK_CHARS: Final = (3_000, 9_000)
OUTPUT_CHARS: Final = (800, 2_400)
REPLY_TOKENS: Final = (10, 24)
THINK_S: Final = (0.02, 0.25)
ARRIVAL_S: Final = 0.15
"""The first sessions arrive one by one, this far apart; each later one when another has ended."""

Message = dict[str, str]


class Turn(Struct, frozen=True):
    """What is new in one request, how much the model may answer, and the pause before."""

    message: Message
    reply_tokens: int
    think_s: float


class Session(Struct, frozen=True):
    """One task of one agent; ``system`` is the prompt that all agents of its type share."""

    name: str
    agent: str
    system: Message
    turns: tuple[Turn, ...]


class WorkloadSize(Struct, frozen=True, kw_only=True):
    """How much there is to do. ``open_sessions`` of them are under way at any time, at most.

    ``text_share`` scales the length of all texts.
    """

    sessions: int = 24
    turns: int = 6
    agents: int = 4
    open_sessions: int = 12
    text_share: float = 1.0


def build_sessions(size: WorkloadSize, seed: int) -> tuple[Session, ...]:
    """Return the sessions in the order in which they start."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    prose = Prose(rng)
    systems = [_system(prose, rng, size.text_share) for _ in range(size.agents)]
    sessions = []
    for index in range(size.sessions):
        # Each type has its share; which comes when is drawn.
        if index % size.agents == 0:
            order = rng.sample(range(size.agents), size.agents)
        agent = order[index % size.agents]
        turns = [_turn(prose, rng, index, place, size.text_share) for place in range(size.turns)]
        if index < size.open_sessions:
            turns[0] = structs.replace(turns[0], think_s=turns[0].think_s + index * ARRIVAL_S)
        sessions.append(
            Session(f"session-{index:03d}", f"agent-{agent}", systems[agent], tuple(turns))
        )
    return tuple(sessions)


def _system(prose: Prose, rng: random.Random, text_share: float) -> Message:
    title = prose.title()
    rules = prose.rules(_chars(rng, SYSTEM_CHARS, text_share))
    return {"role": "system", "content": f"You are the {title} agent. Your rules:\n{rules}"}


def _turn(
    prose: Prose, rng: random.Random, session_index: int, place: int, text_share: float
) -> Turn:
    if place == 0:
        text = f"Task {session_index}: {prose.task(_chars(rng, TASK_CHARS, text_share))}"
        message = {"role": "user", "content": text}
    else:
        text = f"$ {prose.title()}\n{prose.output(_chars(rng, OUTPUT_CHARS, text_share))}"
        message = {"role": "tool", "content": text, "tool_call_id": f"call-{place}"}
    return Turn(message, rng.randint(*REPLY_TOKENS), rng.uniform(*THINK_S))


def _chars(rng: random.Random, bounds: tuple[int, int], text_share: float) -> int:
    return round(text_share * rng.randint(*bounds))
