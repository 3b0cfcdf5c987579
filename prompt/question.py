"""What to ask an engine for the tokens of a body, and what to believe of its answer.

For models without a tokenizer directory. ``POST /tokenize`` takes a chat or one text and answers
``tokens`` and their ``count`` (vLLM 0.32, ``vllm/entrypoints/serve/tokenize``).
``POST {path}/render`` takes a call's own body and answers its ``token_ids``: what the engine would
compute, however that is made (``--enable-scale-out``; 403 without). So it is the better one to ask.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from prompt.anthropic import decode_messages
from prompt.model import MAX_TOKEN_ID, BadPromptError, UnroutablePromptError
from prompt.reader import CHAT_PATH, COMPLETION_PATH, MESSAGE_PATH, RESPONSE_PATH
from prompt.response import decode_response
from state.prefix import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prompt.request import ChatCall

TOKENIZE_PATH: Final = "/tokenize"
RENDER_SUFFIX: Final = "/render"
_CONVERTERS: Final[Mapping[str, Callable[[bytes], ChatCall]]] = {
    RESPONSE_PATH: decode_response,
    MESSAGE_PATH: decode_messages,
}
_DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_DIGEST_BYTES: Final = 16
_OLD_REASONING: Final = "reasoning_content"
_NONE: Final = b"null"
_NO_VALUE: Final = Raw(_NONE)
_PLAIN_CHOICES: Final = (_NONE, b'"auto"', b'"none"')
"""A ``tool_choice`` that no template is told of: ``/tokenize`` knows of none."""
_PASSED: Final = ("add_generation_prompt", "continue_final_message", "add_special_tokens")

_T = TypeVar("_T")
_TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
_TokenIds = Annotated[list[_TokenId], Meta(min_length=1)]


class WrongAnswerError(Exception):
    """An engine's answer is none that can be right."""


class Question(Struct, frozen=True):
    """What decides the tokens of one prompt.

    ``digest`` names it. ``body`` goes to ``/tokenize``; None where that would give other tokens.
    """

    digest: bytes
    body: bytes | None


class _ChatParts(Struct, frozen=True):
    model: str
    messages: Raw
    tools: Raw = _NO_VALUE
    tool_choice: Raw = _NO_VALUE
    add_generation_prompt: Raw = _NO_VALUE
    continue_final_message: Raw = _NO_VALUE
    add_special_tokens: Raw = _NO_VALUE
    chat_template_kwargs: Raw = _NO_VALUE
    documents: Raw = _NO_VALUE
    reasoning_effort: Raw = _NO_VALUE


class _TextParts(Struct, frozen=True):
    model: str
    prompt: Raw
    add_special_tokens: Raw = _NO_VALUE


class _Tokenized(Struct, frozen=True):
    tokens: _TokenIds
    count: int


class _Rendered(Struct, frozen=True):
    token_ids: _TokenIds


_tokenized_decoder: Final = msgspec.json.Decoder(_Tokenized)
_rendered_decoder: Final = msgspec.json.Decoder(_Rendered)
_renderings_decoder: Final = msgspec.json.Decoder(list[_Rendered])


def question_of(path: str, body: bytes) -> Question | None:
    """Return what to ask for the one prompt of ``body``, which was read before; None for others."""
    try:
        if path == CHAT_PATH:
            return _chat_question(body)
        if path == COMPLETION_PATH:
            return _text_question(body)
        return _converted_question(path, body)
    except (BadPromptError, UnroutablePromptError, *_DECODE_ERRORS):
        return None


def tokenized(answer: bytes) -> bytes:
    """Return the packed ids in an answer of ``/tokenize``; raises WrongAnswerError."""
    told = _decoded(_tokenized_decoder, answer)
    if told.count != len(told.tokens):
        message = f"{len(told.tokens)} ids and a count of {told.count}"
        raise WrongAnswerError(message)
    return pack_tokens(told.tokens)


