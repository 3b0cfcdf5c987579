"""Keys that a body may have once: two of them, in any spelling, are refused and named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prompt.anthropic import decode_messages
from prompt.model import BadPromptError
from prompt.once import MAX_KEYS, OneKey, refuse_second, without_value
from prompt.passage import Passages
from prompt.plain import read_plain
from prompt.request import ChatHead, chat_head, decode_chat, decode_completion
from prompt.response import decode_response
from prompt.turn import ChatTurns

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = "x" * 1_000
MESSAGES = json.dumps([{"role": "user", "content": LONG}]).encode()
READERS: dict[str, tuple[Callable[[bytes], object], bytes, bytes]] = {
    "chat": (decode_chat, b"messages", MESSAGES),
    "turn": (ChatTurns().decode, b"messages", MESSAGES),
    "completion": (decode_completion, b"prompt", json.dumps(LONG).encode()),
    "passage": (Passages().decode, b"prompt", json.dumps(LONG * 5).encode()),
    "response": (decode_response, b"input", json.dumps(LONG).encode()),
    "message": (decode_messages, b"messages", MESSAGES),
}
TWICE = [b'"model":"m"', b'"\\u006dodel":"n"', b'"cache_salt":"s","cache_salt":null']


@pytest.mark.parametrize("twice", [*TWICE, b"prompt"])
@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_second_key_is_refused_by_its_name_wherever_it_stands(
    kind: str,
    twice: bytes,
    is_first: bool,  # noqa: FBT001 - a parameter
) -> None:
    """F20, L-06: parsers differ in which of two counts; the router must not route by the other."""
    decode, key, value = READERS[kind]
    prompt = b'"%b":%b' % (key, value)
    second = b'"%b":[]' % key if twice == b"prompt" else twice
    fields = [b'"model":"m"', prompt]
    body = b"{%b}" % b",".join([second, *fields] if is_first else [*fields, second])
    with pytest.raises(BadPromptError, match="there twice") as caught:
        decode(body)
    names = {b"prompt": key.decode(), TWICE[2]: "cache_salt"}
    assert caught.value.field == names.get(twice, "model")


@pytest.mark.parametrize("twice", TWICE)
def test_a_second_key_is_refused_where_prompts_are_not_read(twice: bytes) -> None:
    with pytest.raises(BadPromptError, match="there twice"):
        read_plain(b'{"model":"m",%b}' % twice, is_json=True)


def test_keys_of_that_name_deeper_down_and_in_texts_are_none() -> None:
    nested = b'"tools":[{"model":1,"cache_salt":2,"messages":{"messages":3}}],"x":"\\"model\\":"'
    for before, after in ((nested + b",", b""), (b"", b"," + nested)):
        body = b'{%b"model":"m","messages":%b%b}' % (before, MESSAGES, after)
        assert decode_chat(body).messages[0]["content"] == LONG


def test_more_keys_of_one_name_than_can_be_told_apart_are_refused() -> None:
    some = b",".join([b'{"model":1}'] * (MAX_KEYS - 1))
    assert chat_head(b'{"x":[%b],"model":"m","messages":[]}' % some).model == "m"
    with pytest.raises(BadPromptError, match=f"at most {MAX_KEYS} keys"):
        chat_head(b'{"x":[%b,%b],"model":"m","messages":[]}' % (some, b'{"model":1}'))


NAME = st.sampled_from(["model", "x", "messages"])
TREE = st.recursive(
    st.sampled_from([b"1", b'"model"', b'"\\"model\\":"', b'"a\\"model"']),
    lambda inner: st.lists(st.tuples(NAME, inner), max_size=3).map(
        lambda pairs: b"{%b}" % b",".join(b'"%b":%b' % (n.encode(), v) for n, v in pairs)
    ),
    max_leaves=8,
)


@given(st.lists(st.tuples(NAME, TREE), max_size=5), st.sampled_from(["", " ", "\t\n"]))
def test_what_is_refused_is_exactly_what_has_the_key_twice_on_its_top_level(
    pairs: list[tuple[str, bytes]], space: str
) -> None:
    spaced = [b'"%b"%b:%b' % (n.encode(), space.encode(), v) for n, v in pairs]
    body = b"{%b}" % b",".join(spaced)
    is_twice = [name for name, _ in pairs].count("model") > 1
    key = OneKey("model")
    try:
        refuse_second(body, (key,))
    except BadPromptError:
        assert is_twice
    else:
        assert not is_twice


def test_a_long_value_is_left_out_of_the_search_and_nothing_else() -> None:
    key = OneKey("messages")
    body = b'{"a":1,"messages" : %b,"b":2}' % MESSAGES
    head = chat_head(body[:-1] + b',"model":"m"}')
    assert isinstance(head, ChatHead)
    assert without_value(body, key, head.messages) == b'{"a":1,"messages" : null,"b":2}'
    assert without_value(b"{}", key, head.messages) == b"{}"
    decoy = b'{"x":"messages","messages":%b}' % MESSAGES
    assert without_value(decoy, key, head.messages) == decoy
