"""Chats with images, audio and video: what of them is known, and what stands for the rest.

How many tokens an engine makes of an image is its own business, so behind the first one nothing is
known exactly. Two things are:

- *The head*: the ids before the first media. The chat is rendered with several texts in their
  place; what the ids of all have in common does not depend on what comes there. A template that is
  given parts is also asked with the media themselves: it may write another beginning then. Others
  are given texts: the engine puts what stands for media where it likes in their message.
- *A likeness*: the chat as bytes, with the digest of each image in its place, as long as the tokens
  of a usual image weigh. Equal likenesses have equal images, so a second turn about an image finds
  where the first one went. The bytes of the head, if there is one, are those of its ids: what is
  guessed of the text before an image is never more than is known of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import xxhash
from msgspec import Struct

from prompt.byte import ByteCodec
from prompt.media import MARK, SHOWN_KINDS
from prompt.message import ShownMedia
from prompt.model import PromptTokens
from state.prefix import TOKEN_BYTES, common_packed, pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

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

    def takes_parts(self, tools: list[dict[str, Any]] | None) -> bool:
        """Return whether the template of such a chat is given the parts of a content."""

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
    head = None
    if isinstance(codec, TextCodec):
        takes_parts = codec.takes_parts(call.tools)
        head = _head(call, codec, takes_parts=takes_parts)
        if head is not None:
            likeness = _with_head(call, likeness, head, takes_parts=takes_parts)
    return MediaPrompt(PromptTokens(packed=likeness, is_exact=False), head)


def _with_head(call: ChatCall, likeness: bytes, head: PromptTokens, *, takes_parts: bool) -> bytes:
    """Return ``likeness`` with the bytes of the ids of ``head`` in the place of its text.

    Its last ids make room for a digest of that text: the end of it may not be in the head, and a
    template may write some of it elsewhere.
    """
    if takes_parts:
        parts = next(one["content"] for one in call.messages if _has_media(one))
        mark = next(part[MARK] for part in parts if _is_media(part))
        end = likeness.find(_BYTES.text_tokens(_filler(mark), add_special_tokens=False))
    else:
        first = next(at for at, one in enumerate(call.messages) if _has_media(one))
        options = {**call.options, "continue_final_message": False, "add_generation_prompt": False}
        end = len(_BYTES.chat_tokens(call.messages[:first], call.tools, options=options))
    digest = xxhash.xxh3_128_digest(likeness[:end])
    return pack_tokens(head.packed[: -len(digest)] + digest) + likeness[end:]


def _filler(mark: str) -> str:
    text = f"<{mark}>"
    return text * (LIKENESS_BYTES // len(text)) + text[: LIKENESS_BYTES % len(text)]


def _head(call: ChatCall, codec: TextCodec, *, takes_parts: bool) -> PromptTokens | None:
    """Return the ids that do not depend on media; None where there are none."""
    options = {**call.options, "continue_final_message": False}
    has_added = bool(options.get("add_special_tokens"))
    packed: bytes | None = None
    for messages in _probed(call, takes_parts=takes_parts):
        text = codec.chat_text(messages, call.tools, options=options)
        tokens = codec.text_prompt(text, add_special_tokens=has_added, salt=call.salt)
        packed = tokens.packed if packed is None else common_packed(packed, tokens.packed)
    sure = (packed or b"")[:-TOKEN_BYTES]  # the last id ends where other texts might go on
    return PromptTokens(packed=sure, is_exact=True) if sure else None


def _probed(call: ChatCall, *, takes_parts: bool) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages with different things in the place of media."""
    if takes_parts:
        yield [_with_parts(one, _shown) for one in call.messages]
    for probe in _PROBES:
        if takes_parts:
            yield _with_texts(call.messages, _always(probe))
        else:
            yield [{**one, "content": probe} if _has_media(one) else one for one in call.messages]


def _always(text: str) -> Callable[[str], str]:
    return lambda _: text


def _shown(part: dict[str, Any]) -> ShownMedia:
    return ShownMedia(SHOWN_KINDS[part["type"]])


def _with_texts(
    messages: Sequence[dict[str, Any]], text_of: Callable[[str], str]
) -> list[dict[str, Any]]:
    def as_text(part: dict[str, Any]) -> dict[str, Any]:
        return {"type": "text", "text": text_of(part[MARK])}

    return [_with_parts(one, as_text) for one in messages]


def _with_parts(
    message: dict[str, Any], other: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Return ``message`` with ``other`` of each of its parts that holds media."""
    if not _has_media(message):
        return message
    parts = [other(part) if _is_media(part) else part for part in message["content"]]
    return {**message, "content": parts}


def _has_media(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(map(_is_media, content))


def _is_media(part: object) -> bool:
    return isinstance(part, dict) and MARK in part