def rendered(answer: bytes, path: str) -> bytes:
    """Return the packed ids in an answer of ``{path}/render``; raises WrongAnswerError."""
    if path != COMPLETION_PATH:
        return pack_tokens(_decoded(_rendered_decoder, answer).token_ids)
    prompts = _decoded(_renderings_decoder, answer)
    if len(prompts) != 1:
        message = f"{len(prompts)} prompts"
        raise WrongAnswerError(message)
    return pack_tokens(prompts[0].token_ids)


def _chat_question(body: bytes) -> Question:
    parts = msgspec.json.decode(body, type=_ChatParts)
    fields: dict[str, object] = {"model": parts.model, "messages": _renamed(parts.messages)}
    if bytes(parts.tools) != _NONE:
        fields["tools"] = parts.tools
    for name in _PASSED:
        raw: Raw = getattr(parts, name)
        if bytes(raw) != _NONE:
            fields[name] = raw
    kwargs, documents, effort = (
        msgspec.json.decode(raw)
        for raw in (parts.chat_template_kwargs, parts.documents, parts.reasoning_effort)
    )
    _add_kwargs(fields, kwargs, documents, effort)
    is_plain = bytes(parts.tool_choice) in _PLAIN_CHOICES
    return _question(CHAT_PATH, fields, bytes(parts.tool_choice), is_plain=is_plain)


def _renamed(messages: Raw) -> Raw | list[dict[str, Raw]]:
    """Return the messages with reasoning under the one name that ``/tokenize`` knows.

    A chat may call it ``reasoning_content``, as older clients do; ``/tokenize`` drops that.
    """
    raw = bytes(messages)
    if _OLD_REASONING.encode() not in raw and b"\\u00" not in raw:
        return messages
    renamed = msgspec.json.decode(raw, type=list[dict[str, Raw]])
    for message in renamed:
        old = message.pop(_OLD_REASONING, None)
        if old is not None and bytes(message.get("reasoning", _NO_VALUE)) == _NONE:
            message["reasoning"] = old
    return renamed


def _text_question(body: bytes) -> Question | None:
    parts = msgspec.json.decode(body, type=_TextParts)
    if not bytes(parts.prompt).lstrip().startswith(b'"'):
        return None
    fields: dict[str, object] = {"model": parts.model, "prompt": parts.prompt}
    if bytes(parts.add_special_tokens) != _NONE:
        fields["add_special_tokens"] = parts.add_special_tokens
    return _question(COMPLETION_PATH, fields, b"", is_plain=True)


def _converted_question(path: str, body: bytes) -> Question | None:
    call = _CONVERTERS[path](body)
    if call.unroutable is not None:
        return None
    fields: dict[str, object] = {"model": call.model, "messages": call.messages}
    if call.tools is not None:
        fields["tools"] = call.tools
    options = call.options
    fields |= {name: options[name] for name in _PASSED if name in options}
    kwargs, documents, effort = map(
        options.get, ("chat_template_kwargs", "documents", "reasoning_effort")
    )
    _add_kwargs(fields, kwargs, documents, effort)
    return _question(path, fields, b"", is_plain=True)


def _add_kwargs(fields: dict[str, object], kwargs: Any, documents: object, effort: object) -> None:
    """Add what a template is told besides: ``/tokenize`` takes all of it as variables.

    As ``ChatCompletionRequest.build_chat_params`` of vLLM 0.32 does.
    """
    told: dict[str, object] = dict(kwargs or {})
    if documents is not None:
        told["documents"] = documents
    if effort is not None:
        told["reasoning_effort"] = effort
        told.setdefault("enable_thinking", effort != "none")
    if told:
        fields["chat_template_kwargs"] = told


def _question(path: str, fields: dict[str, object], besides: bytes, *, is_plain: bool) -> Question:
    body = msgspec.json.encode(fields)
    digest = hashlib.blake2b(body, digest_size=_DIGEST_BYTES)
    digest.update(b"\0%b\0%b" % (path.encode(), besides))  # a NUL is in no JSON
    return Question(digest.digest(), body if is_plain else None)


def _decoded(decoder: msgspec.json.Decoder[_T], answer: bytes) -> _T:
    try:
        return decoder.decode(answer)
    except _DECODE_ERRORS as error:
        raise WrongAnswerError(str(error)) from None
