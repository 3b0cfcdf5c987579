"""The bytes that the worker answers: whole bodies and the chunks of streams.

They are laid out like vLLM's, field by field, so that a router cannot tell the two apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from sidecar.generation import FinishReason
from sidecar.logprob import chat_logprobs, completion_logprobs
from sidecar.runner import Sampled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.generation import Delta

_encode: Final = msgspec.json.encode


class Usage(Struct, frozen=True):
    """Tokens of one response, or of one choice so far, which says nothing of the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    def wire(self) -> dict[str, Any]:
        """Return the OpenAI ``usage`` object."""
        fields: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if self.cached_tokens is None:
            return fields
        return fields | {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}


class Answer(Struct, frozen=True, kw_only=True):
    """One complete choice; ``sampled`` is empty where no logprobs are wanted."""

    text: str
    token_ids: list[int]
    sampled: list[Sampled]
    finish: FinishReason
    stopped_by: str | int | None


class Logprobs(Struct, frozen=True):
    """How log probabilities are told: with how many alternatives, tokens spelled how."""

    tops: int
    spell: Callable[[int], str]


class Layout(Struct, frozen=True, kw_only=True):
    """What the bytes of one answer have in common.

    ``shown_prompts`` has the token ids of each prompt when the client asked for token ids;
    ``logprobs`` is None when it did not ask for them.
    """

    request_id: str
    model: str
    created_s: int
    shown_prompts: tuple[list[int], ...] | None = None
    logprobs: Logprobs | None = None

    def head(self, prefix: str, kind: str) -> dict[str, Any]:
        """Return the leading fields of every body."""
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created_s,
            "model": self.model,
        }

    def chunk_head(self, prefix: str, kind: str) -> bytes:
        """Return a chunk up to the value of ``choices``."""
        return b'data: %b,"choices":' % _encode(self.head(prefix, kind))[:-1]

    def prompt_of(self, choice: int, choices: int) -> list[int]:
        """Return the shown prompt of one of all choices."""
        prompts = self.shown_prompts or ([],)
        return prompts[choice * len(prompts) // choices]

    def finish_fields(self, delta: Delta) -> bytes:
        """Return the last fields of a choice in a chunk."""
        shown = self.shown_prompts is not None
        token_ids = b',"token_ids":%b' % _encode(delta.token_ids) if shown else b""
        if delta.finish is None:
            return b'"finish_reason":null%b' % token_ids
        reason = _encode(delta.stopped_by)
        return b'"finish_reason":"%b","stop_reason":%b%b' % (
            delta.finish.encode(),
            reason,
            token_ids,
        )

    def closing_fields(self, answer: Answer) -> dict[str, Any]:
        """Return the last fields of a choice in a whole body."""
        fields: dict[str, Any] = {
            "finish_reason": answer.finish,
            "stop_reason": answer.stopped_by,
        }
        return fields if self.shown_prompts is None else fields | {"token_ids": answer.token_ids}


def _tail(usage: Usage | None) -> bytes:
    return b"}\n\n" if usage is None else b',"usage":%b}\n\n' % _encode(usage.wire())


class ChatWriter:
    """Writes one chat completion."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._chunk = layout.chunk_head("chatcmpl", "chat.completion.chunk")

    def opening(self, usages: Sequence[Usage | None]) -> bytes:
        """Return the chunks that tell the role, one for each choice with its usage so far."""
        prompts = self._layout.shown_prompts
        extra = b"" if prompts is None else b',"prompt_token_ids":%b' % _encode(prompts[0])
        return b"".join(
            b'%b[{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,'
            b'"finish_reason":null}]%b%b' % (self._chunk, choice, extra, _tail(usage))
            for choice, usage in enumerate(usages)
        )

    def delta(self, delta: Delta, usage: Usage | None = None) -> bytes:
        """Return the chunk for one delta; ``usage`` is the choice's so far."""
        return b'%b[{"index":%d,"delta":{"content":%b},"logprobs":%b,%b}]%b' % (
            self._chunk,
            delta.choice,
            _encode(delta.text),
            self._logprobs(delta.sampled),
            self._layout.finish_fields(delta),
            _tail(usage),
        )

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk without choices that tells the usage."""
        return b"%b[]%b" % (self._chunk, _tail(usage))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the body of an unstreamed answer."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "tool_calls": []},
                "logprobs": msgspec.Raw(self._logprobs(answer.sampled)),
                **self._layout.closing_fields(answer),
            }
            for index, answer in enumerate(answers)
        ]
        body = self._layout.head("chatcmpl", "chat.completion")
        body |= {"choices": choices, "usage": usage.wire()}
        if self._layout.shown_prompts is not None:
            body["prompt_token_ids"] = self._layout.shown_prompts[0]
        return _encode(body)

    def _logprobs(self, sampled: Sequence[Sampled]) -> bytes:
        wanted = self._layout.logprobs
        if wanted is None:
            return b"null"
        return _encode(chat_logprobs(sampled, wanted.tops, wanted.spell))


class CompletionWriter:
    """Writes one text completion; offsets go on from delta to delta."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._chunk = layout.chunk_head("cmpl", "text_completion")
        self._written_chars: dict[int, int] = {}

    def opening(self, usages: Sequence[Usage | None]) -> bytes:
        """Return chunks with the prompts' token ids, if wanted; nothing otherwise."""
        if self._layout.shown_prompts is None:
            return b""
        return b"".join(
            b'%b[{"index":%d,"text":"","logprobs":null,"finish_reason":null,"stop_reason":null,'
            b'"prompt_token_ids":%b}]%b'
            % (
                self._chunk,
                choice,
                _encode(self._layout.prompt_of(choice, len(usages))),
                _tail(usage),
            )
            for choice, usage in enumerate(usages)
        )

    def delta(self, delta: Delta, usage: Usage | None = None) -> bytes:
        """Return the chunk for one delta; ``usage`` is the choice's so far."""
        return b'%b[{"index":%d,"text":%b,"logprobs":%b,%b}]%b' % (
            self._chunk,
            delta.choice,
            _encode(delta.text),
            _encode(self._logprobs(delta.choice, delta.sampled)),
            self._layout.finish_fields(delta),
            _tail(usage),
        )

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk without choices that tells the usage."""
        return b"%b[]%b" % (self._chunk, _tail(usage))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the body of an unstreamed answer."""
        choices = []
        for index, answer in enumerate(answers):
            choice = {
                "index": index,
                "text": answer.text,
                "logprobs": self._logprobs(index, answer.sampled),
                **self._layout.closing_fields(answer),
            }
            if self._layout.shown_prompts is not None:
                choice["prompt_token_ids"] = self._layout.prompt_of(index, len(answers))
            choices.append(choice)
        body = self._layout.head("cmpl", "text_completion")
        return _encode(body | {"choices": choices, "usage": usage.wire()})

    def _logprobs(self, choice: int, sampled: Sequence[Sampled]) -> dict[str, Any] | None:
        wanted = self._layout.logprobs
        if wanted is None:
            return None
        start_chars = self._written_chars.get(choice, 0)
        fields = completion_logprobs(sampled, wanted.tops, wanted.spell, start_chars)
        self._written_chars[choice] = start_chars + sum(map(len, fields["tokens"]))
        return fields
