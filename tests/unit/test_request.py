from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompt.model import BadPromptError, Unroutable
from prompt.request import decode_chat, decode_completion

MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": MESSAGES} | fields).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "hello"} | fields).encode()


def test_a_chat_call_keeps_what_routing_needs() -> None:
    call = decode_chat(
        chat(
            stream=True,
            n=3,
            max_tokens=7,
            max_completion_tokens=9,
            cache_salt="s",
            chat_template_kwargs={"enable_thinking": False},
            temperature=0.5,
            an_unknown_field={"x": [1]},
        )
    )
    assert (call.model, call.messages, call.tools) == ("m", MESSAGES, None)
    assert (call.is_stream, call.choices, call.max_output_tokens, call.salt) == (True, 3, 9, "s")
    assert call.options["chat_template_kwargs"] == {"enable_thinking": False}
    assert call.options["add_generation_prompt"] is True
    assert call.unroutable is None


def test_null_counts_as_left_out_where_clients_send_it() -> None:
    call = decode_chat(
        chat(stream=None, n=None, max_tokens=None, tools=None, cache_salt=None, documents=None)
    )
    assert (call.is_stream, call.choices, call.max_output_tokens, call.salt) == (False, 1, None, "")


@pytest.mark.parametrize(
    ("body", "field", "expected"),
    [
        (b"", "body", "valid JSON"),
        (b"{", "body", "valid JSON"),
        (b"[]", "body", "object"),
        (b'"text"', "body", "object"),
        (chat() + b"x", "body", "valid JSON"),
        (b"\xef\xbb\xbf" + chat(), "body", "valid JSON"),
        (chat().decode().encode("utf-16"), "body", "UTF-8"),
        (chat(user="x").replace(b'"x"', b'"\xff"'), "body", "UTF-8"),
        (chat(user="x").replace(b'"x"', b'"\xed\xa0\x80"'), "body", "UTF-8"),
        (chat(user="x").replace(b'"x"', b'"\x00"'), "body", "valid JSON"),
        (chat(user="x").replace(b'"x"', b'"\\ud800"'), "body", "valid JSON"),
        (chat(temperature=float("nan")), "body", "valid JSON"),
        (chat(temperature=float("inf")), "body", "valid JSON"),
        (chat(user=1).replace(b"1", b"[" * 100_000 + b"]" * 100_000), "body", "nested"),
        (b'{"messages":[{"role":"user","content":"x"}]}', "model", "missing"),
        (chat(model=""), "model", "printable"),
        (chat(model=" "), "model", "printable"),
        (chat(model="a\nb"), "model", "printable"),
        (chat(model="x" * 257), "model", "printable"),
        (chat(model=None), "model", "str"),
        (chat(model=5), "model", "str"),
        (b'{"model":"m"}', "messages", "missing"),
        (chat(messages=None), "messages", "array"),
        (chat(messages={}), "messages", "array"),
        (chat(messages=[]), "messages", "at least one"),
        (chat(messages=["x"]), "messages[0]", "object"),
        (chat(messages=[{"content": "x"}]), "messages[0].role", "missing"),
        (chat(messages=[{"role": "user", "content": 5}]), "messages[0].content", "str"),
        (chat(tools={}), "tools", "array"),
        (chat(tools=["x"]), "tools[0]", "object"),
        (chat(n=0), "n", ">= 1"),
        (chat(n=True), "n", "int"),
        (chat(stream="yes"), "stream", "bool"),
        (chat(cache_salt=""), "cache_salt", "length >= 1"),
        (chat(chat_template_kwargs=[]), "chat_template_kwargs", "object"),
        (chat(tools=[{"a": 1}]).replace(b": 1", b": 1e999"), "tools[0][...]", "range"),
        (chat(tools=[{"a": 7}]).replace(b"7", b"7" * 5000), "tools[0][...]", "range"),
    ],
)
def test_a_bad_chat_body_is_the_clients_fault_by_field(
    body: bytes, field: str, expected: str
) -> None:
    """A41, F20, L-06: each names the field and what was expected."""
    with pytest.raises(BadPromptError) as caught:
        decode_chat(body)
    assert caught.value.field == field
    assert expected in caught.value.expected


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([""], "prompt"),
        (["a", ""], "prompt[1]"),
        ([[]], "prompt"),
        ([[1], []], "prompt[1]"),
        (None, "prompt"),
        (5, "prompt"),
        (True, "prompt"),
        ({"text": "x"}, "prompt"),
        ([{}], "prompt"),
        ([None], "prompt[0]"),
        ([-1], "prompt[0]"),
        ([1, 2**32], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1.5], "prompt[0]"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1, -7]], "prompt[0][1]"),
    ],
)
def test_a_bad_completion_prompt_is_the_clients_fault(prompt: object, field: str) -> None:
    """A41: empty prompts, wrong types, ids out of range."""
    with pytest.raises(BadPromptError) as caught:
        decode_completion(completion(prompt=prompt))
    assert caught.value.field.replace("[...]", "[0]") in (field, field.replace("[1]", "[0]"))


