"""``warmroute kv``: replay an audit of the worker's cache, or size a cache before there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmroute import kv_audit, kv_size

if TYPE_CHECKING:
    import argparse

EXAMPLES = """\
examples:
  warmroute kv audit worker.audit
  warmroute kv audit worker.audit worker.audit.1 worker.audit.2 --final
  warmroute kv size ~/models/Llama-3.1-8B --context 8192 --sequences 16 --memory 24GiB
"""
ACTIONS = {
    "audit": (
        kv_audit,
        "replay audit files: every page is accounted for, or where it was lost",
        "Files in any order. Exit codes: 0 conserved, 1 the first fault is named, 2 unreadable.",
    ),
    "size": (
        kv_size,
        "tell how many bytes a model's KV cache takes, and what fits",
        "Keys and values only: weights and activations need room of their own.",
    ),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's actions and their flags."""
    parser.epilog = EXAMPLES
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, (module, summary, epilog) in ACTIONS.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        module.add_flags(
            actions.add_parser(name, help=summary, description=description, epilog=epilog)
        )


def run(options: argparse.Namespace) -> int:
    """Run one action; returns the exit code."""
    return int(ACTIONS[options.action][0].run(options))
