"""``/v1/messages`` bodies -> the chat that the engine makes of them (vLLM 0.32).

Content blocks become messages as ``vllm/entrypoints/anthropic/serving.py`` does it. Conversions
that depend on the engine's own probing or its clock make the prompt unroutable: system messages
among the others, thinking switched off, calls without an id, changes of tools.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

import msgspec
from msgspec import Raw, Struct

from prompt.body import Head, check_depth, decoded_head, decoded_part
from prompt.media import image_part
from prompt.model import (
    BadPromptError,
    Unroutable,
    UnroutablePromptError,
    refuse_conversion,
)
from prompt.once import OneKey
from prompt.request import ChatCall

_BILLING_LINE: Final = "x-anthropic-billing-header"
_NO_VALUE: Final = Raw(b"null")

Message = dict[str, Any]


class _Block(Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    source: Any = None


class _Message(Struct):
    role: str
    content: str | list[_Block]


class _Tool(Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class _Thinking(Struct):
    type: str


class _OutputConfig(Struct):
    effort: str | None = None


class MessagesHead(Head, kw_only=True):
    """What is decoded of a request at once."""

    messages: Raw
    system: Raw = _NO_VALUE
    tools: Raw = _NO_VALUE
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    chat_template_kwargs: Raw = _NO_VALUE


_MESSAGES_KEY: Final = OneKey("messages")
_head_decoder: Final = msgspec.json.Decoder(MessagesHead)
_messages_decoder: Final = msgspec.json.Decoder(list[_Message])
_system_decoder: Final = msgspec.json.Decoder(str | list[_Block] | None)
_tools_decoder: Final = msgspec.json.Decoder(list[_Tool] | None)
_object_decoder: Final = msgspec.json.Decoder(dict[str, Any] | None)


def decode_messages(body: bytes) -> ChatCall:
    """Decode a messages request; raises BadPromptError where the client is to blame."""
    head = decoded_head(_head_decoder, body, _MESSAGES_KEY)
    unroutable: Unroutable | None = None
    messages: list[Message] = []
    tools: list[Message] | None = None
    options: dict[str, Any] = {}
    try:
        messages = _messages_of(head)
        tools = _tools_of(head)
        options = _options_of(head)
    except UnroutablePromptError as error:
        unroutable = error.reason
    return ChatCall(
        model=head.model,
        messages=messages,
        tools=tools,
        options=options,
        is_stream=bool(head.stream),
        choices=1,
        max_output_tokens=head.max_tokens,
        salt=head.cache_salt or "",
        unroutable=unroutable,
    )


def _options_of(head: MessagesHead) -> dict[str, Any]:
    if head.thinking is not None and head.thinking.type == "disabled":
        refuse_conversion("thinking switched off")
    kwargs = decoded_part(_object_decoder, head.chat_template_kwargs, "chat_template_kwargs") or {}
    check_depth(kwargs, "chat_template_kwargs")
    options: dict[str, Any] = {"chat_template_kwargs": kwargs}
    if head.output_config is not None and head.output_config.effort is not None:
        options["reasoning_effort"] = head.output_config.effort
    return options


def _tools_of(head: MessagesHead) -> list[Message] | None:
    name = "tools"
    try:
        tools = decoded_part(_tools_decoder, head.tools, name)
    except BadPromptError as error:
        # Tools of other kinds: the engine's own answer is the one to read.
        refuse_conversion(str(error))
    if tools is None:
        return None
    converted = []
    for tool in tools:
        check_depth(tool.input_schema, name)
        function: Message = {"name": tool.name, "description": tool.description}
        function["parameters"] = tool.input_schema | (
            {} if "type" in tool.input_schema else {"type": "object"}
        )
        function |= {"strict": tool.strict, "defer_loading": tool.defer_loading}
        converted.append({"type": "function", "function": function})
    return converted


def _messages_of(head: MessagesHead) -> list[Message]:
    name = "messages"
    blocks = decoded_part(_messages_decoder, head.messages, name)
    if not blocks:
        raise BadPromptError(name, "at least one message")
    messages: list[Message] = []
    system = _system_of(decoded_part(_system_decoder, head.system, "system"))
    if system is not None:
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(blocks):
        if message.role not in ("user", "assistant"):
            refuse_conversion(f"a message of role {message.role!r}")
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "user":
            _add_user(messages, message.content)
        else:
            _add_assistant(messages, message.content, f"{name}[{index}]")
    return messages


def _system_of(system: str | list[_Block] | None) -> str | None:
    if isinstance(system, str) or system is None:
        return system or None
    texts = [block.text for block in system if block.type == "text" and block.text]
    kept = [text for text in texts if not text.startswith(_BILLING_LINE)]
    return "".join(kept) if kept else None


def _add_user(messages: list[Message], blocks: list[_Block]) -> None:
    """Append the results of tools, each a message, and then what the user says beside them.

    Images in a result are a message of the user after it.
    """
    parts: list[Message] = []
    for block in blocks:
        if block.type == "tool_result":
            text, images = _result_of(block)
            result = {"role": "tool", "tool_call_id": block.tool_use_id or ""}
            messages.append(result | {"content": text})
            if images:
                messages.append({"role": "user", "content": images})
        elif block.type == "text":
            parts += [{"type": "text", "text": block.text}] if block.text else []
        elif block.type == "image":
            parts.append(_image_of(block.source))
        else:
            _refuse(block.type)
    if parts:
        messages.append({"role": "user", "content": _joined(parts)})


def _add_assistant(messages: list[Message], blocks: list[_Block], where: str) -> None:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        if block.type == "text":
            texts += [{"type": "text", "text": block.text}] if block.text else []
        elif block.type == "thinking":
            thoughts += [] if block.thinking is None else [block.thinking]
        elif block.type == "tool_use":
            calls.append(_call_of(block, where))
        elif block.type != "redacted_thinking":
            _refuse(block.type)
    message: Message = {"role": "assistant"}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if texts:
        message["content"] = _joined(texts)
    messages.append(message)


def _call_of(block: _Block, where: str) -> Message:
    if not block.id:
        refuse_conversion("a call without an id")
    check_depth(block.input, where)
    function = {"name": block.name or "", "arguments": block.input or {}}
    return {"id": block.id, "type": "function", "function": function}


def _result_of(block: _Block) -> tuple[str, list[Message]]:
    """Return the text of a tool's result, and its images."""
    if not isinstance(block.content, list):
        return block.content or "", []
    texts, images = [], []
    for part in block.content:
        if part.get("type") == "image":
            images.append(_image_of(part.get("source")))
            continue
        if part.get("type") != "text":
            _refuse(part.get("type"))
        text = part.get("text", "")
        if not isinstance(text, str):
            refuse_conversion("a result that is no text")
        texts.append(text)
    return "\n".join(texts), images


def _image_of(source: object) -> Message:
    part = image_part(source)
    if part is None:
        raise UnroutablePromptError(Unroutable.MEDIA, "an image without content")
    return part


def _joined(parts: list[Message]) -> str | list[Message]:
    """Return one text as it is, several parts as they are: joining is the template's business."""
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def _refuse(kind: object) -> NoReturn:
    if kind in ("image", "document"):
        raise UnroutablePromptError(Unroutable.MEDIA, f"block of type {kind!r}")
    refuse_conversion(f"a block of type {kind!r}")
