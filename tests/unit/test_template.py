from __future__ import annotations

import json
from typing import Any

import pytest

from prompt.message import normalised_messages, normalised_tools
from prompt.model import (
    CodecLoadError,
    TemplateFailureError,
    Unroutable,
    UnroutablePromptError,
)
from prompt.template import ChatTemplate
from support.tokenizer import CHAT_TEMPLATE

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PLAIN = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endfor %}"
)
PARTS = "{% for c in m.content %}{{ c.text }}{% endfor %}"
SUBSCRIPT = PARTS.replace(".content", "['content']")
MACRO = "{% macro show(parts) %}{% for p in parts %}{{ p.text }}{% endfor %}{% endmacro %}"
NOON_S = 1_767_268_800.0
"""2026-01-01 12:00 UTC: the same date from UTC-12 to UTC+11."""


def template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=special_tokens, clock=lambda: NOON_S)


def rendered(
    source: str,
    messages: list[dict[str, Any]] = USER,
    tools: list[dict[str, Any]] | None = None,
    **options: object,
) -> str:
    return template(source).render(messages, tools, options=options)


def test_blocks_are_trimmed_as_hugging_face_does() -> None:
    source = "{% if messages %}\n    {% set x = 1 %}\n  a{{ x }}\n{% endif %}\nb"
    assert rendered(source) == "  a1\nb"


def test_loop_controls_and_generation_blocks_work() -> None:
    source = (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}"
        "{% generation %}<{{ m.content }}>{% endgeneration %}{% endfor %}"
    )
    assert rendered(source, USER * 3) == "<hi>"


def test_tojson_writes_plain_json() -> None:
    source = "{{ tools[0].function.description | tojson }}"
    tool = {"function": {"name": "f", "description": "<é> & 'x' 你"}}
    assert rendered(source, tools=[tool]) == "\"<é> & 'x' 你\""
    indented = rendered("{{ {'a': 1} | tojson(indent=2) }}")
    assert indented == '{\n  "a": 1\n}'


def test_the_date_comes_from_the_clock() -> None:
    assert rendered("{{ strftime_now('%d %b %Y') }}") == "01 Jan 2026"


def test_special_tokens_are_variables() -> None:
    special_tokens = {"bos_token": "<s>"}
    shown = template("{{ bos_token }}{{ eos_token }}|", **special_tokens)
    assert shown.render(USER, None, options={}) == "<s>|"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update(role='system') %}",
    ],
)
def test_the_sandbox_refuses_ways_out(source: str) -> None:
    with pytest.raises(TemplateFailureError, match="SecurityError"):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ strftime_now.__closure__ }}",
    ],
)
def test_the_sandbox_shows_nothing_of_the_process(source: str) -> None:
    assert rendered(f"[{source}]") == "[]"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content.x }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages | tojson(indent=messages) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        ENDLESS,
    ],
)
def test_a_template_that_fails_is_routed_by_load(source: str) -> None:
    """B42: the engine's answer explains it; here it is a counted reason, never wrong tokens."""
    with pytest.raises(TemplateFailureError) as caught:
        rendered(source)
    assert caught.value.reason is Unroutable.TEMPLATE


def test_the_templates_own_words_are_kept() -> None:
    with pytest.raises(TemplateFailureError, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


def test_a_template_with_wrong_syntax_does_not_load() -> None:
    with pytest.raises(CodecLoadError, match="chat template"):
        template("{% for %}")


@pytest.mark.parametrize(
    ("source", "is_structured"),
    [
        (PLAIN, False),
        (CHAT_TEMPLATE, False),
        ("{% for m in messages %}" + PARTS + "{% endfor %}", True),
        (
            "{% for m in messages %}" + PARTS.replace(".content", "['content']") + "{% endfor %}",
            True,
        ),
        ("{% for m in messages | list %}" + PARTS + "{% endfor %}", True),
        ("{% set x = messages[1:] %}{% for m in x %}" + PARTS + "{% endfor %}", True),
        (MACRO + "{% for m in messages %}{{ show(m.content) }}{% endfor %}", True),
        (MACRO + "{% for m in messages %}{{ show(parts=m.content) }}{% endfor %}", True),
        (MACRO + "{% for m in messages %}{{ show(m.tool_calls) }}{% endfor %}", False),
        ("{% for m in tools %}" + PARTS + "{% endfor %}", False),
        ("{% for m in messages %}{% for t in m.tool_calls %}{% endfor %}{% endfor %}", False),
    ],
)
def test_templates_that_iterate_over_parts_are_recognised(
    source: str, *, is_structured: bool
) -> None:
    assert template(source).is_structured is is_structured


def test_text_parts_are_joined_or_kept_as_the_template_wants() -> None:
    parts: list[object] = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
    ]
    joined = normalised_messages(messages, is_structured=False)
    assert joined == [{"role": "user", "content": "a\nb\nc"}, {"role": "assistant", "content": ""}]
    kept = normalised_messages(messages, is_structured=True)
    assert kept[0]["content"] == [{"type": "text", "text": text} for text in "abc"]
    assert kept[1]["content"] == []


def test_tool_results_are_text_even_for_templates_with_parts() -> None:
    message = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]}
    expected = {"role": "tool", "tool_call_id": "c1", "content": "42"}
    assert normalised_messages([message], is_structured=True) == [expected]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", None])
