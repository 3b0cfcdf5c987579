"""The commands that the README and the examples show, run as a person runs them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.fleet import STOP_GRACE_S
from warmroute.local import Processes

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
FREE = ("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
MODEL = "warmroute-synthetic"


async def run_to_end(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
    )


async def test_two_plain_engines_need_nothing_but_their_addresses(tmp_path: Path) -> None:
    """No sidecar, no Redis: the second turn of the openai example finds the first one's cache."""
    async with Processes(tmp_path, stop_grace_s=STOP_GRACE_S) as processes:
        workers = [
            processes.start(
                f"worker-{n}", "worker", "--compute", "synthetic", "--preset", "instant"
            )
            for n in range(2)
        ]
        urls = [(await worker.ready()).words[0] for worker in workers]
        replicas = [word for url in urls for word in ("--replica", url)]
        router = await processes.start("router", "serve", *FREE, "--receipts", *replicas).ready()
        url, admin = router.words[0], router.words[2]
        question = "Why is the sky blue? " * 100
        example = ["examples/openai_client.py", f"{url}/v1", MODEL, question]
        await wait_until_ready(url)
        first = await run_to_end(example)
        second = await run_to_end(example)
        explained = await run_to_end(
            ["-m", "warmroute", "explain", "--last", "2", "--admin", admin]
        )
    assert first.returncode == 0, first.stderr
    assert "prompt tokens, 0 of them cached" in first.stdout
    assert "x-warmroute-reason: load" in first.stdout
    assert "x-warmroute-reason: prefix" in second.stdout, second.stdout
    assert "prompt tokens, 0 of them cached" not in second.stdout
    assert explained.returncode == 0, explained.stderr
    assert "by prefix" in explained.stdout
    assert "by load" in explained.stdout


async def wait_until_ready(url: str) -> None:
    """Wait until the router found its replicas: as a load balancer does."""
    probe = "import sys, urllib.request as u; u.urlopen(sys.argv[1] + '/readyz', timeout=2)"
    for _ in range(100):
        if (await run_to_end(["-c", probe, url])).returncode == 0:
            return
        await asyncio.sleep(0.05)
    message = f"{url} did not become ready"
    raise AssertionError(message)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--replica", "ftp://x"], "replicas[0].url: expected http://host:port"),
        (["--model", "m"], "--model: expected NAME=DIR"),
        (["--model", "m=/nonexistent"], "models[0].tokenizer"),
        (["--redis", "http://x"], "state.redis"),
        (["--listen", "nowhere"], "listen: expected host:port"),
        (["--config", "/nonexistent.yaml"], "/nonexistent.yaml: No such file"),
    ],
)
async def test_a_wrong_setting_ends_serve_with_status_2_and_its_name(
    words: list[str], expected: str
) -> None:
    ended = await run_to_end(["-m", "warmroute", "serve", *words])
    assert ended.returncode == 2
    assert expected in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["worker", "--pages", "none"], "--pages"),
        (["worker", "--compute", "x"], "--compute: expected numpy, torch, synthetic, got 'x'"),
        (["worker", "--tokenizer", "/nonexistent"], "/nonexistent"),
        (["sidecar", "--engine", "http://127.0.0.1:1"], "--redis"),
        (["sidecar", "--engine", "http://127.0.0.1:1", "--redis", "http://x"], "redis"),
        (["explain"], "request id or --last"),
        (["explain", "--last", "1", "--admin", "http://127.0.0.1:1"], "no router answers"),
        (["explain", "--last", "0"], "--last: expected 1 to 1000, got 0"),
        (["tenants", "report", "--admin", "127.0.0.1:1"], "no router answers"),
        (["tenants", "report", "--admin", "x://y"], "--admin: expected http://host:port"),
    ],
)
async def test_a_wrong_flag_ends_a_command_with_status_2_and_its_name(
    words: list[str], expected: str
) -> None:
    ended = await run_to_end(["-m", "warmroute", *words])
    assert ended.returncode == 2
    assert expected in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("command", ["serve", "sidecar", "worker", "demo", "explain", "kv"])
async def test_help_shows_examples(command: str) -> None:
    ended = await run_to_end(["-m", "warmroute", command, "--help"])
    assert ended.returncode == 0
    assert "examples:" in ended.stdout
    assert f"warmroute {command}" in ended.stdout
