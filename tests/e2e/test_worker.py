"""The bundled worker as a real process: OpenAI SDK, wrong requests, ZMQ client."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import msgspec
import openai
import pytest
import zmq

from sidecar.setting import WorkerSettings
from support.tokenizer import write_tokenizer
from support.worker import (
    RunningWorker,
    get_text,
    metrics_of,
    post_json,
    running_worker,
    send_chat,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL: Final = "tiny"
END: Final = 2**64 - 1
PROMPT: Final = "You are a patient assistant. " * 20


@pytest.fixture(scope="module")
def worker() -> Iterator[RunningWorker]:
    settings = WorkerSettings(
        compute="synthetic", model=MODEL, preset="instant", pages=512, page_tokens=32
    )
    with running_worker(settings) as running:
        yield running


def _client(worker: RunningWorker) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{worker.url}/v1", api_key="unused", max_retries=0, timeout=20)


def _complete(worker: RunningWorker, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1} | fields
    status, answer = post_json(worker, "/v1/completions", body)
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


def _cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


class TestCalls:
    def test_the_second_equal_chat_is_cached_up_to_its_last_page(
        self, worker: RunningWorker
    ) -> None:
        client = _client(worker)
        messages: Any = [{"role": "user", "content": PROMPT + "first"}]
        first, second = (
            client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12)
            for _ in range(2)
        )
        assert first.choices[0].message.content
        assert first.choices[0].message.content == second.choices[0].message.content
        assert (first.choices[0].finish_reason, first.id != second.id) == ("length", True)
        assert first.usage is not None
        assert second.usage is not None
        assert first.usage.completion_tokens == 12
        assert first.usage.prompt_tokens_details is not None
        assert second.usage.prompt_tokens_details is not None
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        reusable = (second.usage.prompt_tokens - 1) // 32 * 32
        assert second.usage.prompt_tokens_details.cached_tokens == reusable > 500

    def test_a_stream_says_the_same_and_ends_with_usage(self, worker: RunningWorker) -> None:
        client = _client(worker)
        messages: Any = [{"role": "user", "content": PROMPT + "stream"}]
        whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=30)
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=messages,
                max_tokens=30,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        assert text == whole.choices[0].message.content
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 30

    def test_a_stream_has_the_bytes_of_server_sent_events(self, worker: RunningWorker) -> None:
        with closing(send_chat(worker, {"stream": True, "max_tokens": 3})) as connection:
            raw = b""
            while b"[DONE]" not in raw:
                raw += connection.recv(65536)
        assert b"content-type: text/event-stream" in raw.lower()
        events = [part for part in raw.split(b"\n\n") if b"data: " in part]
        assert len(events) == 1 + 3 + 1
        assert events[-1].endswith(b"data: [DONE]")

    def test_answers_are_numbered_over_prompts_and_samples(self, worker: RunningWorker) -> None:
        answer = _complete(worker, [[1, 2, 3], [4, 5]], n=2, max_tokens=8, return_token_ids=True)
        choices = answer["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        prompts = [choice["prompt_token_ids"] for choice in choices]
        assert prompts == [[1, 2, 3], [1, 2, 3], [4, 5], [4, 5]]
        assert choices[0]["text"] != choices[1]["text"]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 32)
        status, text = post_json(worker, "/detokenize", {"tokens": choices[0]["token_ids"]})
        assert (status, text) == (200, {"prompt": choices[0]["text"]})

    def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(
        self, worker: RunningWorker
    ) -> None:
        text = _complete(worker, "stop me", max_tokens=60)["choices"][0]["text"]
        stop = text[20:24]
        answer = _complete(worker, "stop me", max_tokens=60, stop=[stop])["choices"][0]
        assert answer["text"] == text[: text.index(stop)]
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)

    def test_without_a_limit_an_answer_ends_by_itself(self, worker: RunningWorker) -> None:
        answer = _complete(worker, "no limit", max_tokens=None)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert 32 <= answer["usage"]["completion_tokens"] < 256

    def test_a_completion_that_names_no_limit_is_short(self, worker: RunningWorker) -> None:
        body = {"model": MODEL, "prompt": "no word of a limit"}
        status, answer = post_json(worker, "/v1/completions", body)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 16)
        assert answer["choices"][0]["finish_reason"] == "length"

    def test_a_salt_shares_nothing_with_others(self, worker: RunningWorker) -> None:
        prompt = PROMPT + "salted"
        answers = [
            _complete(worker, prompt, **fields)
            for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}, {})
        ]
        reusable = (len(prompt) - 1) // 32 * 32
        assert [_cached_tokens(answer) for answer in answers] == [0, 0, reusable, 0, reusable]

    def test_tokenize_gives_the_ids_that_the_engine_computes(self, worker: RunningWorker) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hé"}]}
        _, tokens = post_json(worker, "/tokenize", body)
        chat = body | {"max_tokens": 1, "return_token_ids": True}
        _, answer = post_json(worker, "/v1/chat/completions", chat)
        assert tokens["tokens"] == answer["prompt_token_ids"]
        assert tokens["count"] == answer["usage"]["prompt_tokens"]

    def test_with_a_tokenizer_the_text_is_that_of_the_token_ids(self, tmp_path: Path) -> None:
        """A conversation that quotes an answer finds the pages that the answer left behind."""
        folder = str(write_tokenizer(tmp_path))
        settings = WorkerSettings(
            compute="synthetic", model=MODEL, preset="instant", tokenizer=folder, page_tokens=8
        )
        messages: list[dict[str, str]] = [{"role": "user", "content": PROMPT}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 64, "return_token_ids": True}
        with running_worker(settings) as worker:
            _, answer = post_json(worker, "/v1/chat/completions", body)
            choice = answer["choices"][0]
            text = choice["message"]["content"]
            _, spoken = post_json(worker, "/detokenize", {"tokens": choice["token_ids"]})
            assert spoken == {"prompt": text}
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go"}]
            _, again = post_json(worker, "/v1/chat/completions", body)
        known_tokens = answer["usage"]["total_tokens"] - 1
        assert _cached_tokens(again) == known_tokens // 8 * 8

    def test_many_at_once_on_a_small_pool_all_complete(self) -> None:
        settings = WorkerSettings(
            compute="synthetic", model=MODEL, preset="instant", pages=40, page_tokens=16
        )
        with running_worker(settings) as worker, ThreadPoolExecutor(16) as threads:
            answers = list(
                threads.map(
                    lambda index: _complete(worker, f"{index} " * 50, max_tokens=200), range(48)
                )
            )
            assert {answer["usage"]["completion_tokens"] for answer in answers} == {200}
            metrics = metrics_of(worker)
        assert metrics["num_preemptions_total"] > 0
        assert metrics["generation_tokens_total"] == 48 * 200
        assert (metrics["num_requests_running"], metrics["kv_cache_usage_perc"]) == (0, 0)


class TestSurface:
    def test_it_describes_itself_like_vllm(self, worker: RunningWorker) -> None:
        models = json.loads(get_text(worker, "/v1/models"))["data"]
        assert [model["id"] for model in models] == [MODEL]
        assert get_text(worker, "/health") == ""
        sources = json.loads(get_text(worker, "/kv_event_sources"))
        assert sources["0"]["endpoint"] == worker.address.events
        assert sources["0"]["replay_endpoint"] == worker.address.replay
        metrics = get_text(worker, "/metrics")
        assert 'block_size="32"' in metrics
        assert 'num_gpu_blocks="512"' in metrics

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/v1/chat/completions", b"{", "body"),
            ("/v1/chat/completions", {"model": MODEL}, "messages"),
            ("/v1/chat/completions", {"model": MODEL, "messages": []}, "messages"),
            ("/v1/completions", {"model": MODEL, "prompt": ""}, "prompt"),
            ("/v1/completions", {"model": MODEL, "prompt": []}, "prompt"),
            ("/v1/completions", {"model": MODEL, "prompt": [256]}, "prompt"),
            ("/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 0}, "max_tokens"),
            ("/v1/completions", {"model": MODEL, "prompt": "x", "n": 0}, "n"),
            ("/v1/completions", {"model": MODEL, "prompt": "x", "stop": 3}, "stop"),
            ("/v1/completions", {"model": MODEL, "prompt": "x", "echo": True}, "echo"),
            ("/v1/completions", {"model": MODEL, "prompt": "x", "logprobs": 1}, "logprobs"),
            ("/v1/completions", {"model": MODEL, "prompt": "x", "top_p": 0}, "top_p"),
            ("/v1/completions", {"model": MODEL, "prompt": "x", "min_p": 0.1}, "min_p"),
            ("/v1/completions", {"model": MODEL, "prompt": "x", "cache_salt": ""}, "cache_salt"),
            ("/detokenize", {"tokens": [1000]}, "tokens"),
        ],
    )
    def test_a_wrong_body_is_a_400_that_names_the_field(
        self, worker: RunningWorker, path: str, body: Any, param: str
    ) -> None:
        status, answer = post_json(worker, path, body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert answer["error"]["code"] == 400
        assert answer["error"]["message"]

    def test_a_request_that_never_fits_is_refused_with_the_limit(
        self, worker: RunningWorker
    ) -> None:
        body = {"model": MODEL, "prompt": "x" * 512 * 32, "max_tokens": 10}
        status, answer = post_json(worker, "/v1/completions", body)
        assert status == 400
        assert "maximum context length is 16384 tokens" in answer["error"]["message"]

    def test_unknown_models_and_paths_are_404(self, worker: RunningWorker) -> None:
        status, answer = post_json(worker, "/v1/completions", {"model": "other", "prompt": "x"})
        assert (status, answer["error"]["type"]) == (404, "NotFoundError")
        assert post_json(worker, "/v1/nothing", {})[0] == 404

    def test_settings_that_cannot_work_end_with_status_2(self) -> None:
        for settings in ('{"pages": 0}', '{"unknown": 1}', '{"tokenizer": "/nonexistent"}'):
            ended = subprocess.run(
                [sys.executable, "-m", "sidecar.worker", "--json", settings],
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )
            assert ended.returncode == 2
            assert "Traceback" not in ended.stderr


class TestEvents:
    @pytest.fixture
    def fresh(self) -> Iterator[RunningWorker]:
        settings = WorkerSettings(
            compute="synthetic", model=MODEL, preset="instant", pages=8, page_tokens=32
        )
        with running_worker(settings) as running:
            yield running

    def test_stored_removed_and_cleared_arrive_and_can_be_replayed(
        self, fresh: RunningWorker
    ) -> None:
        context = zmq.Context()
        subscriber = context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.setsockopt(zmq.RCVTIMEO, 5000)
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVTIMEO, 5000)
        try:
            subscriber.connect(fresh.address.events)
            dealer.connect(fresh.address.replay)
            _wait_until_subscribed(fresh, subscriber)
            first = len(_replay(dealer, 0))

            tokens = [1 + index % 200 for index in range(100)]
            _complete(fresh, tokens)
            stored = _events(subscriber)[0]
            assert stored["type"] == "BlockStored"
            assert len(stored["block_hashes"]) == 3
            assert (stored["token_ids"], stored["parent_block_hash"]) == (tokens[:96], None)
            assert (stored["block_size"], stored["medium"]) == (32, "GPU")

            assert _cached_tokens(_complete(fresh, tokens)) == 96  # announces nothing
            assert _cached_tokens(_complete(fresh, tokens[:96])) == 64
            again = _events(subscriber)[0]
            assert again["block_hashes"] == stored["block_hashes"][2:]
            assert again["parent_block_hash"] == stored["block_hashes"][1]

            _complete(fresh, [7] * 250, cache_salt="tenant")
            removed, salted = _events(subscriber)
            assert removed["type"] == "BlockRemoved"
            hashes = stored["block_hashes"]
            assert [each for each in removed["block_hashes"] if each in hashes[:2]] == hashes[1::-1]
            assert salted["extra_keys"] == [["tenant"], *[None] * 6]

            assert post_json(fresh, "/reset_prefix_cache", {}) == (200, {"success": True})
            assert _events(subscriber) == [{"type": "AllBlocksCleared"}]

            replayed = _replay(dealer, first)
            assert [sequence for sequence, _ in replayed] == list(range(first, first + 4))
            kinds = [[event["type"] for event in events] for _, events in replayed]
            stores = [["BlockStored"], ["BlockStored"], ["BlockRemoved", "BlockStored"]]
            assert kinds == [*stores, ["AllBlocksCleared"]]
            assert _replay(dealer, first + 100) == []
        finally:
            context.destroy(linger=0)


def _wait_until_subscribed(worker: RunningWorker, subscriber: zmq.Socket[bytes]) -> None:
    """Clear the cache until the new subscription hears of it, then drop the echoes."""
    for _ in range(200):
        post_json(worker, "/reset_prefix_cache", {})
        if subscriber.poll(20):
            break
    while subscriber.poll(50):
        subscriber.recv_multipart()


def _events(subscriber: zmq.Socket[bytes]) -> list[Any]:
    topic, sequence, payload = subscriber.recv_multipart()
    assert topic.startswith(b"kv@127.0.0.1:")
    assert len(sequence) == 8
    _, events, rank = msgspec.msgpack.decode(payload)
    assert rank == 0
    return list(events)


def _replay(dealer: zmq.Socket[bytes], start: int) -> list[tuple[int, list[Any]]]:
    dealer.send_multipart([b"", start.to_bytes(8, "big")])
    batches: list[tuple[int, list[Any]]] = []
    while True:
        delimiter, _, sequence, payload = dealer.recv_multipart()
        assert delimiter == b""
        number = int.from_bytes(sequence, "big")
        if number == END:
            assert payload == b""
            return batches
        batches.append((number, msgspec.msgpack.decode(payload)[1]))