def test_a_completion_without_a_prompt_is_refused() -> None:
    with pytest.raises(BadPromptError, match="prompt"):
        decode_completion(b'{"model":"m"}')


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 4294967295], [[1, 2, 4294967295]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_completion_takes_all_four_forms_of_prompt(prompt: object, prompts: object) -> None:
    """A66: text, texts, ids, lists of ids."""
    assert decode_completion(completion(prompt=prompt)).prompts == prompts
    spaced = json.dumps({"model": "m", "prompt": prompt}, indent=4).encode()
    assert decode_completion(spaced).prompts == prompts


def test_a_completion_keeps_its_options() -> None:
    call = decode_completion(
        completion(echo=True, add_special_tokens=False, best_of=4, n=2, max_tokens=3, stream=True)
    )
    assert (call.is_echo, call.add_special_tokens, call.choices) == (True, False, 4)
    assert (call.max_output_tokens, call.is_stream) == (3, True)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","messages":[{"role":"user","content":"x"}],"model":"b"}',
        b'{"model":"a","messages":[{"role":"user","content":"x"}],"mod\\u0065l":"b"}',
        b'{"\\u006dodel":"a","messages":[{"role":"user","content":"x"}],"model" : "b"}',
        b'{"x":{"model":1},"model":"a","messages":[{"role":"user","content":"x"}],"model":"b"}',
        b'{"x":[{"model":1}],"model":"a","y":{"model":3},"model":"b","messages":[],"z":{"model":4}}',
    ],
)
def test_two_models_are_refused_however_spelled(body: bytes) -> None:
    """F20: parsers differ in which of two counts."""
    with pytest.raises(BadPromptError, match="twice"):
        decode_chat(body)


