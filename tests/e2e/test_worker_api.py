"""The worker's handlers over an engine that says what the test wrote down."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import msgspec
import openai
import pytest

from sidecar.generation import Delta, Halted
from sidecar.logprob import numbered
from sidecar.report import KvReport
from sidecar.runner import Sampled
from state.prefix import pack_tokens
from support.scripted_engine import (
    MODEL,
    REPORT,
    ScriptedEngine,
    ScriptedSettings,
    scripted_worker,
    spoken,
)

if TYPE_CHECKING:
    from aiohttp.test_utils import TestClient

    from sidecar.generation import Generation, HaltReason

CHAT: Final = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: Final = {"model": MODEL, "prompt": "hi"}
CALLS: Final[list[tuple[str, dict[str, Any]]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", COMPLETION),
]


async def _post(client: TestClient[Any, Any], path: str, body: Any, **headers: str) -> Any:
    async with client.post(path, json=body, headers=headers) as response:
        return response.status, await response.json()


async def _events(client: TestClient[Any, Any], path: str, body: Any) -> list[Any]:
    """Return the events of a stream; the end is None."""
    async with client.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200
        raw = await response.read()
    datas = [part.removeprefix(b"data: ") for part in raw.split(b"\n\n") if part]
    return [None if data == b"[DONE]" else json.loads(data) for data in datas]


class TestEnds:
    @pytest.mark.parametrize(("path", "body"), CALLS)
    @pytest.mark.parametrize(
        ("reason", "status", "kind"),
        [
            ("stopping", 503, "ServiceUnavailableError"),
            ("timed_out", 504, "GatewayTimeoutError"),
            ("failed", 500, "InternalServerError"),
        ],
    )
    async def test_what_the_engine_ends_early_ends_with_an_error(
        self, path: str, body: Any, reason: HaltReason, status: int, kind: str
    ) -> None:
        engine = ScriptedEngine(lambda each: [Delta(each.choice, [97], "a"), Halted(reason)])
        async with scripted_worker(engine) as client:
            got, answer = await _post(client, path, body)
            events = await _events(client, path, body)
        assert (got, answer["error"]["code"], answer["error"]["type"]) == (status, status, kind)
        assert events[-1] == answer
        assert "a" in json.dumps(events[-2]["choices"])
        assert engine.aborted == engine.tickets

    async def test_one_early_end_ends_all_choices(self) -> None:
        def script(generation: Generation) -> list[Delta | Halted]:
            return [Halted("failed")] if generation.choice == 2 else []

        engine = ScriptedEngine(script)
        async with scripted_worker(engine) as client:
            status, _ = await _post(client, "/v1/chat/completions", {**CHAT, "n": 3})
            events = await _events(client, "/v1/completions", {**COMPLETION, "n": 3})
        assert status == 500
        assert [event["error"]["code"] for event in events] == [500]
        assert engine.aborted == engine.tickets
        assert len(engine.tickets) == 6

    @pytest.mark.parametrize("is_stream", [False, True])
    async def test_a_client_that_leaves_aborts_all_choices(self, *, is_stream: bool) -> None:
        engine = ScriptedEngine(lambda _: [])
        async with scripted_worker(engine) as client:
            body = {**CHAT, "n": 2, "stream": is_stream}
            call = asyncio.create_task(_post(client, "/v1/chat/completions", body))
            for _ in range(2):
                await asyncio.wait_for(engine.submissions.get(), 20)
            call.cancel()
            await asyncio.wait_for(engine.aborts.wait(), 20)
        assert engine.aborted == engine.tickets

    async def test_a_stopped_engine_takes_no_calls(self) -> None:
        engine = ScriptedEngine(lambda _: [])
        engine.is_halted = True
        async with scripted_worker(engine) as client:
            assert (await _post(client, "/v1/completions", COMPLETION))[0] == 503
            async with client.get("/health") as health:
                assert health.status == 503


class TestGenerations:
    async def test_the_fields_of_a_call_reach_the_engine(self) -> None:
        engine = ScriptedEngine(spoken("a"))
        fields = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "seed": -5,
            "stop": ["x"],
            "stop_token_ids": [7],
            "max_tokens": 9,
            "ignore_eos": True,
            "cache_salt": "s",
            "logprobs": 2,
        }
        async with scripted_worker(engine) as client:
            await _post(client, "/v1/completions", COMPLETION | fields)
        [ticket] = engine.tickets
        generation = ticket.generation
        assert generation.packed_prompt == pack_tokens(b"hi")
        assert (generation.temperature, generation.top_p, generation.top_k) == (0.5, 0.9, 40)
        assert (generation.seed, generation.stops, generation.stop_token_ids) == (-5, ("x",), (7,))
        assert (generation.max_output_tokens, generation.ignore_eos) == (9, True)
        assert (generation.salt, generation.top_logprobs) == ("s", 2)

    async def test_samples_of_a_prompt_follow_its_first_with_one_seed(self) -> None:
        engine = ScriptedEngine(spoken("a"))
        async with scripted_worker(engine) as client:
            body = {"model": MODEL, "prompt": ["one", "two"], "n": 3}
            status, answer = await _post(client, "/v1/completions", body)
        assert status == 200
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        first, second = engine.tickets[0], engine.tickets[3]
        parents = [ticket.parent for ticket in engine.tickets]
        assert parents == [None, first, first, None, second, second]
        assert [ticket.generation.sample for ticket in engine.tickets] == [0, 1, 2] * 2
        assert len({ticket.generation.seed for ticket in engine.tickets}) == 1
        assert answer["usage"]["prompt_tokens"] == 6
        assert answer["usage"]["completion_tokens"] == 6
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2

    async def test_request_ids_are_the_answers_and_the_choices(self) -> None:
        engine = ScriptedEngine(spoken("a"))
        async with scripted_worker(engine) as client:
            _, answer = await _post(client, "/v1/completions", COMPLETION | {"n": 2})
        ids = [f"cmpl-{ticket.generation.request_id}" for ticket in engine.tickets]
        assert ids == [f"{answer['id']}-0", f"{answer['id']}-1"]

    async def test_a_synthetic_engine_always_says_the_same(self) -> None:
        engine = ScriptedEngine(spoken("a"))
        settings = ScriptedSettings(compute="synthetic")
        async with scripted_worker(engine, settings) as client:
            for fields in ({}, {"temperature": 1}, {"seed": 4}):
                await _post(client, "/v1/completions", COMPLETION | fields)
            for path, body in CALLS:
                status, answer = await _post(client, path, {**body, "logprobs": True})
                assert (status, answer["error"]["param"]) == (400, "logprobs")
        assert [ticket.generation.seed for ticket in engine.tickets] == [0, 0, 4]

    async def test_where_to_fetch_a_prefix_is_advice(self) -> None:
        engine = ScriptedEngine(spoken("a"))
        name = "X-Warmroute-Kv-Source"
        async with scripted_worker(engine) as client:
            for source in ("http://10.0.0.7:8000", "http://10.0.0.7:8000/x", "nowhere"):
                status, _ = await _post(client, "/v1/completions", COMPLETION, **{name: source})
                assert status == 200
        sources = [ticket.generation.kv_source for ticket in engine.tickets]
        assert sources == ["http://10.0.0.7:8000", None, None]


class TestAnswers:
    @pytest.mark.parametrize("is_included", [False, True])
    async def test_what_stopped_an_answer_is_shown_when_asked_for(
        self, *, is_included: bool
    ) -> None:
        def script(generation: Generation) -> list[Delta | Halted]:
            by: str | int = "END" if generation.choice == 0 else 98
            return [
                Delta(generation.choice, [97], "a"),
                Delta(generation.choice, [98], "", "stop", by),
            ]

        async with scripted_worker(ScriptedEngine(script)) as client:
            body = COMPLETION | {"n": 2, "include_stop_str_in_output": is_included}
            _, answer = await _post(client, "/v1/completions", body)
            events = await _events(client, "/v1/completions", body)
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == (["aEND", "ab"] if is_included else ["a", "a"])
        assert [choice["stop_reason"] for choice in answer["choices"]] == ["END", 98]
        streamed = ["", ""]
        for event in events[:-1]:
            streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert streamed == texts

    @pytest.mark.parametrize(("path", "body"), CALLS)
    async def test_usage_so_far_comes_with_every_chunk(self, path: str, body: Any) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        async with scripted_worker(ScriptedEngine(spoken("abc"))) as client:
            events = await _events(client, path, {**body, "stream_options": options})
        assert events.pop() is None
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts[-4:] == [1, 2, 3, 3]
        assert events[-1]["choices"] == []
        assert {event["usage"]["prompt_tokens"] for event in events} == {
            events[-1]["usage"]["prompt_tokens"]
        }
        assert "prompt_tokens_details" in events[-1]["usage"]

    async def test_held_back_tokens_are_told_without_text(self) -> None:
        def script(generation: Generation) -> list[Delta | Halted]:
            sampled = (Sampled(97, logprob=-1.0),)
            held = Delta(generation.choice, [97], "", sampled=sampled)
            return [held, Delta(generation.choice, [97], "aa", "length", sampled=sampled)]

        async with scripted_worker(ScriptedEngine(script)) as client:
            events = await _events(client, "/v1/completions", COMPLETION | {"logprobs": 0})
        choices = [event["choices"][0] for event in events[:-1]]
        assert [choice["text"] for choice in choices] == ["", "aa"]
        assert [choice["logprobs"]["tokens"] for choice in choices] == [["a"], ["a"]]

    async def test_the_sdk_reads_logprobs(self) -> None:
        def script(generation: Generation) -> list[Delta | Halted]:
            top = ((ord("x"), -0.25), (ord("a"), -2.0), (0xE4, -float("inf")))
            sampled = (Sampled(ord("a"), logprob=-2.0, top=top[: generation.top_logprobs]),)
            return [
                Delta(generation.choice, [97], "a", sampled=sampled),
                Delta(generation.choice, [97], "a", "stop", sampled=sampled),
            ]

        async with scripted_worker(ScriptedEngine(script)) as client:
            base_url = str(client.make_url("/v1"))
            async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as sdk:
                chats: Any = sdk.chat.completions
                fields = {**CHAT, "logprobs": True, "top_logprobs": 3}
                whole = await chats.create(**fields)
                chunks = [chunk async for chunk in await chats.create(**fields, stream=True)]
                texts: Any = sdk.completions
                text = await texts.create(**COMPLETION, logprobs=2)
                parts = [
                    part async for part in await texts.create(**COMPLETION, logprobs=2, stream=True)
                ]
        content = whole.choices[0].logprobs.content
        assert [token.token for token in content] == ["a", "a"]
        assert [top.token for top in content[0].top_logprobs] == ["x", "a", "\ufffd"]
        assert [top.logprob for top in content[0].top_logprobs] == [-0.25, -2.0, -9999.0]
        assert content[0].bytes == [97]
        streamed = [chunk.choices[0].logprobs for chunk in chunks]
        assert [token for each in streamed if each for token in each.content] == content
        logprobs = text.choices[0].logprobs
        assert logprobs.tokens == ["a", "a"]
        assert logprobs.text_offset == [0, 1]
        assert logprobs.top_logprobs == [{"x": -0.25, "a": -2.0}] * 2
        assert [part.choices[0].logprobs.text_offset for part in parts] == [[0], [1]]

    async def test_tokens_can_be_told_by_number(self) -> None:
        def script(generation: Generation) -> list[Delta | Halted]:
            sampled = (Sampled(97, logprob=-1.0),)
            return [Delta(generation.choice, [97], "a", "length", sampled=sampled)]

        async with scripted_worker(ScriptedEngine(script)) as client:
            body = {**CHAT, "logprobs": True, "return_tokens_as_token_ids": True}
            _, answer = await _post(client, "/v1/chat/completions", body)
        told = answer["choices"][0]["logprobs"]["content"][0]
        assert told["token"] == numbered(97)


class TestAdmin:
    async def test_the_report_is_told_as_it_is(self) -> None:
        async with (
            scripted_worker(ScriptedEngine(lambda _: [])) as client,
            client.get("/debug/kv") as response,
        ):
            assert msgspec.json.decode(await response.read(), type=KvReport) == REPORT

    async def test_a_prefix_is_pinned_for_a_while_and_unpinned(self) -> None:
        engine = ScriptedEngine(lambda _: [])
        body = {"prompt": "hi", "ttl_s": 60}
        async with scripted_worker(engine) as client:
            assert await _post(client, "/kv/pin", body) == (200, {"pages": 2, "tokens": 32})
            assert (await _post(client, "/kv/pin", body | {"cache_salt": "s"}))[0] == 200
            answer = await _post(client, "/kv/unpin", {"prompt": "hi"})
            assert answer == (200, {"pages": 1, "tokens": 16})
            chat = {"messages": CHAT["messages"], "ttl_s": 0.5}
            assert (await _post(client, "/kv/pin", chat))[0] == 200
            _, told = await _post(client, "/tokenize", CHAT)
        packed = pack_tokens(b"hi")
        assert engine.pins == [
            ("pin", packed, None, 60),
            ("pin", packed, "s", 60),
            ("unpin", packed, None),
            ("pin", pack_tokens(told["tokens"]), None, 0.5),
        ]

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/kv/pin", {"prompt": "hi"}, "ttl_s"),
            ("/kv/pin", {"prompt": "hi", "ttl_s": 0}, "ttl_s"),
            ("/kv/pin", {"prompt": "hi", "ttl_s": 3601}, "ttl_s"),
            ("/kv/pin", {"prompt": "hi", "ttl_s": "1"}, "ttl_s"),
            ("/kv/pin", {"ttl_s": 1}, "prompt"),
            ("/kv/pin", {"ttl_s": 1, "prompt": ""}, "prompt"),
            ("/kv/pin", {"ttl_s": 1, "prompt": [256]}, "prompt"),
            ("/kv/pin", {"ttl_s": 1, "messages": []}, "messages"),
            ("/kv/pin", {"ttl_s": 1, "prompt": "x", "cache_salt": 3}, "cache_salt"),
            ("/kv/unpin", {}, "prompt"),
        ],
    )
    async def test_a_wrong_pin_is_a_400_that_names_the_field(
        self, path: str, body: Any, param: str
    ) -> None:
        engine = ScriptedEngine(lambda _: [])
        async with scripted_worker(engine) as client:
            status, answer = await _post(client, path, body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert engine.pins == []

    async def test_transfer_is_told_where_there_is_one(self) -> None:
        info = {"host": "127.0.0.1", "port": 5}
        async with (
            scripted_worker(ScriptedEngine(lambda _: []), transfer_info=info) as client,
            client.get("/kv_transfer") as response,
        ):
            assert await response.json() == info
        async with (
            scripted_worker(ScriptedEngine(lambda _: [])) as client,
            client.get("/kv_transfer") as response,
        ):
            assert response.status == 404
