"""The judge of the kill points: it must see every way in which an answer can lie."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chaos.evidence import End
from support.chaos import Outage, unexplained
from support.chaos_load import Entry, judge

TEXT = "one two"
ERROR = json.dumps(
    {"error": {"message": "m", "type": "overloaded_error", "param": None, "code": "c"}}
)


def event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


def answer(text: str) -> str:
    message = {"choices": [{"message": {"content": text}}], "usage": {"completion_tokens": 2}}
    return json.dumps(message)


DONE = "data: [DONE]\n\n"
FAILED = f"data: {ERROR}\n\n"
WHOLE = event("one") + event(" two") + DONE


def judged(body: str, **given: Any) -> Entry:
    is_stream = given.pop("is_stream", True)
    fields: dict[str, Any] = {"status": 200, "is_whole": True, "ended_s": 11.0} | given
    entry = Entry(
        request_id="r",
        router_index=0,
        request={"stream": is_stream, "max_tokens": 2},
        began_s=10.0,
        body=bytearray(body.encode()),
        **fields,
    )
    judge(entry, TEXT)
    return entry


@pytest.mark.parametrize(
    ("entry", "end"),
    [
        (judged(WHOLE), End.COMPLETE),
        (judged(WHOLE, is_whole=False), End.COMPLETE),
        (judged(event("one") + FAILED), End.ERROR_EVENT),
        (judged(event("one") + FAILED, is_whole=False), End.ERROR_EVENT),
        (judged(event("one"), is_whole=False), End.CLOSED),
        (judged(event("one") + 'data: {"cho', is_whole=False), End.CLOSED),
        (judged("", status=None, is_whole=False), End.CLOSED),
        (judged("", status=None, is_whole=False, is_left=True), End.LEFT),
        (judged(event("one"), is_whole=False, is_left=True), End.LEFT),
        (judged(answer(TEXT), is_stream=False), End.COMPLETE),
        (judged('{"cho', is_stream=False, is_whole=False), End.CLOSED),
        (judged(ERROR, status=503, headers={"Retry-After": "1"}), End.HTTP_ERROR),
    ],
)
def test_honest_ends_are_told_apart(entry: Entry, end: End) -> None:
    assert (entry.end, entry.fault) == (end, "")


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(judged(event("one")), id="cut but told as whole"),
        pytest.param(judged(event("one") + DONE), id="done before the end"),
        pytest.param(judged(event("one") + event(" three") + DONE), id="another text"),
        pytest.param(judged(event("two"), is_whole=False), id="not a beginning"),
        pytest.param(judged(WHOLE + event("more")), id="more after done"),
        pytest.param(judged(WHOLE + FAILED), id="an error after done"),
        pytest.param(judged(FAILED + event("one")), id="more after an error"),
        pytest.param(judged("data: nonsense\n\n", is_whole=False), id="no event"),
        pytest.param(judged(answer("one"), is_stream=False), id="a short answer"),
        pytest.param(judged('{"cho', is_stream=False), id="half an answer told as whole"),
        pytest.param(judged("oops", status=502), id="an error without its body"),
        pytest.param(judged(ERROR, status=404), id="an error of the client"),
        pytest.param(judged(ERROR, status=500), id="an error that nobody foresaw"),
        pytest.param(judged(ERROR, status=503), id="no Retry-After"),
        pytest.param(judged("", status=None, is_late=True), id="hung"),
    ],
)
def test_lies_are_faults(entry: Entry) -> None:
    assert entry.fault
    assert unexplained([entry], []) == [entry]


def test_a_closed_connection_needs_a_router_that_was_struck() -> None:
    closed = judged(event("one"), is_whole=False)
    assert unexplained([closed], []) == [closed]
    assert unexplained([closed], [Outage(1, 10.0, 12.0)]) == [closed]
    assert unexplained([closed], [Outage(0, 5.0, 8.0)]) == [closed]
    assert unexplained([closed], [Outage(0, 10.5, 12.0)]) == []
    assert unexplained([judged('{"cho', is_stream=False, is_whole=False)], []) == []
