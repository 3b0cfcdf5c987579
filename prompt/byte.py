"""Prompts as bytes, where no tokenizer is known: each UTF-8 byte is an id.

A stand-in that preserves what matters for routing, equal prefixes: the router and the bundled
worker both use it when neither has a tokenizer. Against a real engine it only estimates how long a
shared prefix is, and ``is_exact`` says so.

Conversations are written in the manner of ChatML: a head, one part per message that depends on that
message alone, and an end. So what is known of a conversation stays as it is when messages follow,
and only these are written and hashed. Bytes can be cut anywhere: nothing is carried over a cut.
"""

from __future__ import annotations

import codecs
import json
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Final

from msgspec import structs

from prompt.history import Rendered
from prompt.message import is_plain, normalised_messages, normalised_tools
from prompt.model import PromptTokens, TemplateFailureError
from prompt.request import decode_completion
from prompt.run import RunTokens, TokenRun
from prompt.segment import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prompt.passage import Passage
    from prompt.turn import Turn

BYTE_VALUES: Final = 256
_END: Final = "<|im_end|>\n"
_ANSWER: Final = "<|im_start|>assistant\n"
_ENCODE_WIDE: Final = codecs.lookup("utf-32-le").encode
"""Looked up now: when it is first needed, files may have run out."""


class ByteRun(TokenRun):
    """Ids below 256, kept in one byte each."""

    __slots__ = ()
    kept_bytes: ClassVar[int] = 1

    def packed(self, first: int, end: int) -> bytes:
        """Return tokens ``first`` to ``end``, packed."""
        return _widened(self.kept(first, end))


class _Written(Rendered, frozen=True, kw_only=True, gc=False):
    """What is kept of a conversation: ``checkpoints`` has one more, for the end of the last."""

    def shortened(self, count: int) -> Rendered:
        """Return what stays true of a conversation that shares the first ``count`` messages."""
        if count >= self.count:
            return self
        return structs.replace(self, count=count, checkpoints=self.checkpoints[: count + 1])


