"""``warmroute replay`` on a router's log of decisions: decided again, or taken as a trace."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from policies.weighted import Weighted
from support.logged import Logging, open_log, record_of, rewrite
from warmroute.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(name="log")
def decision_log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    asyncio.run(Logging(Weighted()).write(path, 30))
    return path


def test_the_logged_policy_comes_out_again(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--decisions", str(log)]) == 0
    assert "came out again bit for bit" in capsys.readouterr().out


def test_what_comes_out_otherwise_fails(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(record: Any) -> None:
        record["decision"]["reason"] = "rule"

    rewrite(log, 5, change)
    assert main(["replay", "--decisions", str(log), "--json", "-"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["is_exact"] is False
    assert told["first_difference"]["field"] == "reason"


def test_another_policy_is_compared(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "told.json"
    words = ["replay", "--decisions", str(log), "--policy", "round_robin", "--json", str(written)]
    assert main(words) == 0
    assert "against" in capsys.readouterr().out
    assert json.loads(written.read_text())["policy"]["kind"] == "round_robin"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "random", "--policy", "weighted"], "--policy: one at most with --decisions"),
        (["--target", "http://127.0.0.1:1"], "--target: not with --decisions"),
        (["--html", "x"], "--html: not with --decisions"),
        (["--seed", "0"], "--seed: not with --decisions"),
        (["--jitter", "3"], "--jitter: not with --decisions"),
    ],
)
def test_what_has_no_meaning_for_decisions_is_refused(
    log: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "--decisions", str(log), *words]) == 2
    assert capsys.readouterr().err.startswith(f"warmroute replay: {said}")


def test_a_log_with_chains_is_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"

    async def write() -> None:
        log, logging = open_log(path, chains=True), Logging()
        for length in (100, 200, 300):
            choices, routed = logging.decide(range(length))
            log.add(record_of(choices, routed), choices, routed)
        await log.close()

    asyncio.run(write())
    for words in ([], ["--format", "decisions"]):
        assert main(["replay", str(path), "--policy", "round_robin", "--json", "-", *words]) == 0
        score = json.loads(capsys.readouterr().out)["runs"][0]["score"]
        assert (score["requests"], score["prompt_tokens"]) == (3, 600)


def test_a_log_without_chains_is_none(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log)]) == 2
    assert "log with decisions.chains: true" in capsys.readouterr().err
