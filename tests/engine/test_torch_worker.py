"""A worker process that computes with torch; ``make test-engine``."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.setting import WorkerSettings
from support.torch_python import NoTorchError, engine_python
from support.worker import post_json, running_worker

if TYPE_CHECKING:
    from pathlib import Path

    from support.worker import RunningWorker

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

PAGE_TOKENS = 16
PROMPTS = [f"{number} " + "the same words again " * 60 for number in range(4)]


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return engine_python()
    except NoTorchError as error:
        message = str(error)
    pytest.fail(message, pytrace=False)


def _settings(**fields: Any) -> WorkerSettings:
    return WorkerSettings(compute="torch", model="m", max_num_batched_tokens=256, **fields)


def _answer(worker: RunningWorker, prompt: str) -> tuple[str, int]:
    """Return greedy text and how many prompt tokens were not computed."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    status, answer = post_json(worker, "/v1/completions", body)
    assert status == 200, answer
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], cached


def test_pages_that_went_to_host_and_disk_give_the_same_tokens(
    python: Path, tmp_path: Path
) -> None:
    with running_worker(_settings(pages=1024), python) as worker:
        expected = [_answer(worker, prompt) for prompt in PROMPTS]
    assert [cached for _, cached in expected] == [0] * len(PROMPTS)
    assert len({text for text, _ in expected}) == len(PROMPTS)

    audit = tmp_path / "audit"
    tight = _settings(
        pages=100,
        host_mib=4,
        disk_dir=str(tmp_path / "pages"),
        disk_mib=64,
        fetch="always",
        audit=str(audit),
    )
    with running_worker(tight, python) as worker:
        for _ in range(3):
            answers = [_answer(worker, prompt) for prompt in PROMPTS]
            assert [text for text, _ in answers] == [text for text, _ in expected]
        whole = (len(PROMPTS[0]) - 1) // PAGE_TOKENS * PAGE_TOKENS
        assert [cached for _, cached in answers] == [whole] * len(PROMPTS)
    command = [sys.executable, "-m", "warmroute", "kv", "audit", "--final", str(audit)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
