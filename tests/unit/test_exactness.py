"""Prompts of every kind of chat are those that a real vLLM made, as they are on record."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from prompt.codec import load_codec
from prompt.history import Stability
from prompt.model import TemplateFailureError
from prompt.question import question_of
from prompt.reader import CHAT_PATH, SHORT_BODY_BYTES, PromptReader
from prompt.request import decode_chat
from prompt.stability import is_tried, stability_of
from prompt.template import ChatTemplate
from support.exact_case import CASES, digest_of, known_answers
from support.exact_template import TEMPLATES
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL_TOKENS: Final = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
LATE: Final = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + ' ' + message.content + '<|im_end|>' }}
    {%- if (late or reasoning_effort or documents) and loop.index0 + 2 == messages | length %}
        {{- 'the end is near' }}
    {%- endif %}
    {%- if enable_thinking and loop.last %}{{- 'think' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>' }}{%- endif %}
"""
"""Writes before the last message what is gone in the next turn, if a client wants that."""
SAID: Final = "A sentence of some words, said again and again. " * 40


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_chat_has_the_prompt_of_the_engine_or_is_refused_as_there(name: str) -> None:
    """B42: with tools, reasoning, parts and dates; what the template refuses has no prompt."""
    template = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL_TOKENS, clock=time.time)
    found: dict[str, str | None] = {}
    for case, fields in CASES.items():
        call = decode_chat(json.dumps({"model": "m", **fields}).encode())
        assert call.unroutable is None, case
        try:
            text = template.render(call.messages, call.tools, options=call.options)
        except TemplateFailureError:
            text = ""  # an empty prompt is refused, too
        if text and call.options["add_special_tokens"]:
            text = SPECIAL_TOKENS["bos_token"] + text
        found[case] = digest_of(text) if text else None
    assert found == known_answers()[name]


def talk_of(turns: int, **message: Any) -> list[dict[str, Any]]:
    asked = [{"role": "user", "content": f"{turn}: {SAID}"} for turn in range(turns)]
    told = {"role": "assistant", "content": SAID, **message}
    return [one for question in asked for one in (question, told)][:-1]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"chat_template_kwargs": {"late": True}},
        {"chat_template_kwargs": {"late": False}},
        {"chat_template_kwargs": {"nothing": 1}},
        {"reasoning_effort": "low"},
        {"documents": [{"text": "a"}]},
    ],
    ids=str,
)
async def test_what_a_client_tells_a_template_holds_for_the_next_turn_too(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """A variable may decide the text of earlier messages, in a way that no trial has seen."""
    codec = load_codec(write_tokenizer(tmp_path, chat_template=LATE))
    bodies = [
        json.dumps({"model": "m", "messages": talk_of(turns), **fields}).encode()
        for turns in range(1, 6)
    ]
    assert len(bodies[1]) > SHORT_BODY_BYTES
    async with PromptReader({}, codec) as known:
        for body in bodies:
            call = decode_chat(body)
            [tokens] = (await known.read(CHAT_PATH, body)).prompts
            whole = codec.chat_tokens(call.messages, call.tools, options=call.options)
            assert tokens.packed == whole


def test_only_variables_that_trials_have_seen_leave_a_template_stable() -> None:
    template = ChatTemplate(LATE, special_tokens=SPECIAL_TOKENS, clock=time.time)
    assert stability_of(template) is Stability.STABLE
    for kwargs, is_known in (
        ({}, True),
        ({"nothing": 1, "enable_thinking": True}, True),
        ({"enable_thinking": "no"}, False),
        ({"late": False}, False),
    ):
        assert is_tried(template, {"chat_template_kwargs": kwargs}) is is_known
    assert not is_tried(template, {"reasoning_effort": "low", "chat_template_kwargs": {}})
    assert is_tried(template, {"documents": None, "chat_template_kwargs": {}})
    assert not is_tried(template, {"documents": [], "chat_template_kwargs": {}})


@pytest.mark.parametrize(
    ("told", "asked"),
    [
        ({"reasoning_content": "so"}, {"reasoning": "so"}),
        ({"reasoning_content": "old", "reasoning": "new"}, {"reasoning": "new"}),
        ({"reasoning_content": "old", "reasoning": None}, {"reasoning": "old"}),
        ({"reasoning_content": None, "reasoning": "new"}, {"reasoning": "new"}),
        ({"reasoning": "new"}, {"reasoning": "new"}),
    ],
)
def test_an_engine_is_asked_for_reasoning_under_the_name_that_it_reads(
    told: dict[str, Any], asked: dict[str, Any]
) -> None:
    """The ``/tokenize`` of vLLM drops what its chats still take as ``reasoning_content``."""
    answer = {"role": "assistant", "content": "x"}
    body = {"model": "m", "messages": [{**answer, **told}]}
    for raw in (
        json.dumps(body),
        json.dumps(body).replace("reasoning_content", "reasoning\\u005fcontent"),
    ):
        question = question_of(CHAT_PATH, raw.encode())
        assert question is not None
        assert question.body is not None
        [message] = json.loads(question.body)["messages"]
        assert {**answer, **asked} == {
            key: value for key, value in message.items() if value is not None
        }
