"""Conversations of the shared text data, asked turn by turn, some under a salt."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any, Final

from support.data import json_lines
from support.engine_load import Talk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prompt.codec import Codec

TEXTS: Final = ("oasst1_en", "glaive_tools", "taubench_airline", "arena_hard_v2")
SALTS: Final = (None, None, "blue", "green")
_SPOKEN: Final = frozenset({"system", "user", "assistant"})


def real_talks(codec: Codec, most_tokens: int, seed: int) -> Iterator[Talk]:
    """Yield talks without end: each conversation anew once all were told, under any salt.

    Each ends before a prompt of it would be longer than ``most_tokens``.
    """
    rng = random.Random(seed)
    spoken = [turns for name in TEXTS for turns in _turns_of(name, codec, most_tokens)]
    numbers = itertools.count()
    while True:
        rng.shuffle(spoken)
        for system, questions, answers in spoken:
            yield Talk(
                number=next(numbers),
                questions=list(questions),
                messages=[("system", system)] if system else [],
                answers=list(answers),
                salt=rng.choice(SALTS),
            )


def _turns_of(
    name: str, codec: Codec, most_tokens: int
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield system text, questions and answers of conversations that go to and fro."""
    for item in json_lines(f"text/{name}.jsonl.zst"):
        messages = [one for one in item["messages"] if one["role"] in _SPOKEN and one["content"]]
        system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
        pairs = _pairs_of(messages)
        fitting = _fitting(system, pairs, codec, most_tokens)
        if fitting:
            yield system, [asked for asked, _ in fitting], [told for _, told in fitting if told]


def _pairs_of(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return questions with their answers; the last one may have none."""
    pairs: list[tuple[str, str]] = []
    for asked, told in itertools.zip_longest(messages[::2], messages[1::2]):
        if asked["role"] != "user" or (told is not None and told["role"] != "assistant"):
            break
        pairs.append((asked["content"], "" if told is None else told["content"]))
    return pairs


def _fitting(
    system: str, pairs: list[tuple[str, str]], codec: Codec, most_tokens: int
) -> list[tuple[str, str]]:
    """Return the leading pairs whose prompts are short enough."""
    messages = [{"role": "system", "content": system}] if system else []
    for count, (asked, told) in enumerate(pairs):
        messages.append({"role": "user", "content": asked})
        if len(codec.chat_tokens(messages, None, options={})) // 4 > most_tokens:
            return pairs[:count]
        messages.append({"role": "assistant", "content": told})
    return pairs
