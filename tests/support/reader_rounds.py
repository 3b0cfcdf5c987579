"""The timing audit of reading alone: no process, no socket, so that microseconds can be seen.

Rounds as in ``warmroute.audit_probe``, with the time that one ``PromptReader`` takes for a body.
Before each one that counts others are read: what was left in the CPU's caches is no memory of ours.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import TYPE_CHECKING, Final

from prompt.codec import load_codec
from prompt.reader import CHAT_PATH, PromptReader
from warmroute.audit_judge import Samples
from warmroute.audit_probe import fresh_prompt

if TYPE_CHECKING:
    from pathlib import Path

MODEL: Final = "m"
WARM_UP: Final = 20
OTHERS: Final = 2
OTHER_WORDS: Final = 1_500


async def read_rounds(
    tokenizer: Path, words: int, samples: int, repeats: int, *, salt_first: bool = True
) -> list[Samples]:
    """Return the times of each repeat, in ms. ``salt_first``: as the router writes it."""
    collected = []
    async with PromptReader({MODEL: load_codec(tokenizer)}, load_codec(None)) as reader:
        for _ in range(WARM_UP):
            await _round(reader, words, Samples(), salt_first=salt_first)
        for _ in range(repeats):
            times = Samples()
            for _ in range(samples):
                await _round(reader, words, times, salt_first=salt_first)
            collected.append(times)
    return collected


async def _round(reader: PromptReader, words: int, times: Samples, *, salt_first: bool) -> None:
    planted = fresh_prompt(words)
    reads = [
        ("attacker", planted, times.probes),
        ("attacker", fresh_prompt(words), times.fresh),
        ("victim", planted, times.hits),
        ("victim", fresh_prompt(words), times.misses),
    ]
    secrets.SystemRandom().shuffle(reads)
    await reader.read(CHAT_PATH, _body("victim", planted, salt_first=salt_first))
    for salt, text, taken in reads:
        for _ in range(OTHERS):
            other = _body("other", fresh_prompt(OTHER_WORDS), salt_first=salt_first)
            await reader.read(CHAT_PATH, other)
        body = _body(salt, text, salt_first=salt_first)
        began_s = time.perf_counter()
        prompt = await reader.read(CHAT_PATH, body)
        taken.append(1e3 * (time.perf_counter() - began_s))
        assert prompt.prompts, prompt.unroutable


def _body(salt: str, text: str, *, salt_first: bool) -> bytes:
    fields = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    salted = {"cache_salt": salt}
    return json.dumps(salted | fields if salt_first else fields | salted).encode()