def test_keys_named_model_deeper_down_are_fine() -> None:
    schema = {"properties": {"model": {"type": "string"}}, "required": ["model"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for fields in ({"tools": [tool] * 3}, {"metadata": {"model": {"model": "model"}}}):
        first = json.dumps({"model": "m", "messages": MESSAGES} | fields).encode()
        last = json.dumps(fields | {"messages": MESSAGES, "model": "m"}).encode()
        assert decode_chat(first).model == decode_chat(last).model == "m"


@given(st.integers(0, 6), st.integers(0, 6), st.booleans())
def test_only_a_second_top_level_model_is_refused(before: int, after: int, twice: bool) -> None:  # noqa: FBT001
    nested = b'{"model":{"model":0}}'
    parts = [b'"b%d":%s' % (index, nested) for index in range(before)]
    parts += [b'"model":"m"', b'"messages":[{"role":"user","content":"\\"model\\":1"}]']
    parts += [b'"a%d":%s' % (index, nested) for index in range(after)]
    if not twice:
        assert decode_chat(b"{" + b",".join(parts) + b"}").model == "m"
        return
    with pytest.raises(BadPromptError, match="twice"):
        decode_chat(b"{" + b",".join([*parts, b'"model":"n"']) + b"}")


def test_nesting_is_bounded_where_values_are_decoded() -> None:
    """L-06: 64 levels pass, more do not."""
    value: object = 1
    for _ in range(62):
        value = [value]
    assert decode_chat(chat(tools=[{"a": value}])).tools == [{"a": value}]
    for fields in ({"tools": [{"a": [value]}]}, {"chat_template_kwargs": {"a": [[value]]}}):
        with pytest.raises(BadPromptError, match="nested"):
            decode_chat(chat(**fields))
    message = {"role": "assistant", "tool_calls": [{"function": {"arguments": [[[value]]]}}]}
    with pytest.raises(BadPromptError, match="nested"):
        decode_chat(chat(messages=[message]))


def test_a_million_values_are_routed_by_load_undecoded() -> None:
    """L-07: what would stall the loop is left to the engine."""
    many = [0] * 200_000
    assert decode_chat(chat(tools=[{"a": many}])).unroutable is Unroutable.TOO_COMPLEX
    parts = [{"role": "user", "content": ["x"] * 250_000}]
    call = decode_chat(chat(messages=parts))
    assert (call.unroutable, call.messages) == (Unroutable.TOO_COMPLEX, [])
    texts = decode_completion(completion(prompt=["x"] * 1_000_002))
    assert (texts.unroutable, texts.prompts) == (Unroutable.TOO_COMPLEX, [])
    unknown = decode_chat(chat(**{f"k{index}": 1 for index in range(200_000)}))
    assert unknown.unroutable is None


@pytest.mark.parametrize("prompt", ["a", [1]])
def test_more_prompts_than_an_engine_answers_are_routed_by_load(prompt: object) -> None:
    """L-07: each prompt is looked up and placed by itself, 100,000 held the loop for 0.5 s."""
    assert len(decode_completion(completion(prompt=[prompt] * 2_048)).prompts) == 2_048
    assert decode_completion(completion(prompt=[prompt] * 2_049)).unroutable is (
        Unroutable.TOO_COMPLEX
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"chat_template": "{{ messages }}"}, Unroutable.REQUEST_TEMPLATE),
        ({"truncate_prompt_tokens": 5}, Unroutable.REWRITTEN),
        ({"prompt_token_ids": [1]}, Unroutable.REWRITTEN),
    ],
)
def test_what_changes_the_tokens_behind_us_is_routed_by_load(
    fields: dict[str, Any], reason: Unroutable
) -> None:
    assert decode_chat(chat(**fields)).unroutable is reason


def test_completions_that_the_engine_rewrites_are_routed_by_load() -> None:
    call = decode_completion(b'{"model":"m","prompt_embeds":"AAAA"}')
    assert (call.unroutable, call.prompts) == (Unroutable.REWRITTEN, [])
    assert decode_completion(completion(truncate_prompt_tokens=3)).unroutable is not None


def test_image_data_is_skipped_but_its_part_is_kept() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1000}}
    parts = [{"type": "text", "text": "what is it?"}, image]
    call = decode_chat(chat(messages=[{"role": "user", "content": parts}]))
    [text, kept] = call.messages[0]["content"]
    assert text == parts[0]
    assert kept.keys() == {"type", "media"}
    assert len(kept["media"]) == 32


@given(st.text())
def test_every_text_arrives_as_it_was_sent(text: str) -> None:
    for ensure_ascii in (True, False):
        body = json.dumps(
            {"model": "m", "messages": [{"role": "user", "content": text}]},
            ensure_ascii=ensure_ascii,
        ).encode()
        assert decode_chat(body).messages == [{"role": "user", "content": text}]
