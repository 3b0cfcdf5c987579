"""What ``warmroute serve`` loads before it serves: a start is as quick as what it does not load."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

TOKENIZING = ("tokenizers", "tiktoken", "jinja2")
ATTENDING = ("aiohttp", "zmq", "sidecar", "warmroute.attend")
NEVER = ("numpy", "torch", "transformers", "kubernetes", "dns", "rich", "replay", "valkey", "yaml")
SUPERVISING = ("router.supervisor.serve", "router.supervisor.crew")
PROGRAM = """
import sys
from warmroute import cli, serve

async def stop(config, ready, beside=None, seat=None):
    print("\\n".join(sorted(sys.modules)))

serve.serve = stop
sys.exit(cli.main(["serve", *sys.argv[1:]]))
"""
"""Everything up to where the router is built; the module of the router itself is loaded by then."""


def loaded(*flags: str) -> set[str]:
    """Return the modules that are there when the router is about to be built."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *flags], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def found(modules: set[str], names: Sequence[str]) -> Iterator[str]:
    """Yield which of ``names`` are there."""
    return (name for name in names if name in modules)


@pytest.mark.parametrize(
    "flags",
    [
        ("--replica", "http://127.0.0.1:8000"),
        ("--redis", "redis://127.0.0.1:6379", "--replica", "http://127.0.0.1:8000"),
        (),
    ],
)
def test_a_start_without_tokenizers_loads_none_of_what_others_need(flags: tuple[str, ...]) -> None:
    """Also with replicas to attend: the sidecar's libraries come when requests are served."""
    modules = loaded(*flags)
    assert "router.process" in modules
    assert list(found(modules, (*TOKENIZING, *ATTENDING, *NEVER, *SUPERVISING))) == []


def test_tokenizers_are_loaded_with_the_first_model() -> None:
    """So that the list above is of names that would be seen."""
    program = (
        "import sys; from pathlib import Path; from prompt.codec import load_codec\n"
        "try: load_codec(Path('/nowhere'))\n"
        "except Exception: pass\n"
        "print('\\n'.join(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert list(found(set(done.stdout.split()), TOKENIZING)) == list(TOKENIZING)


def test_yaml_is_loaded_with_the_first_file(tmp_path: Path) -> None:
    """So that the list above is of a name that would be seen."""
    path = tmp_path / "router.yaml"
    path.write_text("receipts: true")
    assert list(found(loaded("--config", str(path)), ["yaml"])) == ["yaml"]


def test_what_a_command_loads_is_no_work_for_the_garbage_collector() -> None:
    """Neither while it is loaded nor later; what comes after it is looked at as ever."""
    program = (
        "import gc; from warmroute import cli\n"
        "counts = lambda: [one['collections'] for one in gc.get_stats()]\n"
        "before = counts(); cli.load('warmroute.serve')\n"
        "print(before == counts(), gc.get_freeze_count() > 50_000, gc.isenabled())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "True", "True"]
