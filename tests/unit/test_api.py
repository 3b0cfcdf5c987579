"""The worker's API as values: fields of bodies, refusals, and the bytes of answers."""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
import pytest

from sidecar.answer import Answer, ChatWriter, CompletionWriter, Layout, Logprobs, Usage
from sidecar.api import ApiError, error_event, is_kv_source
from sidecar.generation import Delta
from sidecar.runner import Sampled
from sidecar.sampling import decode_chat_sampling, decode_completion_sampling

CALLS: Final = (decode_chat_sampling, decode_completion_sampling)


def _body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", **fields})


class TestDefaults:
    def test_a_chat_is_drawn_at_temperature_one_without_a_limit(self) -> None:
        chat = decode_chat_sampling(_body())
        assert (chat.used_temperature, chat.used_top_k, chat.output_limit) == (1.0, 0, None)
        assert (chat.samples, chat.stops, chat.logprob_count) == (1, (), None)
        assert not chat.is_stream
        assert not chat.wants_usage

    def test_a_completion_has_a_short_limit_and_null_lifts_it(self) -> None:
        assert decode_completion_sampling(_body()).output_limit == 16
        assert decode_completion_sampling(_body(max_tokens=None)).output_limit is None
        assert decode_completion_sampling(_body(max_tokens=7)).output_limit == 7

    def test_the_newer_name_of_the_limit_wins(self) -> None:
        chat = decode_chat_sampling(_body(max_tokens=3, max_completion_tokens=5))
        assert chat.output_limit == 5
        assert decode_chat_sampling(_body(max_tokens=3)).output_limit == 3

    def test_a_seed_is_kept_and_without_one_each_call_draws_its_own(self) -> None:
        for seed in (-(2**63), 0, 2**63 - 1):
            assert decode_chat_sampling(_body(seed=seed)).used_seed() == seed
        unseeded = decode_chat_sampling(_body())
        assert unseeded.used_seed() != unseeded.used_seed()
        assert decode_chat_sampling(_body(temperature=0)).used_seed() == 0

    def test_null_means_the_default(self) -> None:
        names = ("temperature", "top_p", "top_k", "seed", "stop", "n", "logprobs", "logit_bias")
        chat = decode_chat_sampling(_body(**dict.fromkeys(names)))
        assert chat.used_temperature == 1.0
        assert chat.samples == 1

    def test_logprobs_are_a_switch_and_a_count_in_chats_and_a_count_in_completions(self) -> None:
        assert decode_chat_sampling(_body(logprobs=True)).logprob_count == 0
        assert decode_chat_sampling(_body(logprobs=True, top_logprobs=20)).logprob_count == 20
        assert decode_completion_sampling(_body(logprobs=0)).logprob_count == 0
        assert decode_completion_sampling(_body(logprobs=20)).logprob_count == 20

    def test_usage_with_every_chunk_needs_usage(self) -> None:
        both = {"include_usage": True, "continuous_usage_stats": True}
        alone = {"continuous_usage_stats": True}
        assert decode_chat_sampling(_body(stream_options=both)).wants_continuous_usage
        assert not decode_chat_sampling(_body(stream_options=alone)).wants_continuous_usage


