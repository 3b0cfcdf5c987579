"""What the worker serves beside its APIs, as vLLM does, and what it does not."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from sidecar.setting import WorkerSettings
from support.scripted_engine import ScriptedEngine, scripted_worker, spoken
from support.worker import get_text, running_worker, send_chat
from support.worker_engine import NOT_SERVED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.worker import RunningWorker

MODEL: Final = "tiny"


@pytest.fixture(scope="module")
def worker() -> Iterator[RunningWorker]:
    settings = WorkerSettings(compute="synthetic", model=MODEL, speed_up=0.05, pages=64)
    with running_worker(settings) as running:
        yield running


def told(worker: RunningWorker, path: str) -> Any:
    return json.loads(get_text(worker, path))


def test_what_is_not_served_is_not_found(worker: RunningWorker) -> None:
    for route in NOT_SERVED:
        method, path = route.split()
        target = path.format(response_id="resp_1")
        status, error = asked(worker, method, target)
        assert (status, error["error"]["code"]) == (404, 404), route
        assert target in error["error"]["message"]


def asked(worker: RunningWorker, method: str, target: str) -> tuple[int, Any]:
    data = b"{}" if method == "POST" else None
    request = Request(f"{worker.url}{target}", data, method=method)  # noqa: S310 - http
    with pytest.raises(HTTPError) as caught:
        urlopen(request, timeout=10)  # noqa: S310 - http
    with caught.value as answer:
        return answer.code, json.loads(answer.read())


def test_the_load_is_what_runs_and_waits(worker: RunningWorker) -> None:
    assert told(worker, "/load") == {"server_load": 0}
    with closing(send_chat(worker, {"stream": True, "max_tokens": 500, "n": 2})) as connection:
        assert connection.recv(65536)
        assert told(worker, "/load") == {"server_load": 2}


def test_the_settings_are_told_with_the_sizes_in_use(worker: RunningWorker) -> None:
    settings = told(worker, "/server_info")["worker_settings"]
    assert (settings["compute"], settings["model"], settings["pages"]) == ("synthetic", MODEL, 64)
    assert settings["max_model_len"] == 64 * settings["page_tokens"]


def test_it_does_not_sleep(worker: RunningWorker) -> None:
    assert told(worker, "/is_sleeping") == {"is_sleeping": False}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_ping_is_answered_as_a_health_check(worker: RunningWorker, method: str) -> None:
    request = Request(f"{worker.url}/ping", method=method)  # noqa: S310 - http
    with urlopen(request, timeout=10) as answer:  # noqa: S310 - http
        assert (answer.status, answer.read()) == (200, b"")


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_an_engine_that_takes_no_requests_is_not_healthy(path: str) -> None:
    engine = ScriptedEngine(spoken("hi"))
    async with scripted_worker(engine) as client:
        engine.is_halted = True
        async with client.get(path) as answer:
            assert answer.status == 503
