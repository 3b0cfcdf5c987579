"""What a page of documentation names: links, anchors, commands, make targets, files, settings."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_FENCE: Final = re.compile(r"^ *```(\w*) *$")
_INLINE: Final = re.compile(r"(`+)(.+?)\1(?!`)")
_LINK: Final = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^()\s]+)\)")
_HEADING: Final = re.compile(r"^#{1,6} +(.*?) *#*$")
_COMMAND: Final = re.compile(r"(?:^|[\s/$(])(warmroute +[a-z].*)$")
_MAKE: Final = re.compile(r"^(?:\$ )?make +([a-z][a-z-]*)")
_ROOTS: Final = (
    "bench|deploy|docs|examples|policies|prompt|replay|requirements|router|sidecar|state|tests|"
    "warmroute|website"
)
_PATH: Final = re.compile(rf"^(?:{_ROOTS})/[\w./*-]*$")
_END: Final = {"|", "||", "&&", ";", "&", ">", ">>", "2>"}


class Block(NamedTuple):
    """A fenced or indented block, with the number of its first line."""

    language: str
    line: int
    text: str


class Command(NamedTuple):
    """``warmroute NAME --flag ...`` as a page has it, without values of flags."""

    name: str
    flags: tuple[str, ...]


def split(text: str) -> tuple[list[Block], str]:
    """Return the blocks of a page, and the page with empty lines in their place."""
    blocks: list[Block] = []
    prose: list[str] = []
    inside: list[str] | None = None
    language = ""
    start = 0
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if fence and inside is None:
            language, inside, start = fence[1], [], number + 1
        elif fence and inside is not None:
            blocks.append(Block(language, start, "\n".join(inside)))
            inside = None
        elif inside is not None:
            inside.append(line)
        elif line.startswith("    "):
            blocks.append(Block("", number, line[4:]))
        else:
            prose.append(line)
            continue
        prose.append("")
    assert inside is None, "a block has no end"
    return _joined(blocks), "\n".join(prose)


def _joined(blocks: list[Block]) -> list[Block]:
    """Return the blocks with neighbouring indented lines in one."""
    joined: list[Block] = []
    for block in blocks:
        last = joined[-1] if joined else None
        if (
            last is not None
            and not block.language
            and not last.language
            and (last.line + last.text.count("\n") + 1 == block.line)
        ):
            joined[-1] = Block("", last.line, f"{last.text}\n{block.text}")
        else:
            joined.append(block)
    return joined


def inline(prose: str) -> list[str]:
    """Return what is between backticks."""
    return [found[2].strip() for line in prose.splitlines() for found in _INLINE.finditer(line)]


def links(prose: str) -> list[str]:
    """Return the targets of links and pictures."""
    return _LINK.findall(_INLINE.sub(lambda found: "x" if "](" in found[2] else found[0], prose))


def anchors(text: str) -> set[str]:
    """Return what links may name within a page, by the rules of code hosts."""
    found: set[str] = set()
    for line in split(text)[1].splitlines():
        heading = _HEADING.match(line)
        if heading is None:
            continue
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
        slug = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


def _lines(text: str) -> Iterator[str]:
    """Yield every line of shell that a page shows, continued ones in one."""
    blocks, prose = split(text)
    for block in blocks:
        if block.language in {"", "sh", "bash", "console"}:
            yield from block.text.replace("\\\n", " ").splitlines()
    yield from inline(prose)


def commands(text: str) -> list[Command]:
    """Return every call of the command line."""
    found = []
    for line in _lines(text):
        call = _COMMAND.search(line)
        if call is None or re.match(r"warmroute +[a-z-]+:", call[1]):
            continue  # a line that the program prints
        words = _words(call[1])
        last = [at for at, word in enumerate(words) if word in _END or word.endswith(")")]
        end = min(last, default=len(words))
        flags = [word.partition("=")[0] for word in words[2:end] if word.startswith("-")]
        name = words[1].rstrip("),.;")
        found.append(Command(name, tuple(flag for flag in flags if len(flag) > 1)))
    return found


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.partition("#")[0].split()


def targets(text: str) -> list[str]:
    """Return every target of make."""
    return [found[1] for line in _lines(text) if (found := _MAKE.match(line))]


def paths(text: str) -> list[str]:
    """Return every file or folder of the project that is named in backticks."""
    return [word for word in inline(split(text)[1]) if _PATH.match(word)]


def settings(text: str) -> list[Block]:
    """Return the blocks of YAML."""
    return [block for block in split(text)[0] if block.language == "yaml"]
