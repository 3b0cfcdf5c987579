"""Calibration: asks one engine until its step model is known, within a budget of time.

First a pilot: prompts of doubling length find out how long a prompt may be. Then rounds of probes,
each in an order of its own, until the time is over; at least one round. A round has the shortest
prompts (what a request takes besides its steps), cold prompts of several lengths (linear and
attention terms), prompts behind cached ones (attention without its linear term), decoding alone
behind short and long contexts, and decoding in batches.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta, Struct

from replay.probe import Prompt, decode_rows, draw_tokens, first_token_row, salted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from replay.fit import StepRow
    from replay.probe import Answer, Ask, EngineFacts

SHORTEST: Final = 4
"""Tokens of a prompt whose prefill is next to nothing."""
SHORT: Final = 16
PILOT_TOKENS: Final = 64
PILOT_OUTPUT: Final = 12
WARM_UPS: Final = 3
MINIMAL_ASKS: Final = 4
LONGEST_SHARE: Final = 0.06
"""Of the budget, for the longest prompt."""
DOUBLING: Final = 2.2
"""What a prompt of twice the length takes at most, beside the half."""
DECODE_SHARE: Final = 0.02
"""Of the budget, for one decoding probe, if batches were free."""
OUTPUT_TOKENS: Final = (16, 256)
COLD_PARTS: Final = (8, 4)
CONTEXT_PARTS: Final = (2, 1)
TAIL_PARTS: Final = (32, 4)
BATCHES: Final = (2, 4, 8, 16, 32)
CONTEXT_BATCH: Final = 4
SLOW_BATCH: Final = 4.0
"""A batch that takes so many times what it should is not doubled any more."""


class ProbeSettings(Struct, frozen=True, kw_only=True):
    """``seconds`` of probes, about; their order follows from ``seed``.

    Their tokens follow from ``salt``, too: an engine that was asked before still has the prompts of
    the last time in its cache.
    """

    seconds: Annotated[float, Meta(gt=0)] = 45.0
    seed: int = 0
    salt: int = 0


class Prober:
    """Asks the probes one after another and keeps the rows that their answers give.

    ``asked_tokens`` counts the prompt tokens of everything that was asked.
    """

    def __init__(
        self, ask: Ask, clock: Callable[[], float], facts: EngineFacts, settings: ProbeSettings
    ) -> None:
        self.rows: list[StepRow] = []
        self.asked_tokens = 0
        self.longest_tokens = PILOT_TOKENS
        self.rounds = 0
        self._send = ask
        self._clock = clock
        self._facts = facts
        self._budget_s = settings.seconds
        self._order = random.Random(settings.seed)  # noqa: S311 - reproducible, not secret
        self._tokens = salted(settings.seed, settings.salt)
        self._output_tokens = OUTPUT_TOKENS[0]
        self._widest = min(max(BATCHES), facts.max_sequences)

    async def run(self, on_round: Callable[[int], None] = lambda _: None) -> None:
        """Ask all there is time for; ``on_round`` hears the number of each round that ended."""
        deadline_s = self._clock() + self._budget_s
        for _ in range(WARM_UPS):
            await self._ask(self._fresh(SHORT), PILOT_OUTPUT)
        await self._pilot()
        while not self.rounds or self._clock() < deadline_s:
            probes = self._round()
            self._order.shuffle(probes)
            for probe in probes:
                if self.rounds and self._clock() >= deadline_s:
                    return
                await probe()
            self.rounds += 1
            on_round(self.rounds)

    async def _pilot(self) -> None:
        """Find how long prompts and answers may be."""
        answer = await self._ask(self._fresh(SHORT), PILOT_OUTPUT)
        tpot_s = max(answer.tpot_s or 0.0, 1e-6)
        least, most = OUTPUT_TOKENS
        most = min(most, self._facts.context_tokens // 4)
        self._output_tokens = int(min(most, max(least, DECODE_SHARE * self._budget_s / tpot_s)))
        limit = self._facts.context_tokens - self._output_tokens
        if self._facts.capacity_tokens is not None:
            limit = min(limit, self._facts.capacity_tokens // 2)
        # Behind the longest prompt there are tails.
        limit = max(SHORT, limit * min(TAIL_PARTS) // (min(TAIL_PARTS) + 2))
        length = min(PILOT_TOKENS, limit)
        while True:
            took_s = (await self._cold("pilot", length)).ttft_s
            if length == limit or took_s * DOUBLING > LONGEST_SHARE * self._budget_s:
                break
            length = min(2 * length, limit)
        if took_s > DOUBLING * LONGEST_SHARE * self._budget_s:
            length = max(SHORT, length // 2)
        self.longest_tokens = length

    def _round(self) -> list[Callable[[], Awaitable[object]]]:
        longest = self.longest_tokens
        probes: list[Callable[[], Awaitable[object]]] = []
        probes += [partial(self._cold, "shortest", SHORTEST)] * MINIMAL_ASKS
        probes += [partial(self._cold, "cold", max(SHORT, longest // part)) for part in COLD_PARTS]
        probes += [partial(self._family, max(SHORT, longest // part)) for part in CONTEXT_PARTS]
        probes.append(self._alone)
        probes.append(self._batches)
        return probes

    async def _cold(self, probe: str, length: int) -> Answer:
        prompt = self._fresh(length)
        answer = await self._ask(prompt, 1)
        self.rows.append(first_token_row(probe, prompt, answer, self._facts))
        return answer

    async def _family(self, length: int) -> None:
        """Ask a cold prompt, then others that go on from there; then several at a time."""
        prompt = self._fresh(length)
        answer = await self._ask(prompt, self._output_tokens)
        self.rows.append(first_token_row("cold", prompt, answer, self._facts))
        self.rows += decode_rows("decode behind a context", [prompt], [answer])
        for part in TAIL_PARTS:
            tail = self._tail(prompt, max(SHORT, self.longest_tokens // part))
            warm = await self._ask(tail, 1)
            self.rows.append(first_token_row("warm", tail, warm, self._facts))
        if length < self.longest_tokens and self._widest >= CONTEXT_BATCH:
            tails = [self._tail(prompt, SHORT) for _ in range(CONTEXT_BATCH)]
            await self._together("batch behind a context", tails)

    async def _alone(self) -> None:
        await self._together("alone", [self._fresh(SHORT)])

    async def _batches(self) -> None:
        """Ask more and more at a time, as long as they all decode together."""
        for width in BATCHES:
            if width > self._widest:
                return
            began_s = self._clock()
            met = await self._together("batch", [self._fresh(SHORT) for _ in range(width)])
            took_s = self._clock() - began_s
            if not met or took_s > SLOW_BATCH * DECODE_SHARE * self._budget_s:
                self._widest = width if met else width // 2
                return

    async def _together(self, probe: str, prompts: Sequence[Prompt]) -> bool:
        """Ask ``prompts`` at a time; tell whether they were decoded together."""
        asks = [self._ask(prompt, self._output_tokens) for prompt in prompts]
        answers = await asyncio.gather(*asks)
        rows = decode_rows(probe, prompts, answers)
        self.rows += rows
        return bool(rows)

    async def _ask(self, prompt: Prompt, output_tokens: int) -> Answer:
        self.asked_tokens += len(prompt.tokens)
        return await self._send(prompt.tokens, output_tokens)

    def _fresh(self, length: int) -> Prompt:
        return Prompt(draw_tokens(self._tokens, length))

    def _tail(self, prompt: Prompt, length: int) -> Prompt:
        tokens = prompt.tokens + draw_tokens(self._tokens, length)
        return Prompt(tokens, shared_tokens=len(prompt.tokens))
