from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--workers", "2", "--sessions", "4", "--turns", "3")
PREFIXES = ("--prefixes", "2", "--prefix-tokens", "1000")
DEADLINE_S = 200.0
POLL_S = 0.05
ROW = re.compile(r"│ (?P<policy>[a-z ]+?) +│ +[\d.]+% │ +[\d.]+% │ +\S+( s)? │ +\S+( s)? │ +\S+ │")


@dataclass(slots=True)
class Demo:
    """A demo in a process group and a temporary directory of its own."""

    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def told(self) -> str:
        """What it wrote to standard error so far."""
        return (self.directory / "stderr").read_text()

    @property
    def printed(self) -> str:
        """What it wrote to standard output so far."""
        return (self.directory / "stdout").read_text()

    def until(self, text: str) -> None:
        """Wait until it has told ``text``."""
        deadline_s = time.monotonic() + DEADLINE_S
        while text not in self.told:
            assert self.process.poll() is None, self.told
            assert time.monotonic() < deadline_s, self.told
            time.sleep(POLL_S)

    def pids(self, words: str) -> list[int]:
        """Return the processes of the group whose command line has ``words``."""
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,pgid=,command="], check=True, capture_output=True, text=True
        )
        rows = (line.split(None, 2) for line in listed.stdout.splitlines())
        return [
            int(pid)
            for pid, group, command in rows
            if int(group) == self.process.pid and words in command
        ]

    def assert_nothing_is_left(self) -> None:
        """No process of the group, no temporary file."""
        with pytest.raises(ProcessLookupError):
            os.killpg(self.process.pid, 0)
        assert list((self.directory / "tmp").iterdir()) == []


@pytest.fixture
def start() -> Iterator[Callable[..., Demo]]:
    """Start demos; none survives the test. Paths are short: Valkey's socket has to fit."""
    demos: list[Demo] = []

    def start_demo(*flags: str) -> Demo:
        directory = Path(tempfile.mkdtemp(prefix="d-"))
        (directory / "tmp").mkdir()
        with (directory / "stdout").open("wb") as out, (directory / "stderr").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "warmroute", "demo", *flags],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(directory / "tmp")},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        demos.append(Demo(process, directory))
        return demos[-1]

    yield start_demo
    for demo in demos:
        with suppress(ProcessLookupError):
            os.killpg(demo.process.pid, signal.SIGKILL)
        demo.process.wait()
        shutil.rmtree(demo.directory)


def test_the_demo_compares_three_policies_and_leaves_nothing_behind(
    start: Callable[..., Demo], tmp_path: Path
) -> None:
    demo = start(*SMALL, "--keep-logs", str(tmp_path))
    assert demo.process.wait(DEADLINE_S) == 0, demo.told
    rows = [found["policy"] for found in ROW.finditer(demo.printed)]
    assert rows == ["round robin", "least loaded", "warmroute", "infinite cache"]
    assert "speed-up" in demo.printed
    assert "candidates, lowest score wins" in demo.printed
    assert "warmroute: 12 of 12" in demo.told
    assert "\x1b" not in demo.told + demo.printed
    demo.assert_nothing_is_left()
    logs = list(tmp_path.glob("*.log"))
    assert len(logs) == 2 + 2 + 3
    assert all("Traceback" not in log.read_text() for log in logs)


def test_the_result_is_available_as_json(start: Callable[..., Demo]) -> None:
    demo = start("--workers", "1", "--sessions", "2", "--turns", "2", "--seed", "5", "--json")
    assert demo.process.wait(DEADLINE_S) == 0, demo.told
    result = json.loads(demo.printed)
    assert result["settings"] == {"workers": 1, "sessions": 2, "turns": 2, "seed": 5}
    assert (result["speed_up"], "warmth" in result) == (1.0, False)
    assert set(result["policies"]) == {"round robin", "least loaded", "warmroute"}
    for score in [*result["policies"].values(), result["ideal"]]:
        assert score["requests"] == 4
        assert score["prompt_tokens"] == result["ideal"]["prompt_tokens"]
        assert 0 < score["token_hit_ratio"] <= result["ideal"]["token_hit_ratio"]
    demo.assert_nothing_is_left()


