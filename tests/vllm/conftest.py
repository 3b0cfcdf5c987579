"""Two engines for all tests here, once vLLM's and once the bundled worker's, on one model.

``make test-vllm WARMROUTE_VLLM=/path/to/vllm``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from support.vllm import VARIABLE, NoEngineError, vllm_command, vllm_executable, write_model
from support.vllm_bench import BACKENDS
from support.vllm_stand import PAGES, open_stand
from support.worker_engine import is_served, worker_command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from support.vllm_stand import Stand


@pytest.fixture(scope="session")
def vllm() -> Path:
    try:
        return vllm_executable(os.environ.get(VARIABLE))
    except NoEngineError as error:
        message = str(error)
    pytest.fail(message, pytrace=False)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, vllm: Path) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", vllm)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["vllm", "worker"])
async def stand(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    vllm: Path,
    model: Path,
) -> AsyncIterator[Stand]:
    if request.param == "vllm":
        command = vllm_command(vllm, model, PAGES)
    else:
        command = worker_command(model, PAGES)
    async with open_stand(tmp_path_factory.mktemp("stand"), command, model) as stand:
        yield stand


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the APIs that the worker does not serve; ``test_worker_surface`` is about these."""
    left_out = [item for item in items if is_about_nothing(item)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def is_about_nothing(item: pytest.Item) -> bool:
    """Return whether a test would ask the worker for an API that it does not serve."""
    callspec = getattr(item, "callspec", None)
    if callspec is None or callspec.params.get("stand") != "worker":
        return False
    api, backend = callspec.params.get("api"), callspec.params.get("backend")
    paths = [api.path] if api is not None else [BACKENDS[backend]] if backend is not None else []
    return not all(map(is_served, paths))
