"""What README.md, CHANGELOG.md and docs/ name is there: links, commands, targets, files, keys."""

from __future__ import annotations

import argparse
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import msgspec
import pytest
import yaml

from router.config import Config
from support import doc_page
from support.doc_page import Command
from warmroute.cli import COMMANDS, build_parser

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path(__file__).resolve().parents[2]
_PAGES = {
    str(path.relative_to(_ROOT)): path.read_text(encoding="utf-8")
    for path in [*_ROOT.glob("*.md"), *_ROOT.glob("docs/**/*.md")]
}
_DIGEST = "a" * 64

every_page = pytest.mark.parametrize("name", sorted(_PAGES))


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _options(inner)


@cache
def flags_of(command: str) -> frozenset[str]:
    """Return every flag of a command, those of what is below it too."""
    parser = build_parser(command)
    below = next(one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return frozenset(_options(below.choices[command]))


@every_page
def test_a_link_leads_somewhere(name: str) -> None:
    """Relative links name files, and anchors headings."""
    for link in doc_page.links(doc_page.split(_PAGES[name])[1]):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = unquote(link).partition("#")
        path = (_ROOT / name).parent / target if target else _ROOT / name
        assert path.exists(), link
        assert path.resolve().is_relative_to(_ROOT), link
        if anchor:
            assert anchor in doc_page.anchors(path.read_text(encoding="utf-8")), link


@every_page
def test_a_command_is_one_of_the_command_line_with_its_flags(name: str) -> None:
    for command in doc_page.commands(_PAGES[name]):
        assert command.name in COMMANDS, command
        assert set(command.flags) <= flags_of(command.name), command


@every_page
def test_a_target_of_make_is_in_the_makefile(name: str) -> None:
    makefile = (_ROOT / "Makefile").read_text(encoding="utf-8")
    known = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(doc_page.targets(_PAGES[name])) <= known


@every_page
def test_a_file_that_is_named_is_there(name: str) -> None:
    for path in doc_page.paths(_PAGES[name]):
        assert any(_ROOT.glob(path.rstrip("/"))), path


@every_page
def test_settings_that_are_shown_are_settings(name: str) -> None:
    for block in doc_page.settings(_PAGES[name]):
        raw = yaml.safe_load(block.text.replace("[...]", f"[{_DIGEST}]"))
        try:
            msgspec.convert(raw, Config, strict=True)
        except msgspec.ValidationError as error:
            pytest.fail(f"{name}:{block.line}: {error}")


@every_page
def test_an_environment_variable_that_is_named_is_read(name: str) -> None:
    known = _variables()
    assert set(re.findall(r"\bWARMROUTE_[A-Z0-9_]+\b", _PAGES[name])) <= known


@cache
def _variables() -> frozenset[str]:
    folders = ("bench", "router", "sidecar", "state", "tests", "warmroute")
    files = [path for folder in folders for path in (_ROOT / folder).rglob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in [*files, _ROOT / "Makefile"])
    return frozenset(re.findall(r"\bWARMROUTE_[A-Z0-9_]+\b", text))


def test_a_page_is_read_as_a_reader_would() -> None:
    text = (
        "# A `b` (c)\n\n# A `b` (c)\n\nSee [x](y.md#z), ![p](q.png) and `[no](link)`.\n\n"
        "    $ warmroute serve --listen=1:2 \\\n      --seed 3 | grep --nothing\n"
        "    warmroute serve: a line that is printed\n    text (warmroute sidecar) --text\n\n"
        "```sh\nA=b warmroute kv size . --context 3  # --text\nmake test\n```\n\n"
        "`make docs ARGS=1`, `warmroute top --once`, `router/no.py`, `router/*.py x`\n\n"
        "```yaml\nseed: 1\n```\n"
    )
    assert doc_page.anchors(text) == {"a-b-c", "a-b-c-1"}
    assert doc_page.links(doc_page.split(text)[1]) == ["y.md#z", "q.png"]
    assert doc_page.commands(text) == [
        Command("serve", ("--listen", "--seed")),
        Command("sidecar", ()),
        Command("kv", ("--context",)),
        Command("top", ("--once",)),
    ]
    assert doc_page.targets(text) == ["test", "docs"]
    assert doc_page.paths(text) == ["router/no.py"]
    assert [block.text for block in doc_page.settings(text)] == ["seed: 1"]
