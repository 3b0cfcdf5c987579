"""A session that a client names: short, and of its own scope where there are tenants."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from router.error import ClientError
from router.session import SESSION_CHARACTERS, bounded_session, may_name_session, scoped_session

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = b"k" * 32
ONE, OTHER = b'"cache_salt":"one"', b'"cache_salt":"other"'


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "session_id": "s-1", "stream": True, **fields}).encode()


def escaped(body: bytes, name: str) -> bytes:
    code = f'"\\u{ord(name[0]):04x}{name[1:]}"'
    return body.replace(f'"{name}"'.encode(), code.encode())


def session_in(body: bytes, field: bytes = ONE) -> str:
    return str(json.loads(scoped_session(body, KEY, field))["session_id"])


def test_a_session_is_the_same_for_its_scope_and_no_other_scopes() -> None:
    """S-04: nor can a tenant name the session that an engine knows another tenant by."""
    mine = session_in(body_of())
    assert mine == session_in(body_of(prompt="another turn"))
    assert mine != session_in(body_of(), OTHER)
    assert mine != session_in(body_of(session_id="s-2"))
    assert session_in(body_of(session_id=mine), OTHER) != mine
    assert "s-1" not in mine
    assert len(mine) == 24


def test_a_session_is_replaced_where_it_stands_and_nothing_else_is() -> None:
    body = body_of(tools=[{"parameters": {"properties": {"session_id": {"type": "string"}}}}])
    before, after = json.loads(body), json.loads(scoped_session(body, KEY, ONE))
    assert after.pop("session_id") != before.pop("session_id")
    assert after == before
    assert session_in(escaped(body, "session_id")) == session_in(body)
    for same in (b'{"model":"m"}', body_of(session_id=None), b'{"prompt":"session_id"}'):
        assert scoped_session(same, KEY, ONE) == same


@pytest.mark.parametrize("session", ["x" * (SESSION_CHARACTERS + 1), 7, ["s"], {"id": "s"}, True])
def test_a_session_that_is_no_short_text_is_refused(session: Any) -> None:
    body = body_of(session_id=session)
    for written in (body, escaped(body, "session_id")):
        with pytest.raises(ClientError, match="session_id: expected a text of up to 256"):
            scoped_session(written, KEY, ONE)
        assert may_name_session(written)
        with pytest.raises(ClientError, match="session_id: expected a text of up to 256"):
            bounded_session(written)


def test_without_tenants_a_short_session_goes_on_as_it_is() -> None:
    longest = "é" * SESSION_CHARACTERS
    for body in (body_of(), body_of(session_id=longest), b"no JSON: session_id", b'["session_id"]'):
        assert bounded_session(body) == body
    with pytest.raises(ClientError, match="session_id: expected a text"):
        bounded_session(body_of(session_id=None, vllm_xargs={"session_id": longest + "x"}))
    assert not may_name_session(b'{"model":"m","messages":[]}')


def test_a_session_among_other_arguments_is_refused_where_there_are_tenants() -> None:
    """An engine (vLLM) takes it from there, too, where none is on the top level."""
    body = body_of(session_id=None, vllm_xargs={"session_id": "s"})
    for written in (body, escaped(body, "session_id"), escaped(body, "vllm_xargs")):
        with pytest.raises(ClientError, match="vllm_xargs: expected no session_id"):
            scoped_session(written, KEY, ONE)
    fine = body_of(vllm_xargs={"top_k": 3, "session_id": None})
    assert json.loads(scoped_session(fine, KEY, ONE))["vllm_xargs"]["top_k"] == 3


def test_two_sessions_or_kept_pages_of_any_session_are_refused() -> None:
    """Which of two counts is not the same for all parsers; SGLang's go by an id alone."""
    for body, name in (
        (b'{"session_id":"a","session_id":"b"}', "session_id"),
        (b'{"session_params":{"id":"a"}}', "session_params"),
        (escaped(b'{"session_params":{"id":"a"}}', "session_params"), "session_params"),
    ):
        with pytest.raises(ClientError, match=name):
            scoped_session(body, KEY, ONE)


def test_tools_may_take_and_be_called_with_any_number_of_sessions() -> None:
    """An agent's conversation has one in each call of its browser: none of them is the body's."""
    used = {"type": "tool_use", "id": "t", "name": "browse", "input": {"session_id": "b"}}
    messages = [{"role": "assistant", "content": [used]}] * 1_000
    tool = {"input_schema": {"properties": {"session_id": {"type": "string"}}}}
    calm = body_of(messages=messages, tools=[tool] * 40, session_id=None)
    assert scoped_session(calm, KEY, ONE) == calm
    for body in (
        body_of(messages=messages),
        body_of(messages=messages, session_id="s-1"),
        json.dumps({"messages": messages, "session_id": "s-1", "tools": [tool] * 40}).encode(),
    ):
        before, after = json.loads(body), json.loads(scoped_session(body, KEY, ONE))
        assert after.pop("session_id") == session_in(body_of())
        assert before.pop("session_id") == "s-1"
        assert after == before
    for twice in (
        body_of(messages=messages).replace(b'"model"', b'"session_id":"a","model"'),
        body_of(messages=messages)[:-1] + b',"session\\u005fid":"a"}',
    ):
        with pytest.raises(ClientError, match="session_id: expected one value"):
            scoped_session(twice, KEY, ONE)


@pytest.mark.parametrize(
    "head", [b'{"session_id":[', b'{"session_id":"s","vllm_xargs":{"session_i":[']
)
def test_nothing_is_made_of_values_beside_a_session(head: bytes) -> None:
    """Objects of Python for each value would take ten times as long as the body is read in."""
    body = head + b"{}," * 100_000 + (b"{}]}}" if b"xargs" in head else b"{}]}")
    works: list[Callable[[], bytes]] = [
        lambda: scoped_session(body, KEY, ONE),
        lambda: bounded_session(body),
    ]
    for work in works:
        tracemalloc.start()
        with contextlib.nullcontext() if b"xargs" in head else pytest.raises(ClientError):
            work()
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 5 * len(body)