class TestRefusals:
    @pytest.mark.parametrize("decode", CALLS)
    @pytest.mark.parametrize(
        "fields",
        [
            {"temperature": -0.1},
            {"temperature": 2.1},
            {"temperature": "hot"},
            {"top_p": 0},
            {"top_p": 1.5},
            {"top_k": -2},
            {"top_k": 1.5},
            {"seed": 2**63},
            {"seed": -(2**63) - 1},
            {"seed": "1"},
            {"stop": 3},
            {"stop": ""},
            {"stop": ["a", ""]},
            {"stop": ["a", 1]},
            {"stop": "x" * 1025},
            {"stop": ["x"] * 257},
            {"stop_token_ids": [-1]},
            {"stop_token_ids": ["1"]},
            {"max_tokens": 0},
            {"max_tokens": True},
            {"n": 0},
            {"n": 129},
            {"stream": "yes"},
            {"ignore_eos": 1},
            {"logprobs": "all"},
            {"min_tokens": 1},
            {"presence_penalty": 0.5},
            {"frequency_penalty": -0.5},
            {"frequency_penalty": 3},
            {"repetition_penalty": 1.1},
            {"min_p": 0.1},
            {"logit_bias": {"5": 10}},
            {"best_of": 3},
            {"skip_special_tokens": False},
            {"prompt_logprobs": 1},
            {"prompt_logprobs": 0},
            {"logprob_token_ids": [1]},
            {"echo": True},
            {"suffix": "after"},
            {"use_beam_search": True},
            {"bad_words": ["x"]},
            {"allowed_token_ids": [1]},
            {"response_format": {"type": "json_object"}},
            {"response_format": "json"},
            {"structured_outputs": {"regex": "a"}},
            {"guided_json": {"type": "object"}},
            {"guided_regex": "a+"},
            {"guided_choice": ["a"]},
            {"guided_grammar": "root ::= a"},
            {"tool_choice": "required"},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        ],
        ids=lambda fields: json.dumps(fields)[:40],
    )
    def test_a_value_that_cannot_be_done_is_a_400_that_names_the_field(
        self, decode: Any, fields: dict[str, Any]
    ) -> None:
        [name] = fields
        with pytest.raises(ApiError) as caught:
            decode(_body(**fields))
        error = caught.value
        assert error.status == 400
        assert error.param is not None
        assert error.param.split("[")[0] == name
        assert name in error.message

    @pytest.mark.parametrize("decode", CALLS)
    def test_values_that_change_nothing_are_accepted(self, decode: Any) -> None:
        decode(
            _body(
                n=2,
                min_tokens=0,
                presence_penalty=0,
                frequency_penalty=0.0,
                repetition_penalty=1.0,
                min_p=0,
                logit_bias={},
                best_of=2,
                skip_special_tokens=True,
                echo=False,
                suffix="",
                use_beam_search=False,
                bad_words=[],
                response_format={"type": "text"},
                tool_choice="auto",
                user="someone",
            )
        )

    @pytest.mark.parametrize(
        ("decode", "fields", "name"),
        [
            (decode_chat_sampling, {"logprobs": 3}, "logprobs"),
            (decode_chat_sampling, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            (decode_chat_sampling, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
            (decode_chat_sampling, {"top_logprobs": 2}, "top_logprobs"),
            (decode_chat_sampling, {"max_completion_tokens": 0}, "max_completion_tokens"),
            (decode_completion_sampling, {"logprobs": True}, "logprobs"),
            (decode_completion_sampling, {"logprobs": 21}, "logprobs"),
            (decode_completion_sampling, {"logprobs": -1}, "logprobs"),
        ],
    )
    def test_each_kind_of_call_has_its_own_logprobs(
        self, decode: Any, fields: dict[str, Any], name: str
    ) -> None:
        with pytest.raises(ApiError) as caught:
            decode(_body(**fields))
        assert caught.value.param == name

    def test_what_is_no_json_is_said_to_be_none(self) -> None:
        with pytest.raises(ApiError, match="not valid JSON"):
            decode_chat_sampling(b'{"model": ')


class TestKvSource:
    @pytest.mark.parametrize(
        "address",
        ["http://10.0.0.7:8000", "https://worker-2.example:443", "http://[::1]:65535"],
    )
    def test_an_address_is_one(self, address: str) -> None:
        assert is_kv_source(address)

    @pytest.mark.parametrize(
        "address",
        [
            "",
            "10.0.0.7:8000",
            "http://10.0.0.7",
            "http://10.0.0.7:0",
            "http://10.0.0.7:65536",
            "http://10.0.0.7:8000/",
            "http://user@10.0.0.7:8000",
            "http://10.0.0.7:8000\n",
            "http://a b:80",
            "http://\u0667:80",
            "http://h:\u0668\u0660",
            "ftp://10.0.0.7:8000",
            "file:///etc/hosts:80",
        ],
    )
    def test_anything_else_is_none(self, address: str) -> None:
        assert not is_kv_source(address)


def _layout(*, has_logprobs: bool = False, **fields: Any) -> Layout:
    logprobs = Logprobs(1, chr) if has_logprobs else None
    return Layout(request_id="id", model="m", created_s=7, logprobs=logprobs, **fields)


def _data(event: bytes) -> list[dict[str, Any]]:
    parts = event.split(b"\n\n")
    assert parts.pop() == b""
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


SAMPLED: Final = (Sampled(97, logprob=-0.5, top=((98, -0.25),)),)


class TestWriters:
    def test_a_chat_chunk_has_the_fields_of_the_protocol(self) -> None:
        writer = ChatWriter(_layout())
        [chunk] = _data(writer.delta(Delta(2, [97], 'a"')))
        assert chunk == {
            "id": "chatcmpl-id",
            "object": "chat.completion.chunk",
            "created": 7,
            "model": "m",
            "choices": [
                {"index": 2, "delta": {"content": 'a"'}, "logprobs": None, "finish_reason": None}
            ],
        }

    def test_the_last_chunk_says_why_it_is(self) -> None:
        for writer in (ChatWriter(_layout()), CompletionWriter(_layout())):
            [chunk] = _data(writer.delta(Delta(0, [97], "", "stop", 97)))
            choice = chunk["choices"][0]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 97)
            [chunk] = _data(writer.delta(Delta(0, [97], "", "stop", "END")))
            assert chunk["choices"][0]["stop_reason"] == "END"

    def test_usage_can_come_with_every_chunk(self) -> None:
        for writer in (ChatWriter(_layout()), CompletionWriter(_layout())):
            [chunk] = _data(writer.delta(Delta(0, [97], "a"), Usage(5, 2)))
            usage = {"prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2}
            assert chunk["usage"] == usage
        [role] = _data(ChatWriter(_layout()).opening([Usage(5, 0)]))
        assert role["usage"]["total_tokens"] == 5

    def test_the_roles_of_a_chat_come_first(self) -> None:
        chunks = _data(ChatWriter(_layout()).opening([None, None]))
        assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert CompletionWriter(_layout()).opening([None]) == b""

    def test_token_ids_are_told_when_asked_for(self) -> None:
        layout = _layout(shown_prompts=([1, 2], [3]))
        chunks = _data(CompletionWriter(layout).opening([None] * 4))
        prompts = [chunk["choices"][0]["prompt_token_ids"] for chunk in chunks]
        assert prompts == [[1, 2], [1, 2], [3], [3]]
        [chunk] = _data(CompletionWriter(layout).delta(Delta(0, [97, 98], "ab")))
        assert chunk["choices"][0]["token_ids"] == [97, 98]

    def test_offsets_of_a_streamed_completion_go_on_for_each_choice(self) -> None:
        writer = CompletionWriter(_layout(has_logprobs=True))
        offsets = []
        for choice in (0, 1, 0, 0):
            [chunk] = _data(writer.delta(Delta(choice, [97], "a", sampled=SAMPLED)))
            offsets += chunk["choices"][0]["logprobs"]["text_offset"]
        assert offsets == [0, 0, 1, 2]

    def test_whole_and_streamed_logprobs_are_the_same(self) -> None:
        answer = Answer(
            text="aa", token_ids=[97, 97], sampled=[*SAMPLED, *SAMPLED], finish="stop", stopped_by=3
        )
        whole = json.loads(ChatWriter(_layout(has_logprobs=True)).whole([answer], Usage(1, 2, 0)))
        writer = ChatWriter(_layout(has_logprobs=True))
        chunks = [_data(writer.delta(Delta(0, [97], "a", sampled=SAMPLED)))[0] for _ in range(2)]
        streamed = [chunk["choices"][0]["logprobs"]["content"][0] for chunk in chunks]
        choice = whole["choices"][0]
        assert choice["logprobs"]["content"] == streamed
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 3)
        assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}

    def test_an_error_can_be_an_event(self) -> None:
        [event] = _data(error_event(504, "late"))
        assert event["error"]["code"] == 504
        assert event["error"]["message"] == "late"
