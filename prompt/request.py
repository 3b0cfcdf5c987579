"""Chat and completion bodies -> the fields that routing needs, strictly (see ``prompt.body``)."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from prompt.body import (
    Count,
    Head,
    check_depth,
    decoded,
    decoded_head,
    decoded_part,
    refuse_many_values,
)
from prompt.media import media_mark
from prompt.model import MAX_TOKEN_ID, BadPromptError, Unroutable, UnroutablePromptError
from prompt.once import OneKey

MAX_PROMPTS: Final = 2048
"""Prompts of one request that are read: each is looked up and placed by itself, some 5 us."""

_T = TypeVar("_T")

_TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
_WHITESPACE: Final = b" \t\r\n"
_NO_VALUE: Final = Raw(b"null")
_MEDIA_FIELDS: Final = ("image_url", "video_url", "audio_url", "input_audio")


class _Part(Struct, omit_defaults=True):
    type: Any = None
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: Raw = _NO_VALUE
    video_url: Raw = _NO_VALUE
    audio_url: Raw = _NO_VALUE
    input_audio: Raw = _NO_VALUE
    uuid: Any = None
    media: Any = None

    def shorten(self) -> None:
        """Keep the digest of media in their place; what a client calls so is none."""
        contents: dict[str, bytes] = {}
        for name in _MEDIA_FIELDS:
            raw = getattr(self, name)
            if raw is not _NO_VALUE:
                contents[name] = bytes(raw)
                setattr(self, name, _NO_VALUE)
        self.media = None if self.type == "text" else media_mark(self.type, contents, self.uuid)
        self.uuid = None


class _Message(Struct, omit_defaults=True):
    role: str
    content: str | list[str | _Part] | None = None
    name: Any = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tools: list[dict[str, Any]] | None = None


class ChatHead(Head, kw_only=True):
    """What is decoded of a chat at once."""

    messages: Raw
    tools: Raw = _NO_VALUE
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Raw = _NO_VALUE
    documents: Raw = _NO_VALUE
    reasoning_effort: str | None = None
    prompt_token_ids: Raw = _NO_VALUE


class CompletionHead(Head, kw_only=True):
    """What is decoded of a completion at once."""

    prompt: Raw = _NO_VALUE
    prompt_embeds: Raw = _NO_VALUE
    best_of: Count | None = None
    add_special_tokens: bool = True
    echo: bool | None = False


class ChatCall(Struct, frozen=True, kw_only=True):
    """A chat completion: ``options`` are those of ``Codec.chat_tokens``.

    ``unroutable`` says why no prompt can be made of the rest, which may then be empty.
    """

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    options: dict[str, Any]
    is_stream: bool
    choices: int
    max_output_tokens: int | None
    salt: str
    unroutable: Unroutable | None = None


class CompletionCall(Struct, frozen=True, kw_only=True):
    """A text completion: each prompt is a text or a list of token ids."""

    model: str
    prompts: list[str] | list[list[int]]
    add_special_tokens: bool
    is_echo: bool
    is_stream: bool
    choices: int
    max_output_tokens: int | None
    salt: str
    unroutable: Unroutable | None = None


_MESSAGES_KEY: Final = OneKey("messages")
_PROMPT_KEY: Final = OneKey("prompt")
_chat_decoder: Final = msgspec.json.Decoder(ChatHead)
_completion_decoder: Final = msgspec.json.Decoder(CompletionHead)
_messages_decoder: Final = msgspec.json.Decoder(list[_Message])
_objects_decoder: Final = msgspec.json.Decoder(list[dict[str, Any]] | None)
_object_decoder: Final = msgspec.json.Decoder(dict[str, Any] | None)


def decode_chat(body: bytes) -> ChatCall:
    """Decode a chat completion; raises BadPromptError where the client is to blame."""
    head = chat_head(body)
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = {}
    failure: Unroutable | None = None
    try:
        messages = some_messages(head.messages)
        tools, options = tools_and_options(head)
    except UnroutablePromptError as error:
        failure = error.reason
    return chat_call(head, messages, tools, options, failure)


def chat_head(body: bytes) -> ChatHead:
    """Decode the fields of a chat besides its values of any size, which stay raw."""
    return decoded_head(_chat_decoder, body, _MESSAGES_KEY)


def chat_call(
    head: ChatHead,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    options: dict[str, Any],
    failure: Unroutable | None,
) -> ChatCall:
    """Return the call that ``head`` and its decoded parts make."""
    return ChatCall(
        model=head.model,
        messages=messages,
        tools=tools,
        options=options,
        is_stream=bool(head.stream),
        choices=head.n or 1,
        max_output_tokens=_limit_of(head.max_completion_tokens, head.max_tokens),
        salt=head.cache_salt or "",
        unroutable=failure or _rewritten_chat(head),
    )


def some_messages(raw: Raw) -> list[dict[str, Any]]:
    """Decode a list of messages that must not be empty."""
    messages = decoded_messages(raw)
    if not messages:
        name = "messages"
        raise BadPromptError(name, "at least one message")
    return messages


def tools_and_options(head: ChatHead) -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
    """Decode what else decides the text of a chat."""
    return _some_of(_objects_decoder, head.tools, "tools"), _options_of(head)


def decode_completion(body: bytes) -> CompletionCall:
    """Decode a text completion; raises BadPromptError where the client is to blame."""
    return completion_call(completion_head(body))


def completion_head(body: bytes) -> CompletionHead:
    """Decode the fields of a completion besides its prompts, which stay raw."""
    return decoded_head(_completion_decoder, body, _PROMPT_KEY)


def completion_call(head: CompletionHead) -> CompletionCall:
    """Return the call that ``head`` makes, its prompts decoded."""
    prompts: list[str] | list[list[int]] = []
    is_truncated = head.truncate_prompt_tokens is not None
    unroutable = Unroutable.REWRITTEN if is_truncated else None
    if bytes(head.prompt_embeds) != b"null":
        unroutable = Unroutable.REWRITTEN
    else:
        try:
            prompts = _decoded_prompts(bytes(head.prompt).strip(_WHITESPACE))
        except UnroutablePromptError as error:
            unroutable = error.reason
    return CompletionCall(
        model=head.model,
        prompts=prompts,
        add_special_tokens=head.add_special_tokens,
        is_echo=bool(head.echo),
        is_stream=bool(head.stream),
        choices=max(head.n or 1, head.best_of or 1),
        max_output_tokens=_limit_of(head.max_tokens),
        salt=head.cache_salt or "",
        unroutable=unroutable,
    )


def decoded_messages(raw: Raw) -> list[dict[str, Any]]:
    """Decode messages; refuses what would take long to decode."""
    name = "messages"
    messages = decoded_part(_messages_decoder, raw, name)
    for index, message in enumerate(messages):
        if message.tool_calls:
            check_depth(message.tool_calls, f"{name}[{index}].tool_calls")
        if message.tools:
            check_depth(message.tools, f"{name}[{index}].tools")
        if isinstance(message.content, list):
            for part in message.content:
                if isinstance(part, _Part):
                    part.shorten()
    built: list[dict[str, Any]] = msgspec.to_builtins(messages)
    return built


def _decoded_prompts(raw: bytes) -> list[str] | list[list[int]]:
    """Decode a text, a list of texts, a list of token ids or a list of those."""
    name = "prompt"
    first = raw[:1]
    if first == b"[":
        refuse_many_values(raw, name)
    second = raw[1:].lstrip(_WHITESPACE)[:1] if first == b"[" else b""
    prompts: list[str] | list[list[int]]
    if first == b'"':
        prompts = [_typed(raw, str)]
    elif second == b'"':
        prompts = _typed(raw, list[str])
    elif second == b"[":
        prompts = _typed(raw, list[list[_TokenId]])
    elif second not in (b"", b"]", b"{"):
        prompts = [_typed(raw, list[_TokenId])]
    elif second == b"]":
        prompts = []
    else:
        raise BadPromptError(name, "a text, a list of texts, or one or more lists of token ids")
    _check_prompts(prompts, name)
    return prompts


def _check_prompts(prompts: list[str] | list[list[int]], name: str) -> None:
    if not prompts:
        raise BadPromptError(name, "at least one text or token id")
    if len(prompts) > MAX_PROMPTS:
        raise UnroutablePromptError(Unroutable.TOO_COMPLEX, f"over {MAX_PROMPTS} prompts")
    for index, prompt in enumerate(prompts):
        if not prompt:
            where = name if len(prompts) == 1 else f"{name}[{index}]"
            raise BadPromptError(where, "at least one character or token id")


def _typed(raw: bytes, wanted: type[_T]) -> _T:
    return decoded(msgspec.json.Decoder(wanted), raw, "prompt")


def _some_of(decoder: msgspec.json.Decoder[_T | None], raw: Raw, name: str) -> _T | None:
    """Decode an optional value of any shape; most bodies have none."""
    if raw is _NO_VALUE:
        return None
    value = decoded_part(decoder, raw, name)
    check_depth(value, name)
    return value


def _options_of(head: ChatHead) -> dict[str, Any]:
    kwargs = _some_of(_object_decoder, head.chat_template_kwargs, "chat_template_kwargs") or {}
    options: dict[str, Any] = {
        "add_generation_prompt": head.add_generation_prompt,
        "continue_final_message": head.continue_final_message,
        "add_special_tokens": head.add_special_tokens,
        "chat_template_kwargs": kwargs,
    }
    documents = _some_of(_objects_decoder, head.documents, "documents")
    if documents is not None:
        options["documents"] = documents
    if head.reasoning_effort is not None:
        options["reasoning_effort"] = head.reasoning_effort
    return options


def _rewritten_chat(head: ChatHead) -> Unroutable | None:
    if head.chat_template:
        return Unroutable.REQUEST_TEMPLATE
    if head.truncate_prompt_tokens is not None or bytes(head.prompt_token_ids) != b"null":
        return Unroutable.REWRITTEN
    return None


def _limit_of(*candidates: int | None) -> int | None:
    limit = next((value for value in candidates if value is not None), None)
    return limit if limit is not None and limit >= 0 else None
