"""The bundled worker as a real process: clients that leave, and the end of the worker."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

import pytest

from sidecar.setting import WorkerSettings
from support.worker import RunningWorker, metrics_of, running_worker, send_chat, wait_for_metric

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

MODEL: Final = "tiny"
GONE_WITHIN_S: Final = 4.0
"""Less than a step of ``SLOW`` takes."""
SLOW: Final = 0.001


@pytest.fixture(scope="module")
def slow_worker() -> Iterator[RunningWorker]:
    """Run steps of about 6 s: whoever leaves does so in the middle of one."""
    settings = WorkerSettings(
        compute="synthetic",
        model=MODEL,
        preset="llama-8b-h100",
        speed_up=SLOW,
        pages=512,
        shutdown_grace_s=0,
    )
    with running_worker(settings) as running:
        yield running


class TestImpatience:
    @pytest.mark.parametrize("is_stream", [True, False])
    def test_a_client_that_leaves_before_the_first_token_frees_its_pages(
        self, slow_worker: RunningWorker, *, is_stream: bool
    ) -> None:
        """A29, A30, C10: stream and non-stream, in the middle of a step."""
        connection = send_chat(slow_worker, {"stream": is_stream, "max_tokens": 100})
        wait_for_metric(slow_worker, "num_requests_running", 1, 60)
        connection.close()
        assert wait_for_metric(slow_worker, "kv_cache_usage_perc", 0, 60) < GONE_WITHIN_S
        assert metrics_of(slow_worker)["num_requests_running"] == 0

    def test_a_client_that_leaves_between_two_slow_tokens_frees_its_pages(
        self, slow_worker: RunningWorker
    ) -> None:
        """A31: not at the next token, which is 6 s away."""
        connection = send_chat(slow_worker, {"stream": True, "max_tokens": 100})
        raw = b""
        while raw.count(b"data: ") < 2:
            raw += connection.recv(65536)
        connection.close()
        assert wait_for_metric(slow_worker, "kv_cache_usage_perc", 0, 60) < GONE_WITHIN_S

    def test_a_waiting_request_is_gone_with_its_client(self) -> None:
        settings = WorkerSettings(
            compute="synthetic",
            model=MODEL,
            speed_up=SLOW,
            pages=512,
            max_num_seqs=1,
            shutdown_grace_s=0,
        )
        with (
            running_worker(settings) as worker,
            closing(send_chat(worker, {"max_tokens": 100})),
        ):
            wait_for_metric(worker, "num_requests_running", 1, 60)
            waiting = send_chat(worker, {"max_tokens": 100})
            wait_for_metric(worker, "num_requests_waiting", 1, 60)
            waiting.close()
            assert wait_for_metric(worker, "num_requests_waiting", 0, 60) < GONE_WITHIN_S

    def test_400_aborts_in_mid_stream_leave_nothing(self) -> None:
        """A18: the running requests return to 0."""
        settings = WorkerSettings(
            compute="synthetic", model=MODEL, speed_up=4.0, pages=4096, max_num_seqs=64
        )
        with running_worker(settings) as worker:
            for _ in range(8):
                connections = [
                    send_chat(worker, {"stream": True, "max_tokens": 10_000}) for _ in range(50)
                ]
                for connection in connections:
                    connection.recv(1000)
                    connection.close()
            wait_for_metric(worker, "num_requests_running", 0, 60)
            metrics = metrics_of(worker)
        assert (metrics["kv_cache_usage_perc"], metrics["num_requests_waiting"]) == (0, 0)


class TestShutdown:
    def test_open_requests_finish_within_the_grace_period(self) -> None:
        settings = WorkerSettings(
            compute="synthetic", model=MODEL, speed_up=1.0, shutdown_grace_s=10
        )
        with (
            running_worker(settings) as worker,
            closing(send_chat(worker, {"stream": True, "max_tokens": 60})) as connection,
        ):
            raw = connection.recv(1000)
            worker.process.terminate()
            raw += _rest(connection)
            assert worker.process.wait(60) == 0
        assert b"data: [DONE]" in raw
        assert raw.count(b"finish_reason") == 61

    def test_what_does_not_finish_ends_with_an_error_event(self) -> None:
        settings = WorkerSettings(
            compute="synthetic", model=MODEL, speed_up=0.01, shutdown_grace_s=0.1
        )
        with (
            running_worker(settings) as worker,
            closing(send_chat(worker, {"stream": True, "max_tokens": 1000})) as connection,
            closing(send_chat(worker, {"max_tokens": 1000})) as unstreamed,
        ):
            wait_for_metric(worker, "num_requests_running", 2, 60)
            worker.process.terminate()
            raw, whole = _rest(connection), _rest(unstreamed)
            assert worker.process.wait(60) == 0
        assert b'data: {"error":{"message":"The engine is shutting down."' in raw
        assert b"[DONE]" not in raw
        assert whole.startswith(b"HTTP/1.1 503 ")


def _rest(connection: socket.socket) -> bytes:
    raw = b""
    while data := connection.recv(65536):
        raw += data
    return raw
