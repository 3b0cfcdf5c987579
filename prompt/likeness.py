"""Chats with images, audio and video: what of them is known, and what stands for the rest.

How many tokens an engine makes of an image is its own business, so behind the first one nothing is
known exactly. Two things are:

- *The head*: the ids before the first message with media. The chat is rendered with several texts
  in the place of media; what their ids have in common does not depend on what comes there.
- *A likeness*: the chat as bytes, with the digest of each image in its place, as long as the tokens
  of a usual image weigh. Equal likenesses have equal images, so a second turn about an image finds
  where the first one went.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from msgspec import Struct

from prompt.byte import ByteCodec
from prompt.media import MARK
from prompt.model import PromptTokens
from state.prefix import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from prompt.request import ChatCall

LIKENESS_BYTES: Final = 4_096
"""What one image, sound or film weighs where tokens are counted by bytes: 1,024 tokens."""
_PROBES: Final = ("<image>", "\n\nA", " 1", "a")
"""What a text may begin with: pieces that tokenizers join with what is before in different ways."""
_BYTES: Final = ByteCodec()


@runtime_checkable
class TextCodec(Protocol):
    """A codec that shows the text of a chat, and knows the exact ids of texts."""

    def chat_text(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        options: Mapping[str, object],
    ) -> str:
        """Return the rendered conversation; raises UnroutablePromptError."""

    def text_prompt(self, text: str, *, add_special_tokens: bool, salt: str = "") -> PromptTokens:
        """Return the prompt that is ``text``."""


class MediaPrompt(Struct, frozen=True):
    """What is known of a chat with media; ``head`` is None where no ids are known at all."""

    likeness: PromptTokens
    head: PromptTokens | None


def media_prompt(call: ChatCall, codec: object) -> MediaPrompt:
    """Return what is known of ``call``, of which some part holds media.

    Raises UnroutablePromptError where it holds parts besides that are not known at all.
    """
    likeness = _BYTES.chat_tokens(
        _with_texts(call.messages, _filler), call.tools, options=call.options
    )
    head = _head(call, codec) if isinstance(codec, TextCodec) else None
    return MediaPrompt(PromptTokens(packed=likeness, is_exact=False), head)


def _filler(mark: str) -> str:
    text = f"<{mark}>"
    return text * (LIKENESS_BYTES // len(text)) + text[: LIKENESS_BYTES % len(text)]


def _head(call: ChatCall, codec: TextCodec) -> PromptTokens | None:
    """Return the ids that do not depend on media; None where there are none."""
    options = {**call.options, "continue_final_message": False}
    has_added = bool(options.get("add_special_tokens"))
    packed: bytes | None = None
    for probe in _PROBES:
        text = codec.chat_text(_with_probe(call.messages, probe), call.tools, options=options)
        tokens = codec.text_prompt(text, add_special_tokens=has_added, salt=call.salt)
        packed = tokens.packed if packed is None else _common(packed, tokens.packed)
    sure = (packed or b"")[:-TOKEN_BYTES]  # the last id ends where other texts might go on
    return PromptTokens(packed=sure, is_exact=True) if sure else None


def _common(left: bytes, right: bytes) -> bytes:
    """Return the ids with which both begin."""
    low, high = 0, min(len(left), len(right)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        end = middle * TOKEN_BYTES
        if left[:end] == right[:end]:
            low = middle
        else:
            high = middle - 1
    return left[: low * TOKEN_BYTES]


def _with_probe(messages: Sequence[dict[str, Any]], probe: str) -> list[dict[str, Any]]:
    """Return the messages with ``probe`` as the whole content of those that hold media.

    An engine may put what stands for an image at the beginning of its message.
    """
    return [{**one, "content": probe} if _has_media(one) else one for one in messages]


def _with_texts(
    messages: Sequence[dict[str, Any]], text_of: Callable[[str], str]
) -> list[dict[str, Any]]:
    return [
        {**one, "content": [_as_text(part, text_of) for part in one["content"]]}
        if _has_media(one)
        else one
        for one in messages
    ]


def _as_text(part: Any, text_of: Callable[[str], str]) -> Any:
    mark = part.get(MARK) if isinstance(part, dict) else None
    return part if mark is None else {"type": "text", "text": text_of(mark)}


def _has_media(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(
        isinstance(part, dict) and MARK in part for part in content
    )