def test_other_parts_are_routed_by_load(kind: str | None) -> None:
    """A70: two images with the same text never share tokens here."""
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]}
    with pytest.raises(UnroutablePromptError) as caught:
        rendered(PLAIN, [message])
    assert caught.value.reason is Unroutable.MEDIA


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"a": [1, "é"]}', {"a": [1, "é"]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("{broken", {}),
        ("[1]", {}),
        ("[" * 100_000, {}),
    ],
)
def test_tool_arguments_become_objects(arguments: object, parsed: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (normalised,) = normalised_messages([message], is_structured=False)
    assert normalised["tool_calls"][0]["function"] == {"name": "f", "arguments": parsed}
    assert call["function"]["arguments"] is arguments  # type: ignore[index] # the input stays


def test_reasoning_goes_under_every_name_that_templates_read() -> None:
    for name in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": "x", name: "because"}
        (normalised,) = normalised_messages([message], is_structured=False)
        assert normalised["reasoning"] == normalised["reasoning_content"] == "because"
        assert "thinking" not in normalised  # vLLM 0.32 gives a template these two only


def test_tools_get_the_engines_fields_in_its_order() -> None:
    tool = {"function": {"parameters": {"b": 1, "a": 2}, "extra": 1, "name": "f"}, "x": 1}
    assert json.dumps(normalised_tools([tool])) == (
        '[{"type": "function", "function": {"name": "f", "description": null, '
        '"parameters": {"b": 1, "a": 2}}}]'
    )
    assert normalised_tools(None) is None
    with pytest.raises(TemplateFailureError):
        normalised_tools([{"type": "web_search"}])


def test_developer_messages_become_one_system_message_where_unknown() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "developer", "content": "d"},
    ]
    assert rendered(PLAIN, messages) == "[system|s\n\nd][user|u]"
    knows = PLAIN + "{% if 'developer' %}{% endif %}"
    assert rendered(knows, messages) == "[system|s][user|u][developer|d]"


def test_the_generation_prompt_can_be_left_out() -> None:
    with_prompt = rendered(CHAT_TEMPLATE)
    without = rendered(CHAT_TEMPLATE, add_generation_prompt=False)
    assert with_prompt == without + "<|im_start|>assistant\n"


def test_template_kwargs_reach_the_template() -> None:
    thinking = rendered(CHAT_TEMPLATE, chat_template_kwargs={"enable_thinking": False})
    assert thinking.endswith("<|im_start|>assistant\n(no thoughts)\n")
    assert rendered(CHAT_TEMPLATE, reasoning_effort="none") == thinking
    explicit = rendered(CHAT_TEMPLATE, chat_template_kwargs={"add_generation_prompt": False})
    assert explicit == rendered(CHAT_TEMPLATE)


@pytest.mark.parametrize("name", ["messages", "tools", "tokenize", "truncation", "chat_template"])
def test_template_kwargs_cannot_replace_the_conversation(name: str) -> None:
    with pytest.raises(TemplateFailureError):
        rendered(CHAT_TEMPLATE, chat_template_kwargs={name: 1})


def test_a_final_message_can_be_continued() -> None:
    messages = [*USER, {"role": "assistant", "content": "the answer is "}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    text = rendered(CHAT_TEMPLATE, messages, **options)
    assert text.endswith("<|im_start|>assistant\nthe answer is ")
    trimming = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert rendered(trimming, messages, **options) == "[hi][the answer is"
    parts = "{% for m in messages %}{% for c in m.content %}({{ c.text }}){% endfor %}{% endfor %}"
    assert rendered(parts, messages, **options) == "(hi)(the answer is "


def test_continuing_together_with_a_generation_prompt_is_the_engines_to_refuse() -> None:
    with pytest.raises(TemplateFailureError):
        rendered(CHAT_TEMPLATE, continue_final_message=True)
    with pytest.raises(TemplateFailureError):
        rendered("fixed", continue_final_message=True, add_generation_prompt=False)


def test_a_request_does_not_change_the_next_one() -> None:
    messages = [*USER, {"role": "assistant", "content": "x"}]
    before = json.dumps(messages)
    rendered(CHAT_TEMPLATE, messages, continue_final_message=True, add_generation_prompt=False)
    assert json.dumps(messages) == before
    assert rendered(CHAT_TEMPLATE, messages, [TOOL]) != rendered(CHAT_TEMPLATE, messages)


def test_a_tool_call_is_shown_in_the_engines_order() -> None:
    function = {"y": 2, "name": "f", "arguments": "{}"}
    call = {"x": 1, "type": "function", "index": 0, "function": function, "id": "c"}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert rendered("{{ messages[0].tool_calls | tojson }}", messages) == (
        '[{"id": "c", "function": {"arguments": {}, "name": "f", "y": 2}, '
        '"type": "function", "x": 1, "index": 0}]'
    )


def test_a_line_that_changes_with_every_request_is_dropped_as_the_engine_does() -> None:
    line = "x-anthropic-billing-header: cch=1"
    for content, kept in ((f"{line}\nrules", "rules"), (line, ""), (f"a\n{line}", f"a\n{line}")):
        assert rendered(PLAIN, [{"role": "system", "content": content}]) == f"[system|{kept}]"
    assert rendered(PLAIN, [{"role": "user", "content": line}]) == f"[user|{line}]"
