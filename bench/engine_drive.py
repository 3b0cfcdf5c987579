"""Drives a runner without an engine around it: prompts in, greedy tokens out."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from sidecar.clock import StepLoad
from sidecar.pool import PageId
from sidecar.runner import Batch, Draw, Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.runner import Outcome

GREEDY = (Draw(seed=0, index=0),)
NO_LOAD = StepLoad(0, 0, 0, 0)
"""Only the runner without a model asks what a step costs."""
TOKEN_BYTES = 4


class RunsBatches(Protocol):
    """What of a runner is needed."""

    async def run(self, batch: Batch) -> Outcome:
        """Run one step."""


class Manner(Struct, frozen=True, kw_only=True):
    """How prompts are computed. A step has at most ``step_tokens`` and ``sequences``.

    ``chunk_tokens`` bounds what one prompt gets of a step. ``context_tokens`` of every prompt are
    in its pages already. Sequences have pages of their own from ``first_page`` on.
    """

    page_tokens: int
    step_tokens: int = 2048
    chunk_tokens: int = 2048
    sequences: int = 64
    context_tokens: int = 0
    first_page: int = 0


def random_prompts(count: int, tokens: int, vocabulary_size: int, seed: int) -> list[list[int]]:
    """Return ``count`` prompts of ``tokens`` random ids."""
    draw = random.Random(seed)  # noqa: S311 - reproducible
    return [[draw.randrange(vocabulary_size) for _ in range(tokens)] for _ in range(count)]


def packed(tokens: Sequence[int]) -> bytes:
    """Return ids as u32 little-endian."""
    return b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in tokens)


class _Text:
    """A prompt that grows by what is generated after it."""

    def __init__(self, prompt: Sequence[int], pages: tuple[PageId, ...], computed: int) -> None:
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.pages = pages
        self.computed = computed

    def slot(self, most_tokens: int) -> Slot:
        """Return what comes next, and note that it will have been computed."""
        new = self.tokens[self.computed : self.computed + most_tokens]
        context, self.computed = self.computed, self.computed + len(new)
        is_last = self.computed == len(self.tokens)
        return Slot(packed(new), context, self.pages, GREEDY if is_last else ())


def page_tables(prompts: Sequence[Sequence[int]], outputs: int, manner: Manner) -> list[range]:
    """Return each prompt's pages, with room for ``outputs`` more tokens."""
    tables, page = [], manner.first_page
    for prompt in prompts:
        end = page + -(-(len(prompt) + outputs) // manner.page_tokens)
        tables.append(range(page, end))
        page = end
    return tables


async def generate(
    runner: RunsBatches, prompts: Sequence[Sequence[int]], outputs: int, manner: Manner
) -> list[list[int]]:
    """Return ``outputs`` greedy tokens for each prompt, all prompts served together."""
    tables = page_tables(prompts, outputs, manner)
    texts = [
        _Text(prompt, tuple(map(PageId, table)), manner.context_tokens)
        for prompt, table in zip(prompts, tables, strict=True)
    ]
    open_texts = list(texts)
    while open_texts:
        room, step = manner.step_tokens, []
        for text in open_texts[: manner.sequences]:
            if room:
                slot = text.slot(min(room, manner.chunk_tokens))
                room -= len(slot.packed_tokens) // TOKEN_BYTES
                step.append((text, slot))
        batch = Batch(load=NO_LOAD, slots=tuple(slot for _, slot in step))
        outcome = await runner.run(batch)
        for (text, _), samples in zip(step, outcome.samples, strict=True):
            text.tokens += [sampled.token for sampled in samples]
        open_texts = [
            text for text in open_texts if len(text.tokens) < text.prompt_tokens + outputs
        ]
    return [text.tokens[text.prompt_tokens :] for text in texts]
