"""What a live replay sends to a target, and what it makes of every kind of answer."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from replay.synthesis import Prompt
from replay.target import (
    AddressError,
    Answer,
    Target,
    TargetError,
    TargetSettings,
    checked_address,
    model_of,
    open_http,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

PROMPT = Prompt([5, 6, 7], 3, 2)
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
DONE = "[DONE]"


@asynccontextmanager
async def serving(handler: Handler, path: str = "/v1/completions") -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        [address] = runner.addresses
        yield f"http://127.0.0.1:{address[1]}"
    finally:
        await runner.cleanup()


def streaming(*events: object, **headers: str) -> Handler:
    """Return a handler that answers ``events`` one by one; a number is a pause."""

    async def handler(request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **named})
        await response.prepare(request)
        for event in events:
            if isinstance(event, float):
                await asyncio.sleep(event)
                continue
            text = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {text}\n\n".encode())
        return response

    return handler


def piece(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text}]}


def delta(**fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


async def asked(handler: Handler, timeout_s: float = 60.0, **more: Any) -> Answer:
    settings = {"model": "m", **more}
    path = "/v1/chat/completions" if settings.get("endpoint") == "chat" else "/v1/completions"
    async with serving(handler, path) as url, open_http(timeout_s) as http:
        target = Target(
            http, TargetSettings(url=url, timeout_s=timeout_s, **settings), time.monotonic
        )
        return await target.ask(target.body_of(PROMPT))


def body(**more: Any) -> dict[str, Any]:
    content = more.pop("content", [5, 6, 7])
    target = Target(None, TargetSettings(url="http://x", model="m", **more), time.monotonic)  # type: ignore[arg-type]
    made: dict[str, Any] = json.loads(target.body_of(Prompt(content, 3, 2)))
    return made


def test_a_completion_has_the_token_ids_and_generates_as_much_as_the_trace_says() -> None:
    assert body() == {
        "model": "m",
        "prompt": [5, 6, 7],
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_a_chat_has_the_prompt_as_its_one_message() -> None:
    made = body(endpoint="chat", content=" a b c", ignore_eos=False)
    assert made["messages"] == [{"role": "user", "content": " a b c"}]
    assert "prompt" not in made
    assert "ignore_eos" not in made


async def test_a_whole_answer_is_measured_and_read() -> None:
    receipts = {
        "x_warmroute_replica": "w0",
        "x_warmroute_reason": "prefix",
        "x_warmroute_predicted_cached_tokens": "64",
    }
    events = (0.05, piece("a"), 0.1, piece("b"), {"choices": [], "usage": USAGE}, DONE)
    answer = await asked(streaming(*events, **receipts))
    assert answer.error is None
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (3, 2, 1)
    assert (answer.replica, answer.reason, answer.predicted_cached_tokens) == ("w0", "prefix", 64)
    assert answer.ttft_s is not None
    assert answer.ttft_s >= 0.05
    assert answer.duration_s - answer.ttft_s >= 0.1


async def test_the_chunk_that_only_says_who_speaks_is_no_token() -> None:
    events = (delta(role="assistant", content=""), 0.1, delta(content="a"), DONE)
    answer = await asked(streaming(*events), endpoint="chat")
    assert answer.ttft_s is not None
    assert answer.ttft_s >= 0.1


async def test_a_token_that_is_no_whole_character_is_a_token() -> None:
    for endpoint, first in (("completions", piece("")), ("chat", delta(content=""))):
        answer = await asked(streaming(first, 0.2, piece("é"), DONE), endpoint=endpoint)
        assert answer.ttft_s is not None
        assert answer.duration_s - answer.ttft_s >= 0.19


async def test_what_the_target_does_not_tell_is_unknown() -> None:
    answer = await asked(streaming(piece("a"), DONE))
    assert answer.error is None
    assert answer == Answer(duration_s=answer.duration_s, ttft_s=answer.ttft_s)
    without = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": None}
    answer = await asked(streaming(piece("a"), {"choices": [], "usage": without}, DONE))
    assert answer.prompt_tokens == 3
    assert answer.cached_tokens is None


async def test_a_refusal_is_an_answer_with_its_status_and_words() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=503, text="all\nbusy")

    answer = await asked(refuse)
    assert answer.error == "status 503: all busy"
    assert answer.ttft_s is None


async def test_a_redirection_is_a_refusal_and_not_followed() -> None:
    followed: list[str] = []

    async def lead_away(request: web.Request) -> web.Response:
        followed.append(request.method)
        return web.Response(status=307, headers={"Location": str(request.url)}, text="over there")

    answer = await asked(lead_away)
    assert answer.error == "status 307: over there"
    assert followed == ["POST"]
    followed.clear()
    async with serving(lead_away, "/v1/models") as url, open_http(5.0) as http:
        with pytest.raises(TargetError, match="answered 307: over there"):
            await model_of(http, url)
    assert followed == ["GET"]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ((piece("a"), {"error": {"message": "out of memory"}}), "broken off: .*out of memory"),
        ((piece("a"), piece("b")), "the stream ended before its end"),
        ((piece("a"), '{"usage": nonsense'), "DecodeError"),
        (({"choices": []}, DONE), "the answer has no token"),
        ((piece("a"), 5.0, DONE), "no whole answer within 0.3 s"),
    ],
)
async def test_a_stream_that_does_not_end_well_is_an_error(
    events: tuple[object, ...], said: str
) -> None:
    answer = await asked(streaming(*events), timeout_s=0.3)
    assert answer.error is not None
    assert re.search(said, answer.error), answer.error


async def test_a_target_that_is_gone_is_an_error_of_the_request() -> None:
    async with open_http(1.0) as http:
        settings = TargetSettings(url="http://127.0.0.1:1", model="m")
        answer = await Target(http, settings, time.monotonic).ask(b"{}")
    assert answer.error is not None
    assert "127.0.0.1:1" in answer.error


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://localhost:8080/", "http://localhost:8080"),
        ("http://[::1]:80/v1", "http://[::1]:80"),
        ("https://127.8.8.8/gateway/v1/", "https://127.8.8.8/gateway"),
    ],
)
def test_an_address_of_this_machine_is_taken_without_its_api_path(url: str, address: str) -> None:
    assert checked_address(url, may_be_remote=False) == address


@pytest.mark.parametrize("host", ["10.0.0.1", "example.com", "localhost.example.com", "[::2]"])
def test_another_machine_is_refused_unless_allowed(host: str) -> None:
    with pytest.raises(AddressError, match=r"is not this machine: .*--allow-remote"):
        checked_address(f"http://{host}:8000", may_be_remote=False)
    assert checked_address(f"http://{host}:8000", may_be_remote=True) == f"http://{host}:8000"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "router",
        "ftp://127.0.0.1",
        "http://",
        "http://127.0.0.1:99999",
        "http://[::1",
        "http://127.0.0.1?x",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(AddressError, match=r"expected http://host:port, got"):
        checked_address(url, may_be_remote=True)


def test_credentials_are_refused_and_not_repeated() -> None:
    with pytest.raises(AddressError, match="with credentials") as caught:
        checked_address("http://me:secret@127.0.0.1", may_be_remote=True)
    assert "secret" not in str(caught.value)


async def models(answer: web.Response) -> str:
    async def handler(_: web.Request) -> web.Response:
        return answer

    async with serving(handler, "/v1/models") as url, open_http(5.0) as http:
        return await model_of(http, url)


async def test_the_only_model_is_asked_for() -> None:
    listed = {"object": "list", "data": [{"id": "tiny"}, {"id": "tiny"}]}
    assert await models(web.json_response(listed)) == "tiny"


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (200, '{"data":[{"id":"a"},{"id":"b"}]}', "serves a, b: name one with --model"),
        (200, '{"data":[]}', "serves no model"),
        (200, "hello", "is no list of models"),
        (404, "not here", "answered 404: not here"),
    ],
)
async def test_a_target_without_one_model_says_what_it_has(
    status: int, text: str, said: str
) -> None:
    with pytest.raises(TargetError, match=said):
        await models(web.Response(status=status, text=text))


async def test_a_target_that_is_not_there_is_named() -> None:
    async with open_http(1.0) as http:
        with pytest.raises(TargetError, match=r"http://127.0.0.1:1 does not answer"):
            await model_of(http, "http://127.0.0.1:1")
