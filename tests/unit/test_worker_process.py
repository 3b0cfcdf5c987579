"""How a worker's process ends when something goes wrong."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING

import pytest

import sidecar.worker
from sidecar.setting import WorkerAddress, WorkerSettings
from sidecar.worker import WorkerStartError, run_worker_process

if TYPE_CHECKING:
    from collections.abc import Callable

ADDRESS = WorkerAddress("http://127.0.0.1:1", "tcp://127.0.0.1:2", "tcp://127.0.0.1:3")
TOLD = "too many open files"


@pytest.mark.parametrize(("is_ready", "raised"), [(False, WorkerStartError), (True, OSError)])
async def test_only_what_goes_wrong_before_it_is_ready_is_blamed_on_the_start(
    monkeypatch: pytest.MonkeyPatch, *, is_ready: bool, raised: type[Exception]
) -> None:
    async def fail(_: WorkerSettings, ready: Callable[[WorkerAddress], None]) -> None:
        if is_ready:
            ready(ADDRESS)
        raise OSError(TOLD)

    monkeypatch.setattr(sidecar.worker, "serve_worker", fail)
    with pytest.raises(raised, match=TOLD) as caught:
        await run_worker_process(WorkerSettings())
    assert caught.type is raised


async def test_a_port_that_is_taken_is_named_with_the_flag_for_another_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WorkerStartError) as caught:
            await run_worker_process(WorkerSettings(compute="synthetic", port=port))
    why = os.strerror(errno.EADDRINUSE)
    told = f"port: cannot listen on 127.0.0.1:{port}: {why}; choose another one with --port"
    assert str(caught.value) == told
