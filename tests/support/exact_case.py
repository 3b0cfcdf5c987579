"""Chats of every kind that a template sees: what an engine's prompt is for each, and ours.

``exact_prompts.json`` has a digest of the text that vLLM 0.32 made of each with each template, None
where the template refused; ``tests/vllm/test_exactness.py`` asks a real one again.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

Body = dict[str, Any]

ANSWERS: Final = Path(__file__).with_name("exact_prompts.json")
_USER: Final = {"role": "user", "content": "What is 2 + 2, and why?  "}
_ANSWER: Final = {"role": "assistant", "content": " It is four. \n"}
_BEGUN: Final = {"role": "assistant", "content": "It is"}
_SYSTEM: Final = {"role": "system", "content": " Be brief.\n"}
_DEVELOPER: Final = {"role": "developer", "content": "No jokes."}
_GOING_ON: Final = {"continue_final_message": True, "add_generation_prompt": False}


def _tool(name: str = "add", **more: Any) -> Body:
    parameters = {"type": "object", "required": ["b"], "properties": {"b": {"type": "number"}}}
    function = {"description": "Ädds <two> 'numbers'", "name": name, "parameters": parameters}
    return {"type": "function", "function": function | more}


def _call(arguments: str = '{"b": 1, "a": "é"}', name: str = "add", **more: Any) -> Body:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call-{name}", "type": "function", "function": function, **more}


def _calling(*calls: Body, **more: Any) -> Body:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def _result(content: Any, name: str = "add", **more: Any) -> Body:
    return {"role": "tool", "tool_call_id": f"call-{name}", "content": content, **more}


def _parts(*texts: str, kind: str = "text", role: str = "user") -> Body:
    key = {"refusal": "refusal", "thinking": "thinking"}.get(kind, "text")
    return {"role": role, "content": [{"type": kind, key: text} for text in texts]}


def _said(content: str | None, **more: Any) -> Body:
    return {"role": "assistant", "content": content, **more}


CASES: Final[dict[str, Body]] = {
    name: {"messages": messages, **fields}
    for name, messages, fields in (
        ("one question", [_USER], {}),
        ("a system message", [_SYSTEM, _USER, _ANSWER, _USER], {}),
        ("two questions", [_USER, _USER], {}),
        ("two answers", [_USER, _ANSWER, _ANSWER, _USER], {}),
        ("an answer first", [_ANSWER, _USER], {}),
        ("a system message only", [_SYSTEM], {}),
        ("a late system message", [_USER, _SYSTEM, _USER], {}),
        ("a role that nobody knows", [{"role": "critic", "content": "Bad."}], {}),
        ("a named user", [{**_USER, "name": "bob"}], {}),
        ("text like special tokens", [{"role": "user", "content": "<|im_end|>\n<|bos|>"}], {}),
        ("a surrogate pair and a NUL", [{"role": "user", "content": "\U0001f999\0"}], {}),
        ("a developer", [_DEVELOPER, _USER], {}),
        ("a system message and a developer", [_SYSTEM, _DEVELOPER, _USER, _DEVELOPER], {}),
        ("no generation prompt", [_USER], {"add_generation_prompt": False}),
        (
            "no generation prompt after an answer",
            [_USER, _ANSWER],
            {"add_generation_prompt": False},
        ),
        ("a generation prompt after an answer", [_USER, _ANSWER], {}),
        ("special tokens added", [_USER], {"add_special_tokens": True}),
        ("a message to continue", [_USER, _BEGUN], _GOING_ON),
        ("a message to continue that ends in spaces", [_USER, _ANSWER], _GOING_ON),
        ("an empty message to continue", [_USER, _said("")], _GOING_ON),
        ("a message of spaces to continue", [_USER, _said("   ")], _GOING_ON),
        ("a message without content to continue", [_USER, _said(None)], _GOING_ON),
        ("a question to continue", [_USER], _GOING_ON),
        ("parts to continue", [_USER, _parts("It", "is ", role="assistant")], _GOING_ON),
        ("a text said before to continue", [_USER, _BEGUN, _USER, _BEGUN], _GOING_ON),
        ("reasoning and a message to continue", [_USER, _said("It", reasoning="so")], _GOING_ON),
        ("calls to continue", [_USER, _calling(_call())], _GOING_ON),
        ("a result to continue", [_USER, _calling(_call()), _result("3")], _GOING_ON),
        ("tools and a message to continue", [_USER, _BEGUN], {"tools": [_tool()], **_GOING_ON}),
        ("reasoning", [_USER, {**_ANSWER, "reasoning": "so"}, _USER], {}),
        ("reasoning of old", [_USER, {**_ANSWER, "reasoning_content": "so"}, _USER], {}),
        (
            "reasoning under both names",
            [_USER, {**_ANSWER, "reasoning_content": "old", "reasoning": "new"}, _USER],
            {},
        ),
        ("empty reasoning", [_USER, {**_ANSWER, "reasoning": ""}, _USER], {}),
        (
            "reasoning of the last turn",
            [_USER, {**_ANSWER, "reasoning": "so"}],
            {"add_generation_prompt": False},
        ),
        (
            "reasoning before calls",
            [_USER, _calling(_call(), reasoning_content="so"), _result("3")],
            {"tools": [_tool()]},
        ),
        ("thoughts in the text", [_USER, _said("<think>\na\n</think>\n\nb"), _USER], {}),
        ("parts", [_parts("one", "", "two\n")], {}),
        ("one part", [_parts("one")], {}),
        ("no parts", [{"role": "user", "content": []}], {}),
        ("parts of a system message", [{**_parts("a", "b"), "role": "system"}, _USER], {}),
        ("a refusal", [_USER, _parts("No.", kind="refusal", role="assistant"), _USER], {}),
        ("an answer without content", [_USER, _said(None), _USER], {}),
        ("tools", [_SYSTEM, _USER], {"tools": [_tool(), _tool("mul", strict=True)]}),
        ("tools in a long talk", [_USER, _ANSWER, _USER], {"tools": [_tool()]}),
        (
            "a tool without more than a name",
            [_USER],
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
        ),
        ("a tool with fields of its own", [_USER], {"tools": [{**_tool(x=1), "y": 2}]}),
        ("tools not to be used", [_USER], {"tools": [_tool()], "tool_choice": "none"}),
        ("a call and its result", [_USER, _calling(_call()), _result("3")], {"tools": [_tool()]}),
        (
            "calls and then words",
            [_USER, _calling(_call()), _result("3"), _ANSWER, _USER],
            {"tools": [_tool()]},
        ),
        (
            "two calls",
            [
                _USER,
                _calling(_call(), _call("{}", "mul"), content="Let me see."),
                _result("3"),
                _result("4", "mul"),
            ],
            {"tools": [_tool(), _tool("mul")]},
        ),
        ("a call without arguments", [_USER, _calling(_call("")), _result("3")], {}),
        ("a call with broken arguments", [_USER, _calling(_call("{x")), _result("3")], {}),
        ("a call with a list", [_USER, _calling(_call("[1]")), _result("3")], {}),
        (
            "a call with numbers",
            [_USER, _calling(_call('{"a": 1.50, "b": 1e3, "c": 12345678901234567890}'))],
            {},
        ),
        ("a call as a stream told it", [_USER, _calling(_call(index=0)), _result("3")], {}),
        ("no calls", [_USER, {**_ANSWER, "tool_calls": []}, _USER], {}),
        (
            "a result in parts",
            [_USER, _calling(_call()), _result([{"type": "text", "text": "a"}])],
            {},
        ),
        ("a result with a name", [_USER, _calling(_call()), _result("3", name="add")], {}),
        ("a result in JSON", [_USER, _calling(_call()), _result('{"a": [1]}')], {}),
        ("no thinking", [_USER], {"chat_template_kwargs": {"enable_thinking": False}}),
        ("a date of its own", [_USER], {"chat_template_kwargs": {"date": "1 May"}}),
        ("some effort", [_USER], {"reasoning_effort": "low"}),
        ("no effort", [_USER], {"reasoning_effort": "none"}),
        ("documents", [_USER], {"documents": [{"title": "a", "text": "b"}]}),
    )
}


def digest_of(text: str) -> str:
    """Return what stands for a prompt; today's date, and yesterday's, count as no date."""
    now = datetime.now(tz=UTC).astimezone()
    for day in (now, now - timedelta(days=1)):
        text = text.replace(day.strftime("%d %b %Y"), "today")
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def known_answers() -> dict[str, dict[str, str | None]]:
    """Return the digests of vLLM's prompts, by template and case; None where it refused."""
    answers: dict[str, dict[str, str | None]] = json.loads(ANSWERS.read_text())
    return answers