class ByteCodec:
    """Implements ``Codec`` and ``PrefixCodec``. For several threads."""

    vocabulary_size: Final = BYTE_VALUES
    digest: Final = "bytes-1"
    is_exact: Final = False

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def chat_tokens(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        options: Mapping[str, object],
    ) -> bytes:
        """See ``Codec``."""
        parts = [_head(tools, options), *_written(messages)]
        closing = _closing(options)
        if closing is None:
            parts[-1] = parts[-1].removesuffix(_END)
        return self.text_tokens("".join((*parts, closing or "")))

    def text_tokens(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """See ``Codec``."""
        del add_special_tokens  # bytes have none
        return _widened(_encoded(text))

    def text_prompt(self, text: str, *, add_special_tokens: bool, salt: str = "") -> PromptTokens:
        """See ``PrefixCodec``."""
        del salt  # nothing is remembered of a text
        packed = self.text_tokens(text, add_special_tokens=add_special_tokens)
        return PromptTokens(packed=packed, is_exact=False)

    @property
    def used_bytes(self) -> int:
        """See ``PrefixCodec``; nothing is remembered of a text."""
        return 0

    def forget(self) -> None:
        """See ``PrefixCodec``; nothing is remembered of a text."""

    def is_known(self, passage: Passage) -> bool:
        """See ``PrefixCodec``."""
        return self._checkpoint_of(passage) is not None

    def passage_prompt(self, passage: Passage) -> PromptTokens:
        """See ``PrefixCodec``."""
        start = self._checkpoint_of(passage)
        if start is None:
            call = decode_completion(passage.body)
            return self.text_prompt(str(call.prompts[0]), add_special_tokens=True)
        points = self._grown(start, list(passage.chunks))
        for mark, point in zip(passage.marks, points, strict=True):
            mark.checkpoints[id(self)] = point
        last = points[-1] if points else start
        return PromptTokens(run=RunTokens(last.run, last.count, b""), is_exact=False)

    def _checkpoint_of(self, passage: Passage) -> Checkpoint | None:
        if passage.known is None:
            return Checkpoint(ByteRun(), 0)
        return passage.known.checkpoints.get(id(self))

    def turn_prompt(self, turn: Turn) -> PromptTokens:
        """See ``PrefixCodec``."""
        tokens = self.turn_tail(turn)
        if tokens is not None:
            return tokens
        call = turn.call
        if turn.conversation is None or turn.variant is None:
            packed = self.chat_tokens(call.messages, call.tools, options=call.options)
            return PromptTokens(packed=packed, is_exact=False)
        head = _head(call.tools, call.options)
        [begin] = self._grown(Checkpoint(ByteRun(), 0), [head])
        return self._continued(turn, [begin])

    def turn_tail(self, turn: Turn) -> PromptTokens | None:
        """See ``PrefixCodec``."""
        if turn.conversation is None or turn.variant is None:
            return None
        known = turn.conversation.rendered.get(turn.variant)
        if not isinstance(known, _Written):
            return None
        known = known.shortened(len(turn.call.messages))
        points = [point for point in known.checkpoints if point is not None]
        if _closing(turn.call.options) is None:  # the last message is written without its end
            points = points[: len(turn.call.messages)]
        return self._continued(turn, points)

    def _continued(self, turn: Turn, points: Sequence[Checkpoint]) -> PromptTokens:
        """Return the prompt, of which the last of ``points`` is known: one per message begun."""
        call, conversation, variant = turn.call, turn.conversation, turn.variant
        parts = _written(call.messages[len(points) - 1 :])
        closing = _closing(call.options)
        rest = _encoded(closing or "")
        if closing is None:
            rest = _encoded(parts.pop().removesuffix(_END))
        all_points = [*points, *self._grown(points[-1], parts)]
        if conversation is not None and variant is not None:
            kept = _Written(
                count=len(all_points) - 1,
                checkpoints=list(all_points),
                after_last=None,
                last_part="",
                prologue="",
                last_user=None,
                first_reasoning=None,
            )
            conversation.keep(variant, kept)
        last = all_points[-1]
        return PromptTokens(run=RunTokens(last.run, last.count, _widened(rest)), is_exact=False)

    def _grown(self, start: Checkpoint, parts: Sequence[str]) -> list[Checkpoint]:
        """Return where each of ``parts`` ends, written one after the other from ``start`` on."""
        encoded = [_encoded(part) for part in parts]
        with self._lock:
            run = start.run.extended(start.count, b"".join(encoded))
        points, count = [], start.count
        for part in encoded:
            count += len(part)
            points.append(Checkpoint(run, count))
        return points

    def decode(self, ids: Sequence[int]) -> str:
        """See ``Codec``."""
        return bytes(token if token < BYTE_VALUES else 0xFF for token in ids).decode(
            "utf-8", "replace"
        )


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        detail = "text with a lone surrogate"
        raise TemplateFailureError(detail) from error


def _widened(data: bytes) -> bytes:
    """Return what pack_tokens makes of bytes, without a loop: Latin-1 maps them to themselves."""
    return _ENCODE_WIDE(data.decode("latin-1"))[0]


def _head(tools: list[dict[str, Any]] | None, options: Mapping[str, object]) -> str:
    """Return what stands before the messages."""
    kwargs = options.get("chat_template_kwargs")
    head = {
        "tools": normalised_tools(tools),
        "documents": options.get("documents"),
        "reasoning_effort": options.get("reasoning_effort"),
        **(kwargs if isinstance(kwargs, dict) else {}),
    }
    return "".join(
        f"<|im_start|>{name}\n{_as_json(value)}{_END}"
        for name, value in head.items()
        if value is not None
    )


def _closing(options: Mapping[str, object]) -> str | None:
    """Return what stands after the messages; None where the last one goes on."""
    if options.get("continue_final_message"):
        return None
    return _ANSWER if options.get("add_generation_prompt", True) else ""


def _written(messages: list[dict[str, Any]]) -> list[str]:
    return [
        f"<|im_start|>{message['role']}\n{message['content']}{_END}"
        if is_plain(message)
        else _part(*normalised_messages((message,), is_structured=False))
        for message in messages
    ]


def _part(message: dict[str, Any]) -> str:
    extras = {
        key: message[key]
        for key in ("name", "tool_call_id", "reasoning", "tool_calls", "tools")
        if message.get(key) is not None
    }
    shown = "".join(f"{key}: {_as_json(value)}\n" for key, value in extras.items())
    return f"<|im_start|>{message['role']}\n{shown}{message['content']}{_END}"


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
