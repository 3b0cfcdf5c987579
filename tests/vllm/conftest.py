"""Two real engines for all tests here; ``make test-vllm WARMROUTE_VLLM=/path/to/vllm``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from support.vllm import VARIABLE, NoEngineError, vllm_executable, write_model
from support.vllm_stand import open_stand

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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stand(
    tmp_path_factory: pytest.TempPathFactory, vllm: Path, model: Path
) -> AsyncIterator[Stand]:
    async with open_stand(tmp_path_factory.mktemp("stand"), vllm, model) as stand:
        yield stand
