"""What one engine is asked to be calibrated, and what its answers say about its steps.

A prompt that is alone is prefilled in as few steps as the engine's budget allows; its first token
comes with the last of them. From then on each step gives one token to every sequence: between two
tokens of the sequence that began last, all sequences of a batch decoded in every step.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from msgspec import Struct

from replay.fit import StepRow

DEFAULT_STEP_TOKENS: Final = 8_192
DEFAULT_SEQUENCES: Final = 256
DEFAULT_CONTEXT_TOKENS: Final = 4_096
ASSUMED_PAGE_TOKENS: Final = 16
FIRST_TOKEN: Final = 16
TOKENS: Final = 224
"""Ids of probes are FIRST_TOKEN and up: every vocabulary of text has them, as plain tokens."""
WINDOWS: Final = 3
"""Into so many parts decoding is cut: one that was disturbed does not spoil the others."""
LEAST_STEPS: Final = 4
"""In such a part."""


class EngineFacts(Struct, frozen=True, kw_only=True):
    """What has to be known of an engine; None: it does not tell.

    ``is_caching`` None: it does not say whether it keeps prefixes. ``told`` names the fields that
    the engine told or the user gave; the others are assumed.
    """

    model: str
    context_tokens: int = DEFAULT_CONTEXT_TOKENS
    step_tokens: int = DEFAULT_STEP_TOKENS
    max_sequences: int = DEFAULT_SEQUENCES
    page_tokens: int | None = None
    capacity_tokens: int | None = None
    is_caching: bool | None = None
    told: frozenset[str] = frozenset()

    def believed_cached(self, shared_tokens: int) -> int:
        """Return what the cache saves of a prompt that an earlier one shares so much with."""
        if self.is_caching is False:
            return 0
        page_tokens = self.page_tokens or ASSUMED_PAGE_TOKENS
        return shared_tokens // page_tokens * page_tokens


class Answer(Struct, frozen=True, kw_only=True):
    """When each token of an answer came, in seconds on the clock that says when it was asked.

    ``cached_tokens`` None: the engine did not tell.
    """

    sent_s: float
    times_s: tuple[float, ...]
    cached_tokens: int | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.times_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None with fewer than two."""
        if len(self.times_s) < 2:  # noqa: PLR2004 - after the first
            return None
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)


Ask = Callable[[Sequence[int], int], Awaitable[Answer]]
"""Asks the engine to continue token ids by so many tokens, whatever they are."""


class Prompt(Struct, frozen=True):
    """Token ids; the first ``shared_tokens`` were asked before."""

    tokens: tuple[int, ...]
    shared_tokens: int = 0


def salted(seed: int, salt: int) -> random.Random:
    """Return draws that another ``salt`` makes others."""
    return random.Random(f"{seed} {salt}")  # noqa: S311 - reproducible, not secret


def draw_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    """Return a prompt that shares its start with no other one."""
    return tuple(FIRST_TOKEN + byte % TOKENS for byte in rng.randbytes(count))


def first_token_row(probe: str, prompt: Prompt, answer: Answer, facts: EngineFacts) -> StepRow:
    """Return what the first token of a prompt that was alone took."""
    cached_tokens = answer.cached_tokens
    if cached_tokens is None:
        cached_tokens = facts.believed_cached(prompt.shared_tokens)
    # The last token is computed in any case: its output is wanted.
    cached_tokens = min(cached_tokens, len(prompt.tokens) - 1)
    new_tokens = len(prompt.tokens) - cached_tokens
    return StepRow(
        probe=probe,
        ms=1e3 * answer.ttft_s,
        steps=-(-new_tokens // facts.step_tokens),
        prefill_tokens=new_tokens,
        attention_pairs=new_tokens * cached_tokens + new_tokens * (new_tokens + 1) // 2,
        requests=1,
        prompt_tokens=len(prompt.tokens),
    )


def decode_rows(
    probe: str, prompts: Sequence[Prompt], answers: Sequence[Answer]
) -> tuple[StepRow, ...]:
    """Return what decoding of all ``answers`` at a time took; nothing where they hardly met."""
    last = max(answers, key=lambda answer: answer.times_s[0])
    steps = bisect_right(last.times_s, min(answer.times_s[-1] for answer in answers)) - 1
    windows = min(WINDOWS, steps // LEAST_STEPS)
    rows = []
    for window in range(windows):
        begin, end = (steps * edge // windows for edge in (window, window + 1))
        begin_s, end_s = last.times_s[begin], last.times_s[end]
        if end_s <= begin_s:
            continue
        read = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            produced = bisect_right(answer.times_s, begin_s)
            context_tokens = len(prompt.tokens) + produced - 1
            read += (end - begin) * context_tokens + (end - begin) * (end - begin - 1) // 2
        rows.append(
            StepRow(
                probe=probe,
                ms=1e3 * (end_s - begin_s),
                steps=end - begin,
                decode_sequences=(end - begin) * len(answers),
                kv_tokens_read=read,
            )
        )
    return tuple(rows)


def alone_row(prompt_tokens: int, output_tokens: int, step_tokens: int) -> StepRow:
    """Return what a cold request is that has an engine of its own; ``ms`` is 0, not measured."""
    decoded = output_tokens - 1
    return StepRow(
        probe="",
        ms=0.0,
        steps=-(-prompt_tokens // step_tokens) + decoded,
        prefill_tokens=prompt_tokens,
        attention_pairs=prompt_tokens * (prompt_tokens + 1) // 2,
        decode_sequences=decoded,
        kv_tokens_read=decoded * prompt_tokens + decoded * (decoded - 1) // 2,
        requests=1,
        prompt_tokens=prompt_tokens,
    )