def test_real_compute_tells_cold_prefixes_from_warm_ones(
    start: Callable[..., Demo], tmp_path: Path
) -> None:
    """The demo refuses unless all policies got equal replies: real tokens, whatever was cached."""
    sizes = ("--workers", "2", "--sessions", "2", "--turns", "2")
    demo = start("--compute", "numpy", *sizes, *PREFIXES, "--json", "--keep-logs", str(tmp_path))
    assert demo.process.wait(DEADLINE_S) == 0, demo.told
    result = json.loads(demo.printed)
    assert result["compute"] == "numpy"
    assert "preset" not in result
    warmth = result["warmth"]
    assert warmth["prefix_tokens"] == 1000
    assert all(1000 <= tokens < 1008 for tokens in warmth["shared_tokens"])
    assert [cold["cached_tokens"] for cold in warmth["cold"]] == [0, 0]
    assert [warm["cached_tokens"] for warm in warmth["warm"]] == [992, 992]
    assert [each["replica"] for each in warmth["cold"]] == [
        each["replica"] for each in warmth["warm"]
    ]
    assert warmth["same_replica"] == 2
    assert warmth["ratio"] == warmth["cold_ttft_p50_s"] / warmth["warm_ttft_p50_s"]
    assert "cold and warm: 4 of 4" in demo.told
    demo.assert_nothing_is_left()
    assert all("Traceback" not in log.read_text() for log in tmp_path.glob("*.log"))


def test_cold_and_warm_can_be_compared_on_the_clock_too(start: Callable[..., Demo]) -> None:
    demo = start("--workers", "1", "--sessions", "1", "--turns", "1", *PREFIXES)
    assert demo.process.wait(DEADLINE_S) == 0, demo.told
    assert "cold and warm: 2 prefixes of 1,000 tokens" in demo.printed
    assert re.search(r"│ cold +│ .* │ +0 │", demo.printed)
    assert re.search(r"│ warm +│ .* │ +992 │", demo.printed)
    assert re.search(r"cold is\s+[\d.]+\s+times\s+warm", demo.printed)


def test_ctrl_c_while_workers_compute_ends_everything(start: Callable[..., Demo]) -> None:
    demo = start("--compute", "numpy", "--workers", "1", "--sessions", "1", "--turns", "1")
    demo.until("cold and warm: 2 of 10")
    os.killpg(demo.process.pid, signal.SIGINT)
    assert demo.process.wait(DEADLINE_S) == 130, demo.told
    assert "Traceback" not in demo.told
    assert demo.printed == ""
    demo.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("flag", "value"), [("--compute", "abacus"), ("--prefixes", "-1"), ("--prefix-tokens", "9")]
)
def test_a_wrong_flag_ends_with_2_and_its_name(
    start: Callable[..., Demo], flag: str, value: str
) -> None:
    demo = start(flag, value)
    assert demo.process.wait(DEADLINE_S) == 2
    assert flag in demo.told
    assert "Traceback" not in demo.told


@pytest.mark.parametrize("moment", ["starting the fleet", "round robin: 3 of 12"])
def test_ctrl_c_ends_everything(start: Callable[..., Demo], moment: str) -> None:
    """A terminal sends the signal to all processes, and people press the keys twice."""
    demo = start(*SMALL)
    demo.until(moment)
    os.killpg(demo.process.pid, signal.SIGINT)
    time.sleep(POLL_S)
    with suppress(ProcessLookupError):
        os.killpg(demo.process.pid, signal.SIGINT)
    assert demo.process.wait(DEADLINE_S) == 130, demo.told
    assert "Traceback" not in demo.told
    assert demo.printed == ""
    demo.assert_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_demo_alone_ends_everything(
    start: Callable[..., Demo], number: signal.Signals
) -> None:
    demo = start(*SMALL)
    demo.until("round robin: 3 of 12")
    demo.process.send_signal(number)
    assert demo.process.wait(DEADLINE_S) == 130, demo.told
    assert "Traceback" not in demo.told
    demo.assert_nothing_is_left()


@pytest.mark.parametrize("words", ["warmroute worker", "warmroute sidecar", "warmroute serve"])
def test_a_process_that_dies_ends_the_demo_with_its_name(
    start: Callable[..., Demo], words: str
) -> None:
    demo = start(*SMALL)
    demo.until("round robin: 3 of 12")
    os.kill(demo.pids(words)[0], signal.SIGKILL)
    assert demo.process.wait(DEADLINE_S) == 1, demo.told
    assert re.search(r"warmroute demo: [\w-]+ ended \(-9\):", demo.told), demo.told
    assert "Traceback" not in demo.told
    demo.assert_nothing_is_left()
