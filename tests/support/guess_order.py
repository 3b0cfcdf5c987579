"""PromptPeek: the order in which many guesses are answered must not tell which one is cached.

The victim's prompt is one of ``GUESSES`` that the attacker sends at once, in random order. Where it
comes among the answers is counted: alike for all places, unless something served it earlier.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Final

from support.fleet import MODEL
from support.tenant import key_of
from warmroute.admin_client import session
from warmroute.audit_probe import Caller, fresh_prompt
from warmroute.two_sample import uniform_p_value

if TYPE_CHECKING:
    import aiohttp

    from support.fleet import LocalFleet

GUESSES: Final = 64
CELLS: Final = 8
WORDS: Final = 60


async def places(fleet: LocalFleet, victim: str, attacker: str, trials: int) -> list[int]:
    """Return where the victim's prompt came among the answers to the attacker, for each trial."""
    async with session() as http:
        sender, guesser = (_caller(http, fleet, name) for name in (victim, attacker))
        return [await _trial(sender, guesser) for _ in range(trials)]


def p_value(found: list[int]) -> float:
    """Return how likely places so uneven are where all are alike."""
    counts = [0] * CELLS
    for place in found:
        counts[place * CELLS // GUESSES] += 1
    return uniform_p_value(counts)


def _caller(http: aiohttp.ClientSession, fleet: LocalFleet, name: str) -> Caller:
    return Caller(http, fleet.router.url, MODEL, key_of(name), name)


async def _trial(victim: Caller, attacker: Caller) -> int:
    planted = fresh_prompt(WORDS)
    guesses = [planted, *(fresh_prompt(WORDS) for _ in range(GUESSES - 1))]
    secrets.SystemRandom().shuffle(guesses)
    await victim.first_token_ms(planted)
    answered: list[str] = []

    async def guess(prompt: str) -> None:
        await attacker.first_token_ms(prompt)
        answered.append(prompt)

    await asyncio.gather(*map(guess, guesses))
    return answered.index(planted)
