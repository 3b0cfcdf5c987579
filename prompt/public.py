"""Public prefixes: the start of conversations, or of texts, that is no secret of anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from state.prefix import common_packed

if TYPE_CHECKING:
    from prompt.codec import Codec

_PROBES: Final = ("a", "b")


class PublicText(Struct, frozen=True, forbid_unknown_fields=True):
    """``messages``, with ``tools`` where the prompts have them, or else a ``prompt``."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt: str | None = None


def common_tokens(text: PublicText, codec: Codec) -> bytes:
    """Return the packed tokens that every prompt with this start has in common.

    Raises UnroutablePromptError where a model's template cannot make a conversation of it.
    """
    if text.messages is None:
        return codec.text_tokens(text.prompt or "")
    one, other = (
        codec.chat_tokens(
            [*text.messages, {"role": "user", "content": probe}], text.tools, options={}
        )
        for probe in _PROBES
    )
    return common_packed(one, other)
