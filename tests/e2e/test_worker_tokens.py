"""The bundled worker with real arithmetic: sampling, log probabilities, limits, pins."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import openai
import pytest

from sidecar.setting import WorkerSettings
from support.worker import (
    RunningWorker,
    get_text,
    metrics_of,
    post_json,
    running_worker,
    send_chat,
    wait_for_metric,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL: Final = "tiny"
PAGE_TOKENS: Final = 16


@pytest.fixture(scope="module")
def worker() -> Iterator[RunningWorker]:
    settings = WorkerSettings(model=MODEL, pages=256, page_tokens=PAGE_TOKENS, threads=1)
    with running_worker(settings) as running:
        yield running


def _complete(worker: RunningWorker, prompt: Any = "One", **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "return_token_ids": True} | fields
    status, answer = post_json(worker, "/v1/completions", body)
    assert status == 200, answer
    assert isinstance(answer, dict)
    return answer


def _ids(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def _client(worker: RunningWorker) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{worker.url}/v1", api_key="unused", max_retries=0, timeout=20)


class TestSampling:
    def test_greedy_says_the_same_cold_warm_and_beside_others(self, worker: RunningWorker) -> None:
        prompt = "What is the same is said the same. " * 3
        cold = _ids(_complete(worker, prompt, temperature=0))
        warm = _complete(worker, prompt, temperature=0)
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        with ThreadPoolExecutor(4) as threads:
            beside = list(threads.map(lambda _: _complete(worker, prompt, temperature=0), range(4)))
        assert [_ids(warm), *map(_ids, beside)] == [cold] * 5

    def test_a_seed_repeats_a_draw_and_samples_differ(self, worker: RunningWorker) -> None:
        fields = {"temperature": 1, "seed": 5, "n": 3}
        first, second = (_ids(_complete(worker, **fields)) for _ in range(2))
        assert first == second
        assert len({tuple(ids) for ids in first}) == 3
        assert _ids(_complete(worker, temperature=1, seed=6, n=3)) != first

    def test_without_a_seed_calls_differ(self, worker: RunningWorker) -> None:
        drawn = {tuple(_ids(_complete(worker))[0]) for _ in range(4)}
        assert len(drawn) > 1

    def test_the_best_token_is_the_only_one_of_one(self, worker: RunningWorker) -> None:
        greedy = _ids(_complete(worker, temperature=0))
        assert _ids(_complete(worker, top_k=1, seed=1)) == greedy
        assert _ids(_complete(worker, top_p=1e-9, seed=2)) == greedy

    def test_a_stop_token_ends_an_answer_and_names_itself(self, worker: RunningWorker) -> None:
        [ids] = _ids(_complete(worker, temperature=0, ignore_eos=True))
        stop = ids[3]
        first = ids.index(stop)
        answer = _complete(worker, temperature=0, ignore_eos=True, stop_token_ids=[stop])
        choice = answer["choices"][0]
        assert choice["token_ids"] == ids[: first + 1]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert answer["usage"]["completion_tokens"] == first + 1
        _, text = post_json(worker, "/detokenize", {"tokens": ids[:first]})
        assert choice["text"] == text["prompt"]

    def test_the_text_of_a_stream_is_that_of_its_tokens(self, worker: RunningWorker) -> None:
        fields = {"temperature": 1, "seed": 11, "max_tokens": 200, "ignore_eos": True}
        whole = _complete(worker, **fields)["choices"][0]
        _, told = post_json(worker, "/detokenize", {"tokens": whole["token_ids"]})
        assert whole["text"] == told["prompt"]
        stream: Any = _client(worker).completions.create(
            model=MODEL,
            prompt="One",
            stream=True,
            temperature=1,
            seed=11,
            max_tokens=200,
            extra_body={"ignore_eos": True},
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == whole["text"]


class TestLogprobs:
    def test_the_sdk_gets_every_token_with_the_best_first(self, worker: RunningWorker) -> None:
        chat: Any = _client(worker).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=8,
            temperature=0,
            logprobs=True,
            top_logprobs=5,
        )
        content = chat.choices[0].logprobs.content
        assert len(content) == chat.usage.completion_tokens
        for token in content:
            tops = [top.logprob for top in token.top_logprobs]
            assert len(tops) == 5
            assert tops == sorted(tops, reverse=True)
            assert token.logprob <= tops[0] < 0

    def test_a_stream_tells_the_same(self, worker: RunningWorker) -> None:
        fields: dict[str, Any] = {"model": MODEL, "prompt": "One", "max_tokens": 8, "seed": 3}
        client: Any = _client(worker).completions
        whole = client.create(**fields, logprobs=2).choices[0].logprobs
        parts = [part.choices[0] for part in client.create(**fields, logprobs=2, stream=True)]
        told = [part.logprobs for part in parts]
        assert [token for each in told for token in each.tokens] == whole.tokens
        assert [value for each in told for value in each.token_logprobs] == whole.token_logprobs
        assert [offset for each in told for offset in each.text_offset] == whole.text_offset
        assert [tops for each in told for tops in each.top_logprobs] == whole.top_logprobs

    def test_asking_does_not_change_what_is_said(self, worker: RunningWorker) -> None:
        plain = _ids(_complete(worker, seed=4))
        assert _ids(_complete(worker, seed=4, logprobs=20)) == plain


class TestPages:
    def test_the_report_and_the_metrics_add_up(self, worker: RunningWorker) -> None:
        _complete(worker, "a page or two of prompt " * 4)
        report = json.loads(get_text(worker, "/debug/kv"))
        device = report["tiers"][0]
        assert device["tier"] == "device"
        assert sum(device["states"].values()) == device["total_pages"] == 256
        assert device["states"]["evictable"] > 0
        rows = [
            line.rsplit(" ", 1)
            for line in get_text(worker, "/metrics").splitlines()
            if line.startswith('warmroute_kv_pages{tier="device"')
        ]
        assert sum(float(value) for _, value in rows) == 256

    def test_a_pinned_prefix_outlives_what_evicts_others(self) -> None:
        settings = WorkerSettings(model=MODEL, pages=16, page_tokens=PAGE_TOKENS, threads=1)
        prompt = list(range(1, 65))
        with running_worker(settings) as worker:
            _complete(worker, prompt, max_tokens=1)
            status, pinned = post_json(worker, "/kv/pin", {"prompt": prompt, "ttl_s": 600})
            assert (status, pinned) == (200, {"pages": 4, "tokens": 64})
            for first in range(70, 150, 10):
                _complete(worker, [first] * 128, max_tokens=1)
            usage = _complete(worker, [*prompt, 1], max_tokens=1)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 64
            assert post_json(worker, "/kv/unpin", {"prompt": prompt})[1]["pages"] == 4
            for first in range(70, 150, 10):
                _complete(worker, [first] * 128, max_tokens=1)
            usage = _complete(worker, [*prompt, 1], max_tokens=1)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0

    def test_advice_that_leads_nowhere_changes_nothing(self, worker: RunningWorker) -> None:
        headers = {"X-Warmroute-Kv-Source": "no address"}
        client = _client(worker)
        answer = client.completions.create(
            model=MODEL, prompt="x", max_tokens=2, extra_headers=headers
        )
        assert answer.choices[0].finish_reason in ("length", "stop")
        assert metrics_of(worker)["warmroute_kv_refused_sources_total"] >= 1


class TestLimits:
    def test_what_takes_too_long_is_told_so_and_leaves_no_pages(self) -> None:
        settings = WorkerSettings(
            compute="synthetic", model=MODEL, speed_up=0.05, pages=64, request_timeout_s=0.5
        )
        with running_worker(settings) as worker:
            body = {"model": MODEL, "prompt": "x", "max_tokens": 500}
            status, answer = post_json(worker, "/v1/completions", body)
            assert (status, answer["error"]["code"]) == (504, 504)
            with closing(send_chat(worker, {"stream": True, "max_tokens": 500})) as connection:
                raw = b""
                while b'"code":504' not in raw:
                    data = connection.recv(65536)
                    assert data, raw
                    raw += data
            assert b"[DONE]" not in raw
            wait_for_metric(worker, "kv_cache_usage_perc", 0, 60)
