"""Bodies of ``/v1/responses`` and ``/v1/messages`` as the chats that vLLM 0.32 makes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prompt.anthropic import decode_messages
from prompt.codec import load_codec
from prompt.model import BadPromptError, Unroutable
from prompt.reader import MESSAGE_PATH, RESPONSE_PATH, PromptReader
from prompt.response import decode_response

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
SCHEMA = {"properties": {"a": {"type": "integer"}}}


def response_body(items: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "input": items} | fields).encode()


def messages_body(messages: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 5, "messages": messages} | fields).encode()


def user_block(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def test_a_response_to_a_text_is_a_chat_of_one_message() -> None:
    call = decode_response(response_body("hi", instructions="be kind", max_output_tokens=7))
    assert call.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
    ]
    assert (call.max_output_tokens, call.tools, call.unroutable) == (7, None, None)
    assert call.options["add_special_tokens"] is True


def test_items_of_one_answer_become_one_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "seen"},
        {"role": "assistant", "content": "first"},
        {"role": "assistant", "content": "second"},
    ]
    call = decode_response(response_body(items))
    second = {"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    assert call.messages == [
        {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
        {"role": "assistant", "reasoning": "hm", "content": "I", "tool_calls": [CALL, second]},
        {"role": "tool", "content": "seen", "tool_call_id": "c1"},
        {"role": "assistant", "content": "first"},
        {"role": "assistant", "content": "second"},
    ]


def test_flat_tools_and_effort_of_a_response_are_those_of_a_chat() -> None:
    tool = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
    call = decode_response(response_body("x", tools=[tool], reasoning={"effort": "low"}))
    function = {"name": "look", "parameters": SCHEMA, "strict": True}
    assert call.tools == [{"type": "function", "function": function}]
    assert call.options["reasoning_effort"] == "low"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"previous_response_id": "resp_1"}, Unroutable.REWRITTEN),
        ({"truncation": "auto"}, Unroutable.REWRITTEN),
        ({"tools": [{"type": "web_search"}]}, Unroutable.UNCONVERTED),
        ({"input": [{"type": "item_reference", "id": "x"}]}, Unroutable.UNCONVERTED),
        (
            {"input": [{"role": "assistant", "content": "x", "status": "incomplete"}]},
            Unroutable.UNCONVERTED,
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": []}]},
            Unroutable.UNCONVERTED,
        ),
    ],
)
def test_responses_that_only_the_engine_can_complete_go_by_load(
    fields: dict[str, Any], reason: Unroutable
) -> None:
    call = decode_response(response_body("x", **fields))
    assert call.unroutable is reason


def test_blocks_become_messages_results_before_what_is_said() -> None:
    messages = [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look"},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": 1}},
            ],
        },
        *user_block(
            {"type": "text", "text": "one"},
            {"type": "tool_result", "tool_use_id": "c1", "content": "seen"},
            {"type": "text", "text": "two"},
        ),
        *user_block(
            {
                "type": "tool_result",
                "tool_use_id": "c1",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            }
        ),
    ]
    system = [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]
    call = decode_messages(messages_body(messages, system=system, stream=True))
    used = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
    said = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert call.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "look"},
        {"role": "assistant", "reasoning": "hm", "tool_calls": [used], "content": "I look"},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        {"role": "user", "content": said},
        {"role": "tool", "tool_call_id": "c1", "content": "a\nb"},
    ]
    assert (call.is_stream, call.max_output_tokens, call.unroutable) == (True, 5, None)


def test_schemas_of_tools_get_the_type_that_the_engine_gives_them() -> None:
    tools = [{"name": "look", "input_schema": SCHEMA}]
    call = decode_messages(messages_body([{"role": "user", "content": "x"}], tools=tools))
    assert call.tools is not None
    assert call.tools[0]["function"]["parameters"] == SCHEMA | {"type": "object"}


def test_a_line_that_changes_with_every_request_is_left_out() -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
        {"type": "text", "text": "be kind"},
    ]
    call = decode_messages(messages_body([{"role": "user", "content": "x"}], system=system))
    assert call.messages[0] == {"role": "system", "content": "be kind"}


@pytest.mark.parametrize(
    ("messages", "fields", "reason"),
    [
        (user_block({"type": "image", "source": {}}), {}, Unroutable.MEDIA),
        (user_block({"type": "tool_reference"}), {}, Unroutable.UNCONVERTED),
        ([{"role": "system", "content": "x"}], {}, Unroutable.UNCONVERTED),
        (
            [{"role": "user", "content": "x"}],
            {"thinking": {"type": "disabled"}},
            Unroutable.UNCONVERTED,
        ),
        (
            [{"role": "user", "content": "x"}],
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            Unroutable.UNCONVERTED,
        ),
        (
            [{"role": "assistant", "content": [{"type": "tool_use", "name": "x"}]}],
            {},
            Unroutable.UNCONVERTED,
        ),
    ],
)
def test_blocks_without_a_known_conversion_go_by_load(
    messages: list[dict[str, Any]], fields: dict[str, Any], reason: Unroutable
) -> None:
    assert decode_messages(messages_body(messages, **fields)).unroutable is reason


async def test_all_three_ways_to_say_the_same_have_the_same_prefix() -> None:
    codec = load_codec(None)
    async with PromptReader({}, codec) as reader:
        response = await reader.read(RESPONSE_PATH, response_body("hi", instructions="be kind"))
        messages = await reader.read(
            MESSAGE_PATH, messages_body([{"role": "user", "content": "hi"}], system="be kind")
        )
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    for read in (response, messages):
        assert read.unroutable is None
        assert read.prompts[0].packed == codec.chat_tokens(chat, None, options={})


@pytest.mark.parametrize("body", [b"{}", b'{"model": "m"}', b'{"model": "m", "input": []}'])
def test_bodies_without_a_prompt_are_the_clients_fault(body: bytes) -> None:
    with pytest.raises(BadPromptError):
        decode_response(body)
    with pytest.raises(BadPromptError):
        decode_messages(body)
