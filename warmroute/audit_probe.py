"""Sends the requests of a timing audit one after the other and times their first tokens.

A round: the victim plants a prompt that nobody sent before; then, in random order, the attacker
sends that prompt and another fresh one of the same length. In some rounds the victim does so, too:
the positive control. Nothing else is sent meanwhile, and every answer is read to its end.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
from msgspec import Struct

from warmroute.audit_judge import Samples

if TYPE_CHECKING:
    from collections.abc import Callable

REQUEST_S: Final = 120.0
BUSY_TRIES: Final = 20
BUSY_WAIT_S: Final = 1.0
CONTROL_EVERY: Final = 5
"""So many rounds for one with a control."""
LEAST_CONTROLS: Final = 16
PATH: Final = "/v1/chat/completions"
LETTERS: Final = 8
"""Of a word: so many that no prompt has the words of another one, as known words may be faster."""
_ALPHABET: Final = bytes(ord("a") + byte % 26 for byte in range(256))
_OK: Final = 200
_UNAUTHORIZED: Final = 401
_BUSY: Final = frozenset({429, 503})


class AuditError(Exception):
    """The audit cannot go on; the text says at which address, and what to do."""


class Plan(Struct, frozen=True, kw_only=True):
    """How much to send. ``warm_up`` rounds are thrown away; ``pause_s`` is between requests."""

    samples: int
    repeats: int
    warm_up: int
    words: int
    pause_s: float


class Caller:
    """One tenant as a client; ``key_name`` says in errors whose key it shows."""

    def __init__(
        self, http: aiohttp.ClientSession, target: str, model: str, key: str, key_name: str
    ) -> None:
        self._http = http
        self._url = target + PATH
        self._model = model
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._key_name = key_name

    async def first_token_ms(self, prompt: str) -> float:
        """Return when the first piece of the answer came, after the request was begun.

        Where the target is busy it is asked again. Raises AuditError.
        """
        body = msgspec.json.encode(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": 1,
                "temperature": 0,
                "stream": True,
            }
        )
        for _ in range(BUSY_TRIES):
            took_ms = await self._tried(body)
            if took_ms is not None:
                return took_ms
            await asyncio.sleep(BUSY_WAIT_S)
        message = f"{self._url} is busy ({BUSY_TRIES} tries): the audit needs it for itself"
        raise AuditError(message)

    async def _tried(self, body: bytes) -> float | None:
        """Return the same of one try; None where the target was busy."""
        began_s = time.perf_counter()
        try:
            async with self._http.post(
                self._url,
                data=body,
                headers=self._headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=REQUEST_S),
            ) as answer:
                if answer.status in _BUSY:
                    return None
                if answer.status != _OK:
                    raise AuditError(self._refusal(answer.status))
                piece = await answer.content.readany()
                took_ms = 1e3 * (time.perf_counter() - began_s)
                if not piece.lstrip().startswith((b"data:", b"event:", b":")):
                    message = f"{self._url}: expected a stream of events, as asked for"
                    raise AuditError(message)
                async for _ in answer.content.iter_any():
                    pass
                return took_ms
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            message = f"{self._url}: no answer ({type(error).__name__})"
            raise AuditError(message) from None

    def _refusal(self, status: int) -> str:
        if status == _UNAUTHORIZED:
            return f"{self._url} does not know the key in ${self._key_name}"
        return (
            f"{self._url} answered {status} to the key in ${self._key_name}; expected {_OK}: is "
            "the model's name right?"
        )


def fresh_prompt(words: int) -> str:
    """Return a prompt of which nobody sent a word before; as long as others of as many words."""
    letters = secrets.token_bytes(LETTERS * words).translate(_ALPHABET).decode()
    return " ".join([letters[at : at + LETTERS] for at in range(0, len(letters), LETTERS)])


async def collect(
    victim: Caller, attacker: Caller, plan: Plan, told: Callable[[int, Samples], None]
) -> list[Samples]:
    """Return the samples of each repeat; ``told`` gets each one as it is done.

    Raises AuditError.
    """
    for _ in range(plan.warm_up):
        await _round(victim, attacker, plan, Samples(), has_control=True)
    every = max(1, min(CONTROL_EVERY, plan.samples // LEAST_CONTROLS))
    repeats = []
    for number in range(plan.repeats):
        samples = Samples()
        for index in range(plan.samples):
            await _round(victim, attacker, plan, samples, has_control=index % every == 0)
        repeats.append(samples)
        told(number, samples)
    return repeats


async def _round(
    victim: Caller, attacker: Caller, plan: Plan, samples: Samples, *, has_control: bool
) -> None:
    planted = fresh_prompt(plan.words)
    sent = [
        (attacker, planted, samples.probes),
        (attacker, fresh_prompt(plan.words), samples.fresh),
    ]
    if has_control:
        sent += [
            (victim, planted, samples.hits),
            (victim, fresh_prompt(plan.words), samples.misses),
        ]
    secrets.SystemRandom().shuffle(sent)
    await victim.first_token_ms(planted)
    for caller, prompt, times in sent:
        await asyncio.sleep(plan.pause_s)
        times.append(await caller.first_token_ms(prompt))
    await asyncio.sleep(plan.pause_s)
