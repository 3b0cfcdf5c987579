"""The command line: one module per command, listed in COMMANDS.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 fenced by another sidecar, 130 on
Ctrl-C. Commands are imported when they run, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from importlib import import_module, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
COMMANDS = {
    "serve": ("warmroute.serve", "route requests to a fleet of replicas"),
    "sidecar": ("warmroute.sidecar", "tell the routers what one engine holds and how busy it is"),
    "worker": ("warmroute.worker", "run the bundled paged-KV worker"),
    "demo": ("warmroute.demo", "compare routing policies on a local fleet, no GPU needed"),
    "replay": ("warmroute.replay", "replay a trace in virtual time or against a live target"),
    "replicas": ("warmroute.replicas", "show every replica as a router knows it"),
    "top": ("warmroute.top", "watch the fleet and the last minute in the terminal"),
    "health": ("warmroute.health", "ask whether an address answers, as container probes do"),
    "doctor": ("warmroute.doctor", "find out why there are no hits"),
    "explain": ("warmroute.explain", "show why a request went where it went"),
    "calibrate": ("warmroute.calibrate", "fit the step-time model of a live engine"),
    "tune": ("warmroute.tune", "find better policy weights for a trace, in virtual time"),
    "record": ("warmroute.record", "write the last requests of a running router as a trace"),
    "shadow": ("warmroute.shadow", "compare a policy that is asked and not followed"),
    "canary": ("warmroute.canary", "let a candidate policy decide for a part of the requests"),
    "weights": ("warmroute.weights", "show or change weights and limits while routers run"),
    "drain": ("warmroute.drain", "let a replica end what it has and get nothing new"),
    "undrain": ("warmroute.drain", "let a drained replica be chosen again"),
    "tenants": ("warmroute.tenants", "tell what tenants used, or check the audit log"),
    "audit": ("warmroute.audit_timing", "test whether a tenant can time what others sent"),
    "kv": ("warmroute.kv", "audit the bundled worker's KV cache, or size one"),
}


class UsageError(Exception):
    """A flag or the configuration is wrong; the text says which and what was expected."""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose epilogs keep their line breaks."""

    def __init__(self, *args: object, **options: object) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **options)  # type: ignore[arg-type]


def version() -> str:
    """Return the installed version."""
    try:
        return metadata.version("warmroute")
    except metadata.PackageNotFoundError:
        return "of a checkout that is not installed"


def load(module_name: str) -> ModuleType:
    """Return a command's module; what is loaded with it is no work for the garbage collector.

    It stays as long as the process. Looked at again and again it takes a sixth of the time of a
    start, and later some 40 ms of each full collection.
    """
    if module_name in sys.modules:
        return sys.modules[module_name]
    gc.disable()
    try:
        return import_module(module_name)
    finally:
        gc.freeze()
        gc.enable()


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """Return the parser; only the ``chosen`` command's own flags are filled in."""
    parser = _Parser(
        prog="warmroute",
        description="Cache-aware request router for self-hosted LLM replicas.",
        epilog="examples:\n"
        "  warmroute demo\n"
        "  warmroute serve --replica http://10.0.0.1:8000 --replica http://10.0.0.2:8000\n"
        "  warmroute serve --config warmroute.yaml\n"
        "  warmroute explain --last 5\n"
        "\n'warmroute COMMAND --help' shows a command's flags and examples.",
    )
    parser.add_argument("--version", action="version", version=f"warmroute {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, summary) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == chosen:
            load(module_name).add_flags(command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    # The tokenizers library reads it when it is imported: its threads are ours, not its own.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    words = list(sys.argv[1:] if arguments is None else arguments)
    chosen = next((word for word in words if word in COMMANDS), None)
    options = build_parser(chosen).parse_args(words)
    module = load(COMMANDS[options.command][0])
    try:
        return int(module.run(options))
    except UsageError as error:
        print(f"warmroute {options.command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
