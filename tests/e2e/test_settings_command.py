"""``warmroute weights``, ``drain`` and ``undrain`` against a real router, and their exit codes."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from support.fleet import FleetPlan, LocalFleet
from support.setting_desk import SettingDesk
from warmroute.cli import main
from warmroute.weights import patch_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

WHY = ("--reason", "a test", "--author", "ann@ops")


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="fleet")
async def small_fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    plan = FleetPlan(replicas=1, config={"policy": {"kind": "weighted"}})
    async with LocalFleet(tmp_path_factory.mktemp("fleet"), plan) as running:
        yield running


class Shell:
    """Runs commands at the fleet's router."""

    def __init__(self, fleet: LocalFleet, capsys: pytest.CaptureFixture[str]) -> None:
        self._admin, self._capsys = fleet.router.admin_url, capsys

    async def run(self, *words: str) -> tuple[int, str, str]:
        """Return exit code, output and complaints."""
        code = await asyncio.to_thread(main, [*words, "--admin", self._admin])
        said = self._capsys.readouterr()
        return code, said.out, said.err

    async def json(self, *words: str) -> Any:
        """Return what a command prints as JSON; it succeeds."""
        code, out, err = await self.run(*words, "--json")
        assert code == 0, err
        return json.loads(out)


@pytest.fixture
def shell(fleet: LocalFleet, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(fleet, capsys)


async def test_a_weight_is_tried_set_shown_compared_and_rolled_back(shell: Shell) -> None:
    change = ("weights", "set", "policy.w_queue=0.8", "hold.release_ms=200", *WHY)
    code, out, _ = await shell.run(*change, "--dry-run")
    assert code == 0
    assert "policy.w_queue: 1.0 -> 0.8" in out
    assert "nothing was changed: version 0 stays in force" in out

    code, out, _ = await shell.run(*change)
    assert (code, out.splitlines()[-1]) == (0, "version 1 is in force, after 0")
    code, out, _ = await shell.run("weights", "get", "policy.w_queue", "hold")
    assert code == 0
    assert "by ann@ops: a test" in out
    assert "policy.w_queue = 0.8  (document)" in out
    assert "hold.ageing = 0.1  (file)" in out
    view = await shell.json("weights", "get")
    assert (view["version"], view["values"]["policy"]["w_queue"]) == (1, 0.8)

    told = await shell.json("weights", "set", "policy.w_queue=null", *WHY)
    assert told["changes"] == [{"key": "policy.w_queue", "before": 0.8, "after": 1.0}]
    _, out, _ = await shell.run("weights", "diff", "1")
    assert "policy.w_queue: 0.8 -> -" in out
    _, out, _ = await shell.run("weights", "diff", "1", "1")
    assert out == "no difference\n"
    code, out, _ = await shell.run("weights", "rollback", "1", *WHY)
    assert (code, out.splitlines()[-1]) == (0, "version 3 is in force, after 2")
    rows = await shell.json("weights", "history")
    assert [row["version"] for row in rows] == [3, 2, 1]
    _, out, _ = await shell.run("weights", "history", "--limit", "1")
    assert out.startswith("3  ")
    assert "    policy.w_queue: 1.0 -> 0.8" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("set", "policy.w_queue=-1"), 2, "policy.w_queue: Expected `float` >= 0"),
        (("set", "policy.w_magic=1"), 2, "w_magic"),
        (("set", "policy.w_queue"), 2, "expected KEY=VALUE"),
        (("set", "admission.learned=true"), 2, "admission.learned: expected in the configuration"),
        (("set", "hold.ageing=1", "--expected-version", "99"), 1, "expected_version"),
        (("rollback", "99"), 2, "version: not among the versions kept"),
    ],
)
async def test_a_change_that_is_not_made_says_why_and_tells_it_by_its_exit_code(
    shell: Shell, words: tuple[str, ...], code: int, said: str
) -> None:
    before = await shell.json("weights", "get")

    found, out, err = await shell.run("weights", *words, *WHY)

    assert (found, out) == (code, "")
    assert said in err
    assert await shell.json("weights", "get") == before


async def test_a_key_that_is_not_there_and_a_router_that_is_not_there_are_wrong_usage(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = await shell.run("weights", "get", "policy.nothing")
    assert (code, "policy.nothing" in err) == (2, True)
    nobody = ("--admin", "http://127.0.0.1:9")
    words = ["weights", "rollback", "0", *WHY, *nobody]
    assert await asyncio.to_thread(main, words) == 2
    assert "no router answers at http://127.0.0.1:9" in capsys.readouterr().err


async def test_a_replica_is_drained_and_undrained_by_name(fleet: LocalFleet, shell: Shell) -> None:
    code, out, _ = await shell.run("drain", "w0", *WHY)
    assert (code, 'drains: [] -> ["w0"]' in out) == (0, True)
    assert (await fleet.seen())["w0"]["draining"]
    code, out, _ = await shell.run("drain", "w0", *WHY)
    assert (code, "nothing to change" in out) == (0, True)

    told = await shell.json("undrain", "w0", *WHY)
    assert told["changes"] == [{"key": "drains", "before": ["w0"], "after": []}]
    assert not (await fleet.seen())["w0"]["draining"]
    code, _, err = await shell.run("drain", "nobody", *WHY)
    assert (code, "replica: expected one of w0" in err) == (2, True)


async def test_who_changes_something_is_told_without_being_asked(
    fleet: LocalFleet, shell: Shell
) -> None:
    await shell.json("weights", "set", "hold.ageing=0.3", "--reason", "r")

    author = (await SettingDesk(fleet, fleet.router).get())["author"]
    assert "@" in author


async def test_words_become_a_patch_of_json_values_and_of_text() -> None:
    words = ["policy.kind=weighted", "policy.w_queue=1", "hold.enabled=true", 'drains=["a"]']
    assert patch_of([*words, "health=null"]) == {
        "policy": {"kind": "weighted", "w_queue": 1},
        "hold": {"enabled": True},
        "drains": ["a"],
        "health": None,
    }
