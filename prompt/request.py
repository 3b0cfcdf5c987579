"""Request bodies -> the fields that routing needs, strictly.

The client's bytes are forwarded as they are, so whatever passes here must mean the same to every
parser behind: UTF-8 without a BOM, standard JSON, one ``model``. Fields that routing does not need
are skipped without building objects, which keeps a body of a million keys at a few milliseconds;
``messages`` and ``tools`` stay raw in the first pass and are decoded only where their number of
objects is bounded.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct, field

from prompt.model import (
    MAX_DEPTH,
    MAX_TOKEN_ID,
    BadPromptError,
    Unroutable,
    UnroutablePromptError,
)

MAX_MODEL_CHARS: Final = 256
MAX_VALUES: Final = {"messages": 200_000, "prompt": 1_000_000}
MAX_OTHER_VALUES: Final = 100_000
"""Commas and opening brackets (those inside of texts count too) above which a field is not decoded:
each limit is some 20 ms of work."""
MAX_MODEL_KEYS: Final = 4096

_T = TypeVar("_T")
_H = TypeVar("_H", bound="_Head")
_TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
_Count = Annotated[int, Meta(ge=1)]
_WHITESPACE: Final = b" \t\r\n"
_NO_VALUE_MARKS: Final = bytes(set(range(256)) - set(b"{[,"))
_NO_VALUE: Final = Raw(b"null")

# The key "model" in every spelling that JSON allows, escapes included.
_MODEL_KEY: Final = re.compile(
    rb'"(?:m|\\u006[dD])(?:o|\\u006[fF])(?:d|\\u0064)(?:e|\\u0065)(?:l|\\u006[cC])"\s*:'
)
_WHERE: Final = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING: Final = re.compile(r"missing required field `(?P<name>[^`]*)`")
_EXPECTED: Final = re.compile(r"^Expected (?P<expected>.*?)(?:, got .*)?$")


class _ModelKeys(Struct):
    model: Raw | msgspec.UnsetType = msgspec.UNSET
    renamed: Raw | msgspec.UnsetType = field(default=msgspec.UNSET, name="model#")


class _Part(Struct, omit_defaults=True):
    type: Any = None
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


class _Function(Struct, omit_defaults=True):
    name: Any = None
    arguments: Any = None


class _ToolCall(Struct, omit_defaults=True):
    id: Any = None
    function: _Function | None = None
    type: Any = None


class _Message(Struct, omit_defaults=True):
    role: str
    content: str | list[str | _Part] | None = None
    name: Any = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tools: list[dict[str, Any]] | None = None


class _Head(Struct, kw_only=True):
    """Fields of both kinds of call."""

    model: str
    stream: bool | None = False
    n: _Count | None = 1
    max_tokens: int | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    truncate_prompt_tokens: int | None = None


class ChatHead(_Head, kw_only=True):
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


class _CompletionHead(_Head, kw_only=True):
    prompt: Raw = _NO_VALUE
    prompt_embeds: Raw = _NO_VALUE
    best_of: _Count | None = None
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


_chat_decoder: Final = msgspec.json.Decoder(ChatHead)
_completion_decoder: Final = msgspec.json.Decoder(_CompletionHead)
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
    return _decoded_head(_chat_decoder, body)


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
    return _decoded_part(_objects_decoder, head.tools, "tools"), _options_of(head)


def decode_completion(body: bytes) -> CompletionCall:
    """Decode a text completion; raises BadPromptError where the client is to blame."""
    head = _decoded_head(_completion_decoder, body)
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


def _decoded_head(decoder: msgspec.json.Decoder[_H], body: bytes) -> _H:
    if not body.isascii():
        try:
            body.decode("utf-8")
        except UnicodeDecodeError as error:
            field_name = "body"
            raise BadPromptError(field_name, f"UTF-8, byte {error.start} is not") from None
    head = _decoded(decoder, body, "")
    model = head.model
    if not model.strip() or not model.isprintable() or len(model) > MAX_MODEL_CHARS:
        name = "model"
        raise BadPromptError(name, f"a printable name of 1 to {MAX_MODEL_CHARS} characters")
    _refuse_second_model(body)
    return head


def _decoded(decoder: msgspec.json.Decoder[_T], raw: bytes | Raw, name: str) -> _T:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _blamed(str(error), name) from None
    except msgspec.DecodeError as error:
        raise BadPromptError(name or "body", f"valid JSON ({error})") from None
    except RecursionError:
        raise BadPromptError(name or "body", f"at most {MAX_DEPTH} nested levels") from None


def _blamed(message: str, name: str) -> BadPromptError:
    where = _WHERE.search(message)
    path = where["path"] if where else ""
    text = message[: where.start()] if where else message
    missing = _MISSING.search(text)
    if missing:
        path = f"{path}.{missing['name']}".lstrip(".")
        return BadPromptError(_joined(name, path), "a value, the field is missing")
    expected = _EXPECTED.match(text)
    return BadPromptError(
        _joined(name, path), (expected["expected"] if expected else text).replace("`", "")
    )


def _joined(name: str, path: str) -> str:
    if not name or not path:
        return name or path or "body"
    return f"{name}{path}" if path.startswith("[") else f"{name}.{path}"


def _refuse_second_model(body: bytes) -> None:
    """Raise when the top level has two ``model`` keys, however spelled.

    Parsers differ in which of two wins. Nested keys are common (tool schemas), so the question is
    put to the decoder: after renaming all such keys but the first k, the top level has ``model``
    when its first one is among the k, and the new name when another one is not. Bisection finds
    that k; it is 1 for nearly every client.
    """
    if body.count(b'"model"') <= 1 and b"\\u00" not in body:
        return
    spans = [match.span() for match in _MODEL_KEY.finditer(body)]
    if len(spans) <= 1:
        return
    field_name = "model"
    if len(spans) > MAX_MODEL_KEYS:
        raise BadPromptError(field_name, f"at most {MAX_MODEL_KEYS} keys of that name in the body")
    low, high, probe = 1, len(spans), 1
    while low < high:
        if _model_keys(body, spans, probe).model is msgspec.UNSET:
            low = probe + 1
        else:
            high = probe
        probe = (low + high) // 2
    if _model_keys(body, spans, low).renamed is not msgspec.UNSET:
        raise BadPromptError(field_name, "one value, the field is there twice")


def _model_keys(body: bytes, spans: list[tuple[int, int]], kept: int) -> _ModelKeys:
    pieces, position = [], 0
    for start, end in spans[kept:]:
        pieces += [body[position:start], b'"model#":']
        position = end
    pieces.append(body[position:])
    return msgspec.json.decode(b"".join(pieces), type=_ModelKeys)


def _decoded_part(decoder: msgspec.json.Decoder[_T], raw: Raw, name: str) -> _T:
    _refuse_many_values(bytes(raw), name)
    value = _decoded(decoder, raw, name)
    if decoder is not _messages_decoder:
        _check_depth(value, name)
    return value


def _refuse_many_values(raw: bytes, name: str) -> None:
    limit = MAX_VALUES.get(name, MAX_OTHER_VALUES)
    if len(raw) > limit and len(raw.translate(None, _NO_VALUE_MARKS)) > limit:
        raise UnroutablePromptError(Unroutable.TOO_COMPLEX, f"over {limit} values in {name}")


def decoded_messages(raw: Raw) -> list[dict[str, Any]]:
    """Decode messages; refuses what would take long to decode."""
    name = "messages"
    messages = _decoded_part(_messages_decoder, raw, name)
    for index, message in enumerate(messages):
        for call in message.tool_calls or ():
            if call.function is not None and not isinstance(call.function.arguments, str):
                _check_depth(call.function.arguments, f"{name}[{index}].tool_calls")
        if message.tools:
            _check_depth(message.tools, f"{name}[{index}].tools")
    return [msgspec.to_builtins(message) for message in messages]


def _decoded_prompts(raw: bytes) -> list[str] | list[list[int]]:
    """Decode a text, a list of texts, a list of token ids or a list of those."""
    name = "prompt"
    first = raw[:1]
    if first == b"[":
        _refuse_many_values(raw, name)
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
    if not prompts:
        raise BadPromptError(name, "at least one text or token id")
    for index, prompt in enumerate(prompts):
        if not prompt:
            where = name if len(prompts) == 1 else f"{name}[{index}]"
            raise BadPromptError(where, "at least one character or token id")
    return prompts


def _typed(raw: bytes, wanted: type[_T]) -> _T:
    return _decoded(msgspec.json.Decoder(wanted), raw, "prompt")


def _options_of(head: ChatHead) -> dict[str, Any]:
    options: dict[str, Any] = {
        "add_generation_prompt": head.add_generation_prompt,
        "continue_final_message": head.continue_final_message,
        "add_special_tokens": head.add_special_tokens,
        "chat_template_kwargs": _decoded_part(
            _object_decoder, head.chat_template_kwargs, "chat_template_kwargs"
        )
        or {},
    }
    documents = _decoded_part(_objects_decoder, head.documents, "documents")
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


def _check_depth(value: object, name: str, levels: int = MAX_DEPTH) -> None:
    if not isinstance(value, dict | list):
        return
    if levels == 0:
        raise BadPromptError(name, f"at most {MAX_DEPTH} nested levels")
    for item in value.values() if isinstance(value, dict) else value:
        _check_depth(item, name, levels - 1)
