"""The values of the worker's HTTP API: what it reads of a body and the bytes that it answers.

The answers are laid out like vLLM's, field by field, so that a router cannot tell the two apart.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.engine import Delta

DONE: Final = b"data: [DONE]\n\n"
MAX_CHOICES: Final = 128
_FIELD: Final = re.compile(r"`\$\.?(?P<path>[^`]*)`|field `(?P<name>[^`]*)`")
_ERROR_TYPES: Final = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    503: "ServiceUnavailableError",
}

_T = TypeVar("_T")
_PositiveCount = Annotated[int, Meta(ge=1)]


class ApiError(Exception):
    """What a client is told instead of an answer; ``param`` names the field to blame."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


class StreamOptions(Struct, frozen=True):
    """What a stream sends besides its deltas."""

    include_usage: bool | None = False


class Sampling(Struct, frozen=True, kw_only=True):
    """The fields of both kinds of call that shape the output; others are ignored.

    The untyped ones are refused when they ask for what a synthetic model cannot do.
    """

    stream: bool | None = False
    max_tokens: _PositiveCount | None = None
    max_completion_tokens: _PositiveCount | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = 1
    seed: int | None = None
    ignore_eos: bool | None = False
    return_token_ids: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    echo: Any = None
    suffix: Any = None
    best_of: Any = None
    response_format: Any = None
    tool_choice: Any = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return tuple(stop for stop in stops if stop)

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TokenizeBody(Struct, frozen=True):
    """``POST /tokenize``: a text; with ``messages`` it is read like a chat completion."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool = True


class DetokenizeBody(Struct, frozen=True):
    """``POST /detokenize``."""

    tokens: list[Annotated[int, Meta(ge=0)]]


class Usage(Struct, frozen=True):
    """Tokens of one response."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def wire(self) -> dict[str, Any]:
        """Return the OpenAI ``usage`` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Answer(Struct, frozen=True):
    """One complete choice."""

    text: str
    token_ids: list[int]
    finish: Literal["stop", "length"]
    stopped_by: str | None


_sampling_decoder: Final = msgspec.json.Decoder(Sampling)
_encode: Final = msgspec.json.encode


def decode_sampling(body: bytes) -> Sampling:
    """Decode the output fields of a call; raises ApiError."""
    sampling = decoded(_sampling_decoder, body)
    chosen = sampling.response_format
    format_type = chosen.get("type") if isinstance(chosen, dict) else chosen
    refused = {
        "logprobs": sampling.logprobs not in (None, False),
        "prompt_logprobs": sampling.prompt_logprobs not in (None, False),
        "echo": sampling.echo not in (None, False),
        "suffix": sampling.suffix not in (None, ""),
        "best_of": sampling.best_of not in (None, 1, sampling.n),
        "response_format": format_type not in (None, "text"),
        "tool_choice": sampling.tool_choice not in (None, "none", "auto"),
    }
    for name, is_refused in refused.items():
        if is_refused:
            message = f"{name}: this value is not supported by this engine"
            raise ApiError(400, message, name)
    return sampling


def decoded(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Decode ``body``; raises ApiError that names the wrong field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        found = _FIELD.search(str(error))
        param = (found["path"] or found["name"]) if found else None
        message = str(error).replace("`", "")
        raise ApiError(400, message, param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"The body is not valid JSON: {error}"
        raise ApiError(400, message) from None


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Return an OpenAI error object."""
    kind = _ERROR_TYPES.get(status, "InternalServerError")
    error = {"message": message, "type": kind, "param": param, "code": status}
    return _encode({"error": error})


def error_event(status: int, message: str) -> bytes:
    """Return an error as the event of a stream that cannot go on."""
    return b"data: %b\n\n" % error_body(status, message)


class Layout(Struct, frozen=True):
    """What the bytes of one answer have in common.

    ``shown_prompts`` has the token ids of each prompt when the client asked for token ids.
    """

    request_id: str
    model: str
    created_s: int
    shown_prompts: tuple[list[int], ...] | None

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
            "logprobs": None,
            "finish_reason": answer.finish,
            "stop_reason": answer.stopped_by,
        }
        return fields if self.shown_prompts is None else fields | {"token_ids": answer.token_ids}


class ChatWriter:
    """Writes one chat completion."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._chunk = layout.chunk_head("chatcmpl", "chat.completion.chunk")

    def opening(self, choices: int) -> bytes:
        """Return the chunks that tell the role, one for each choice."""
        prompts = self._layout.shown_prompts
        extra = b"" if prompts is None else b',"prompt_token_ids":%b' % _encode(prompts[0])
        return b"".join(
            b'%b[{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,'
            b'"finish_reason":null}]%b}\n\n' % (self._chunk, choice, extra)
            for choice in range(choices)
        )

    def delta(self, delta: Delta) -> bytes:
        """Return the chunk for one delta."""
        return b'%b[{"index":%d,"delta":{"content":%b},"logprobs":null,%b}]}\n\n' % (
            self._chunk,
            delta.choice,
            _encode(delta.text),
            self._layout.finish_fields(delta),
        )

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk without choices that tells the usage."""
        return b'%b[],"usage":%b}\n\n' % (self._chunk, _encode(usage.wire()))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the body of an unstreamed answer."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "tool_calls": []},
                **self._layout.closing_fields(answer),
            }
            for index, answer in enumerate(answers)
        ]
        body = self._layout.head("chatcmpl", "chat.completion")
        body |= {"choices": choices, "usage": usage.wire()}
        if self._layout.shown_prompts is not None:
            body["prompt_token_ids"] = self._layout.shown_prompts[0]
        return _encode(body)


class CompletionWriter:
    """Writes one text completion."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._chunk = layout.chunk_head("cmpl", "text_completion")

    def opening(self, choices: int) -> bytes:
        """Return chunks with the prompts' token ids, if wanted; nothing otherwise."""
        prompts = self._layout.shown_prompts
        if prompts is None:
            return b""
        return b"".join(
            b'%b[{"index":%d,"text":"","logprobs":null,"finish_reason":null,"stop_reason":null,'
            b'"prompt_token_ids":%b}]}\n\n'
            % (self._chunk, choice, _encode(prompts[choice * len(prompts) // choices]))
            for choice in range(choices)
        )

    def delta(self, delta: Delta) -> bytes:
        """Return the chunk for one delta."""
        return b'%b[{"index":%d,"text":%b,"logprobs":null,%b}]}\n\n' % (
            self._chunk,
            delta.choice,
            _encode(delta.text),
            self._layout.finish_fields(delta),
        )

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk without choices that tells the usage."""
        return b'%b[],"usage":%b}\n\n' % (self._chunk, _encode(usage.wire()))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """Return the body of an unstreamed answer."""
        prompts = self._layout.shown_prompts
        choices = []
        for index, answer in enumerate(answers):
            choice = {"index": index, "text": answer.text, **self._layout.closing_fields(answer)}
            if prompts is not None:
                choice["prompt_token_ids"] = prompts[index * len(prompts) // len(answers)]
            choices.append(choice)
        body = self._layout.head("cmpl", "text_completion")
        return _encode(body | {"choices": choices, "usage": usage.wire()})
