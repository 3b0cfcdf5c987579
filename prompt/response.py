"""``/v1/responses`` bodies -> the chat that the engine makes of them (vLLM 0.32).

Its items are put together as ``vllm/entrypoints/openai/responses/utils.py`` does: several of them
may be one assistant message. Whatever lives in the engine (earlier responses), and every item
whose conversion is not plain, makes the prompt unroutable.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw

from prompt.body import Head, check_depth, decoded_head, decoded_part
from prompt.media import marked_part
from prompt.model import (
    BadPromptError,
    Unroutable,
    UnroutablePromptError,
    refuse_conversion,
)
from prompt.once import OneKey
from prompt.request import ChatCall

_PARTIAL: Final = frozenset({"in_progress", "incomplete"})
_TOOL_FIELDS: Final = ("name", "description", "parameters", "strict")
_NO_VALUE: Final = Raw(b"null")

Item = dict[str, Any]


class ResponseHead(Head, kw_only=True):
    """What is decoded of a request at once."""

    input: Raw
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: Any = None
    previous_input_messages: Raw = _NO_VALUE
    prompt: Raw = _NO_VALUE
    truncation: str | None = "disabled"
    reasoning: Raw = _NO_VALUE
    tools: Raw = _NO_VALUE
    chat_template_kwargs: Raw = _NO_VALUE


_INPUT_KEY: Final = OneKey("input")
_head_decoder: Final = msgspec.json.Decoder(ResponseHead)
_input_decoder: Final = msgspec.json.Decoder(str | list[dict[str, Any]])
_objects_decoder: Final = msgspec.json.Decoder(list[dict[str, Any]] | None)
_object_decoder: Final = msgspec.json.Decoder(dict[str, Any] | None)


def decode_response(body: bytes) -> ChatCall:
    """Decode a response request; raises BadPromptError where the client is to blame."""
    head = decoded_head(_head_decoder, body, _INPUT_KEY)
    unroutable: Unroutable | None = None
    messages: list[Item] = []
    tools: list[Item] | None = None
    options: dict[str, Any] = {}
    try:
        _refuse_held_state(head)
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
        max_output_tokens=head.max_output_tokens,
        salt=head.cache_salt or "",
        unroutable=unroutable,
    )


def _refuse_held_state(head: ResponseHead) -> None:
    is_held = head.previous_response_id is not None or head.truncation not in (None, "disabled")
    raw = (head.previous_input_messages, head.prompt)
    # A truncation of null counts as one that is asked for.
    if is_held or head.truncation is None or any(bytes(part) != b"null" for part in raw):
        raise UnroutablePromptError(Unroutable.REWRITTEN)


def _options_of(head: ResponseHead) -> dict[str, Any]:
    kwargs = decoded_part(_object_decoder, head.chat_template_kwargs, "chat_template_kwargs") or {}
    check_depth(kwargs, "chat_template_kwargs")
    reasoning = decoded_part(_object_decoder, head.reasoning, "reasoning") or {}
    # This endpoint lets the tokenizer add its special tokens, other than that of chats.
    options: dict[str, Any] = {"add_special_tokens": True, "chat_template_kwargs": kwargs}
    if isinstance(reasoning.get("effort"), str):
        options["reasoning_effort"] = reasoning["effort"]
    return options


def _tools_of(head: ResponseHead) -> list[Item] | None:
    tools = decoded_part(_objects_decoder, head.tools, "tools")
    check_depth(tools, "tools")
    if any(tool.get("type") != "function" for tool in tools or ()):
        refuse_conversion("a tool that is no function")
    return [
        {"type": "function", "function": {key: tool[key] for key in _TOOL_FIELDS if key in tool}}
        for tool in tools or ()
    ] or None


def _messages_of(head: ResponseHead) -> list[Item]:
    name = "input"
    items = decoded_part(_input_decoder, head.input, name)
    check_depth(items, name)
    messages: list[Item] = []
    if head.instructions:
        messages.append({"role": "system", "content": head.instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not items:
        raise BadPromptError(name, "a text or at least one item")
    if items[-1].get("status") in _PARTIAL:
        refuse_conversion("a message to continue")
    known = len(messages)
    for item in items:
        _add_item(messages, item, known)
    return messages


def _add_item(messages: list[Item], item: Item, known: int) -> None:
    """Append what ``item`` makes, or complete the assistant message that it belongs to."""
    kind = item.get("type", "message")
    last = messages[-1] if len(messages) > known else None
    open_message = last if last is not None and last["role"] == "assistant" else None
    if kind == "function_call":
        _add_call(messages, item, open_message)
    elif kind == "function_call_output":
        output = item.get("output")
        call_id = item.get("call_id")
        if not isinstance(output, str) or not isinstance(call_id, str):
            refuse_conversion("a result that is no text")
        messages.append({"role": "tool", "content": output, "tool_call_id": call_id})
    elif kind == "reasoning":
        _fill(messages, open_message, "reasoning", _reasoning_of(item))
    elif kind != "message" or item.get("role") not in ("user", "system", "developer", "assistant"):
        refuse_conversion(f"an item of type {kind!r}")
    elif item["role"] == "assistant":
        _fill(messages, open_message, "content", _first_text_of(item.get("content")))
    else:
        messages.append({"role": item["role"], "content": _plain_content(item.get("content"))})


def _add_call(messages: list[Item], item: Item, open_message: Item | None) -> None:
    fields = [item.get(key) for key in ("call_id", "name", "arguments")]
    if item.get("namespace") or not all(isinstance(field, str) for field in fields):
        refuse_conversion("a call without id, name or arguments")
    call_id, name, arguments = fields
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "function": function, "type": "function"}
    if open_message is None:
        messages.append({"role": "assistant", "tool_calls": [call]})
    else:
        open_message.setdefault("tool_calls", []).append(call)


def _fill(messages: list[Item], open_message: Item | None, key: str, text: str) -> None:
    if open_message is not None and open_message.get(key) is None:
        open_message[key] = text
    else:
        messages.append({"role": "assistant", key: text})


def _reasoning_of(item: Item) -> str:
    if item.get("encrypted_content"):
        refuse_conversion("encrypted reasoning")
    if not isinstance(item.get("summary"), list):
        refuse_conversion("reasoning without a summary")
    parts = item.get("content") or item["summary"]
    return _first_text_of(parts) if parts else ""


def _first_text_of(content: object) -> str:
    """Return the only text: the engine takes the first one and drops others."""
    if isinstance(content, str):
        return content
    first = content[0] if isinstance(content, list) and content else None
    text = first.get("text") if isinstance(first, dict) else None
    if not isinstance(text, str):
        refuse_conversion("an answer without text")
    return text


def _plain_content(content: object) -> str | list[Item]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        refuse_conversion("content that is neither text nor parts")
    return [marked_part(part) for part in content]
