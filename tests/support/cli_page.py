"""The page of all commands and their flags, as the command line's parsers have them.

``python -m support.cli_page docs/cli.md`` writes it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from warmroute.cli import COMMANDS, build_parser

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD: Final = """# Commands

Every command and flag, made from the command line's own parsers by `make docs-reference`. Exit
codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 fenced by another sidecar, 130 ended by
Ctrl-C. What `warmroute serve` reads from its file is in [settings of the file](config.md).

What must not stand in a list of processes comes from the environment:

| variable | says |
|---|---|
| `WARMROUTE_REDIS` | the URL of the shared state, which may hold a password; wins over `--redis` |
| `WARMROUTE_ENGINE_API_KEY` | the key that engines want to see |
| `WARMROUTE_API_KEY` | `warmroute doctor`: the key that the router wants to see |
| `WARMROUTE_TLS_CA` | PEM file of the authority of `https://` engines and routers |
| `WARMROUTE_TLS_CERTIFICATE`, `WARMROUTE_TLS_KEY` | what is shown to those that ask for it |
| `WARMROUTE_TLS_SERVER_NAME` | the name in their certificates, in place of the URL's host |
| `WARMROUTE_TLS_INSECURE` | `1`: believe any certificate |

| command | does |
|---|---|
"""


def below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the commands of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def shown(action: argparse.Action) -> str:
    """Return a flag with the name of its value, or the name of a positional argument."""
    value = ""
    if action.nargs != 0:
        metavar = action.metavar
        if metavar is None and action.choices is not None:
            metavar = "{" + ",".join(map(str, action.choices)) + "}"
        if metavar is None:
            metavar = action.dest.upper() if action.option_strings else action.dest
        value = metavar if isinstance(metavar, str) else " ".join(metavar)
    if not action.option_strings:
        return f"`{value}`"
    space = " " if value else ""
    return ", ".join(f"`{name}{space}{value}`" for name in action.option_strings)


def section(parser: argparse.ArgumentParser, depth: int) -> Iterator[str]:
    """Yield the lines of a command and of those below it."""
    yield from ("", f"{'#' * depth} {parser.prog}", "", parser.description or "")
    formatter = parser._get_formatter()
    rows = []
    for action in parser._actions:
        hidden = action.help == argparse.SUPPRESS
        if hidden or isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        text = " ".join(formatter._expand_help(action).split()) if action.help else ""
        text += " (required)" if action.option_strings and action.required else ""
        rows.append(
            "| " + " | ".join(part.replace("|", "\\|") for part in (shown(action), text)) + " |"
        )
    if rows:
        yield from ("", "| flag | says |", "|---|---|", *rows)
    if parser.epilog:
        yield from ("", "```", parser.epilog.strip("\n"), "```")
    for inner in below(parser).values():
        yield from section(inner, depth + 1)


def page() -> str:
    """Return the page."""
    rows = "\n".join(
        f"| [`warmroute {name}`](#warmroute-{name}) | {summary} |"
        for name, (_, summary) in COMMANDS.items()
    )
    sections = ["\n".join(section(below(build_parser(name))[name], 2)) for name in COMMANDS]
    return _HEAD + rows + "\n" + "\n".join(sections) + "\n"


def main() -> None:
    """Write the page that is named."""
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
