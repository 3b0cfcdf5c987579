"""Chat bodies that continue known ones: decode only the messages that are new.

Known bodies are kept up to the end of their last message, each message's end marked with the
conversation so far. Where a body goes on from such a mark, what is before it is the same text: the
same fields, the same messages, all valid. So the body without its known messages is decoded in its
place, and the known ones are put in front of what it holds.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import msgspec
import xxhash
from msgspec import Raw, Struct

from prompt.history import Conversation
from prompt.model import BadPromptError, Unroutable, UnroutablePromptError
from prompt.radix import PrefixTree
from prompt.request import (
    ChatCall,
    ChatHead,
    chat_call,
    chat_head,
    decoded_messages,
    some_messages,
    tools_and_options,
)

if TYPE_CHECKING:
    from prompt.radix import Found

DEFAULT_BODY_BYTES: Final = 64 * 1024 * 1024
MAX_VARIANTS: Final = 128
_SPACE: Final = b" \t\r\n"
_MAX_VARIANT_BYTES: Final = 256 * 1024
_OTHER_MESSAGES: Final = (b'messages"', b"\\u00")
"""How a second key of that name could be spelled."""


class Variant:
    """All besides messages that decides the text of a chat, decoded once; compared by identity."""

    __slots__ = ("options", "printed", "raw", "tools")

    def __init__(
        self, raw: bytes, tools: list[dict[str, Any]] | None, options: dict[str, Any]
    ) -> None:
        self.raw = raw
        self.tools = tools
        self.options = options
        self.printed: list[dict[str, Any]] | None = None
        """The tools as templates see them, made when first needed."""


class Turn(Struct, frozen=True, kw_only=True):
    """One chat. ``fresh_bytes`` of its body were not known before.

    ``conversation`` holds its messages, and perhaps more that came later; None where nothing can
    be remembered of it.
    """

    call: ChatCall
    fresh_bytes: int
    conversation: Conversation | None = None
    variant: Variant | None = None


class _Spot(Struct, frozen=True, gc=False):
    """The end of message ``count`` in a body, whose list of messages begins at ``begin``."""

    conversation: Conversation
    count: int
    begin: int
    end: int


class ChatTurns:
    """Decodes chats. For one thread. ``capacity_bytes`` bounds the bodies that are kept."""

    def __init__(self, capacity_bytes: int = DEFAULT_BODY_BYTES) -> None:
        self._tree: PrefixTree[_Spot] = PrefixTree(capacity_bytes)
        self._variants: OrderedDict[bytes, Variant] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        """Bodies and marks; decoded messages weigh up to twice as much again."""
        return self._tree.used_bytes

    def forget(self) -> None:
        """Forget every body."""
        self._tree.clear()
        self._variants.clear()

    def decode(self, body: bytes) -> Turn:
        """Decode one body; raises BadPromptError where the client is to blame."""
        found = self._tree.find(body)
        spot = found.payload
        if spot is not None:
            turn = self._continued(body, spot, found)
            if turn is not None:
                return turn
        return self._begun(body, found)

    def _continued(self, body: bytes, spot: _Spot, found: Found[_Spot]) -> Turn | None:
        """Return the turn that goes on from ``spot``; None where the body is to be read anew."""
        rest = _next_message(body, spot.end)
        if rest is None:
            return None
        begin = spot.begin + 1
        shortened = body[:begin] + body[rest:]
        try:
            head = chat_head(shortened)
            raw = bytes(head.messages)
            fresh = decoded_messages(head.messages)
            variant = self._variant_of(head)
        except (BadPromptError, UnroutablePromptError):
            return None  # with the known messages, the error tells its place
        end = spot.begin + len(raw)
        if shortened[spot.begin : end] != raw or not _is_only_list(shortened[end:]):
            return None
        if not is_apart(body, spot.begin, head.cache_salt):
            return None
        conversation = spot.conversation.continued(spot.count, fresh)
        count = spot.count + len(fresh)
        spots = _spots_of(raw, conversation, spot.begin, rest - begin, spot.count)
        if spots:
            self._tree.insert(body, spots[-1].end, [(one.end, one) for one in spots], found)
        messages = conversation.messages[:count]
        call = chat_call(head, messages, variant.tools, variant.options, None)
        return Turn(
            call=call,
            fresh_bytes=len(shortened),
            conversation=conversation,
            variant=variant,
        )

    def _begun(self, body: bytes, found: Found[_Spot]) -> Turn:
        head = chat_head(body)
        try:
            messages = some_messages(head.messages)
            variant = self._variant_of(head)
        except UnroutablePromptError as error:
            return Turn(call=_failed(head, error.reason), fresh_bytes=len(body))
        call = chat_call(head, messages, variant.tools, variant.options, None)
        raw = bytes(head.messages)
        begin = body.find(raw)
        is_kept = _is_list_at(body, begin, raw) and is_apart(body, begin, head.cache_salt)
        if not is_kept:
            return Turn(call=call, fresh_bytes=len(body))
        conversation = Conversation(list(messages))
        spots = _spots_of(raw, conversation, begin, 0, 0)
        self._tree.insert(body, spots[-1].end, [(one.end, one) for one in spots], found)
        return Turn(call=call, fresh_bytes=len(body), conversation=conversation, variant=variant)

    def _variant_of(self, head: ChatHead) -> Variant:
        parts = (
            head.model.encode(),
            bytes(head.tools),
            bytes(head.chat_template_kwargs),
            bytes(head.documents),
            repr(
                (
                    head.add_generation_prompt,
                    head.continue_final_message,
                    head.add_special_tokens,
                    head.reasoning_effort,
                    head.cache_salt,
                )
            ).encode("utf-8", "surrogatepass"),
        )
        raw = b"\0".join(parts)  # a NUL is in no JSON, and in no model's name
        digest = xxhash.xxh3_128_digest(raw)
        known = self._variants.get(digest)
        if known is not None and known.raw == raw:
            self._variants.move_to_end(digest)
            return known
        variant = Variant(raw, *tools_and_options(head))
        if len(raw) <= _MAX_VARIANT_BYTES:
            self._variants[digest] = variant
            if len(self._variants) > MAX_VARIANTS:
                self._variants.popitem(last=False)
        return variant


def is_apart(body: bytes, begin: int, salt: str | None) -> bool:
    """Return whether the salt stands before the prompt, which begins there.

    Else a body begins like those of other salts, and what is known of these must not make it fast.
    """
    return salt is None or b'"%b"' % salt.encode("utf-8", "surrogatepass") in body[:begin]


def _failed(head: ChatHead, reason: Unroutable) -> ChatCall:
    return chat_call(head, [], None, {}, reason)


def _next_message(body: bytes, position: int) -> int | None:
    """Return where the list of messages goes on after one of them; None if it is no list there."""
    after = _skip_space(body, position)
    if body[after : after + 1] == b"]":
        return after
    if body[after : after + 1] != b",":
        return None
    after = _skip_space(body, after + 1)
    return None if body[after : after + 1] in (b"]", b"") else after


def _skip_space(body: bytes, position: int) -> int:
    while body[position : position + 1] in _SPACES:
        position += 1
    return position


_SPACES: Final = frozenset(_SPACE[index : index + 1] for index in range(len(_SPACE)))


def _is_only_list(after: bytes) -> bool:
    """Return whether no other ``messages`` can follow, whatever its spelling."""
    return not any(spelling in after for spelling in _OTHER_MESSAGES)


def _is_list_at(body: bytes, begin: int, raw: bytes) -> bool:
    """Return whether the body's messages are the list at ``begin``: without it, there are none."""
    end = begin + len(raw)
    if not _is_only_list(body[end:]):
        return False
    emptied = chat_head(body[:begin] + b"[]" + body[end:])
    return bytes(emptied.messages) == b"[]"


def _spots_of(
    raw: bytes, conversation: Conversation, begin: int, skipped: int, count: int
) -> list[_Spot]:
    """Return the ends of the messages in ``raw``, of which ``count`` are known.

    In the body the list begins at ``begin``; what is in ``raw`` stands ``skipped`` bytes later.
    """
    spots = []
    position = 1
    for element in msgspec.json.decode(raw, type=list[Raw]):
        start = _skip_space(raw, position)
        if raw[start : start + 1] == b",":
            start = _skip_space(raw, start + 1)
        position = start + len(bytes(element))
        count += 1
        spots.append(_Spot(conversation, count, begin, begin + skipped + position))
    return spots
