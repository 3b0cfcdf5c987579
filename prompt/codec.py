"""Prompts to packed token ids: by a model's own tokenizer, or by bytes where there is none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from prompt.byte import ByteCodec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from prompt.model import PromptTokens
    from prompt.passage import Passage
    from prompt.turn import Turn


@runtime_checkable
class PrefixCodec(Protocol):
    """A codec that pays only for what is new since the longest known prefix."""

    @property
    def used_bytes(self) -> int:
        """What it keeps of texts, in bytes."""

    def text_prompt(self, text: str, *, add_special_tokens: bool, salt: str = "") -> PromptTokens:
        """Return the prompt that is ``text``; prefixes are known by ``salt``."""

    def passage_prompt(self, passage: Passage) -> PromptTokens:
        """Return the prompt of a completion with marks."""

    def is_known(self, passage: Passage) -> bool:
        """Return whether the tokens before the passage's fresh part are at hand."""

    def turn_prompt(self, turn: Turn) -> PromptTokens:
        """Return the prompt of a turn."""

    def turn_tail(self, turn: Turn) -> PromptTokens | None:
        """Return the same if that takes no work on what was known before the turn."""

    def forget(self) -> None:
        """Forget every text; the tokenizer's single words stay."""


class Codec(Protocol):
    """Prompts of one model to ids, packed as ``state.prefix.pack_tokens`` does, and back.

    ``options`` holds what else decides a chat prompt: ``add_generation_prompt`` (default True),
    ``continue_final_message``, ``add_special_tokens`` (default False), ``chat_template_kwargs``,
    ``documents``, ``reasoning_effort``. ``digest`` names tokenizer and templates: equal digests
    give equal ids. Encoding raises UnroutablePromptError where the ids cannot be known.
    """

    @property
    def vocabulary_size(self) -> int:
        """Ids are below this."""

    @property
    def digest(self) -> str:
        """16 characters."""

    @property
    def is_exact(self) -> bool:
        """Whether these are the ids that an engine with the same files computes."""

    def chat_tokens(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        options: Mapping[str, object],
    ) -> bytes:
        """Return the packed ids of a conversation."""

    def text_tokens(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """Return the packed ids of a plain prompt."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids, without special tokens."""


def load_codec(
    directory: Path | None,
    *,
    clock: Callable[[], float] = time.time,
    learns_words: bool = True,
) -> Codec:
    """Return the codec of a tokenizer directory, or the byte codec for None.

    ``clock`` is for templates that print the date; ``learns_words`` as for ``Tokenizer``. Raises
    CodecLoadError.
    """
    if directory is None:
        return ByteCodec()
    # Two tokenizer libraries and jinja, which a router without tokenizers does without.
    from prompt.tokenizer_codec import load_tokenizer_codec  # noqa: PLC0415

    return load_tokenizer_codec(directory, clock=clock, learns_words=learns_words)
