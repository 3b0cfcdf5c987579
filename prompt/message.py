"""Messages and tools as an engine hands them to a chat template.

Templates see neither the client's JSON nor the same thing on every engine; this is what vLLM 0.32
makes of it (``vllm/renderers/chat_utils.py``). A conversation that the engine would refuse is
unroutable here: the engine's own answer is the one that the client should read.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from prompt.model import TemplateFailureError, Unroutable, UnroutablePromptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Where each kind of part keeps its text.
_TEXT_KEYS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_SKIPPED_WHEN_NONE: Final = ("text", "refusal")
_CALL_KEYS: Final = frozenset({"id", "function", "type"})
_FUNCTION_KEYS: Final = frozenset({"arguments", "name"})
# A line that changes with every request of one popular client; the engine drops it too.
_BILLING_LINE: Final = "x-anthropic-billing-header"
_PLAIN_KEYS: Final = ("role", "content")
_AS_THEY_ARE: Final = frozenset({"user", "assistant"})


class ShownMedia(Struct, frozen=True):
    """A content part that a template is told the kind of: ``image``, ``audio`` or ``video``."""

    kind: str


def is_plain(message: dict[str, Any]) -> bool:
    """Return whether a message, as most, is a role and a text that stays as it is."""
    if len(message) != len(_PLAIN_KEYS):
        return False
    content, role = message.get("content"), message["role"]
    return type(content) is str and (
        role in _AS_THEY_ARE or (role == "system" and not content.startswith(_BILLING_LINE))
    )


def normalised_messages(
    messages: Sequence[dict[str, Any]], *, is_structured: bool
) -> list[dict[str, Any]]:
    """Return the messages for a template, new objects throughout.

    ``is_structured`` templates iterate over content parts; others get the texts joined by newlines.
    """
    return [_normalised(message, is_structured=is_structured) for message in messages]


def _normalised(message: dict[str, Any], *, is_structured: bool) -> dict[str, Any]:
    role = message["role"]
    content: Any = message.get("content")
    if not is_structured and is_plain(message):
        return {"role": role, "content": content}
    if type(content) is not str or role == "system" or is_structured:
        content = _normalised_content(content, role, is_structured=is_structured)
    result: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        result |= _assistant_fields(message)
    elif role == "tool" and message.get("tool_call_id") is not None:
        result["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        result["name"] = message["name"]
    if role == "developer":
        result["tools"] = message.get("tools")
    return result


def _normalised_content(content: object, role: str, *, is_structured: bool) -> Any:
    if is_structured and isinstance(content, list) and any(map(_is_media, content)):
        return [shown for part in content for shown in _shown(part)]
    texts = _texts_of(content)
    if role == "system":
        texts = list(_without_billing_line(texts))
    if not is_structured:
        return "\n".join(text for text in texts if text)
    if role == "tool":
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _is_media(part: object) -> bool:
    return isinstance(part, ShownMedia)


def _shown(part: object) -> list[dict[str, str]]:
    if isinstance(part, ShownMedia):
        return [{"type": part.kind}]
    return [{"type": "text", "text": text} for text in _texts_of([part])]


def _assistant_fields(message: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if message.get("tool_calls"):
        fields["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        # Under these two names only: a template that reads ``thinking`` sees none of it there.
        fields |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return fields


def _texts_of(content: object) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        detail = f"content of type {type(content).__name__}"
        raise TemplateFailureError(detail)
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            detail = f"a content part of type {type(part).__name__}"
            raise TemplateFailureError(detail)
        kind = part.get("type")
        key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise UnroutablePromptError(Unroutable.MEDIA, f"part of type {kind!r}")
        text = part.get(key)
        if isinstance(text, str):
            texts.append(text)
        elif kind not in _SKIPPED_WHEN_NONE:
            detail = f"part of type {kind!r} without text"
            raise TemplateFailureError(detail)
    return texts


def _without_billing_line(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        rest = text.partition("\n")[2] if text.startswith(_BILLING_LINE) else text
        if rest or rest == text:
            yield rest


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if (call.get("type") or "function") != "function" or not isinstance(function, dict):
        detail = "a tool call that is no function call"
        raise TemplateFailureError(detail)
    # In the engine's order, which templates that print whole calls show: what else a client sends
    # (the ``index`` of a streamed call) comes last, as it was sent.
    shown: dict[str, Any] = {"arguments": _parsed_arguments(function.get("arguments"))}
    if function.get("name") is not None:
        shown["name"] = function["name"]
    identity = {} if call.get("id") is None else {"id": call["id"]}
    normal = {**identity, "function": shown | _others(function, _FUNCTION_KEYS), "type": "function"}
    return normal | _others(call, _CALL_KEYS)


def _others(value: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    return {key: other for key, other in value.items() if key not in known}


def _parsed_arguments(arguments: object) -> dict[str, Any]:
    """Return the arguments as an object; anything else in the history counts as no arguments."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def normalised_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return tools with the engine's fields in its order, whatever the client left out or added."""
    if tools is None:
        return None
    return [_normalised_tool(tool) for tool in tools]


def _normalised_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if (tool.get("type") or "function") != "function" or not isinstance(function, dict):
        detail = "a tool that is no function"
        raise TemplateFailureError(detail)
    deferred = tool.get("defer_loading")
    result: dict[str, Any] = {
        "name": function.get("name"),
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if not isinstance(result["name"], str):
        detail = "a tool without a name"
        raise TemplateFailureError(detail)
    if function.get("strict") is not None:
        result["strict"] = function["strict"]
    inner = function.get("defer_loading")
    inner = deferred if inner is None else inner
    if inner is not None:
        result["defer_loading"] = inner
    outer: dict[str, Any] = {"type": "function", "function": result}
    if deferred is not None:
        outer["defer_loading"] = deferred
    return outer


def developers_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for a template that does not know the role ``developer``.

    Its messages become system messages; then all of them are one, in front.
    """
    if all(message["role"] != "developer" for message in messages):
        return messages
    converted = [
        {**{key: value for key, value in message.items() if key != "tools"}, "role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    systems = [message for message in converted if message["role"] == "system"]
    if len(systems) == 1 and converted[0] is systems[0]:
        return converted
    texts = [text for text in map(_text_of, systems) if text]
    others = [message for message in converted if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)
