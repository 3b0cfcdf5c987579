"""What a replay reads: a trace, cut and stretched as the flags say; and policies by their names."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml
from msgspec import Struct

from policies.union import AnyPolicy
from replay import transform
from replay.decision_trace import LoggedTrace
from replay.format.detect import Format
from replay.format.file import TraceFile, open_trace
from replay.format.packed import UNPACK_ERRORS, unpacked
from replay.trace import TraceError, TraceRequest
from router.config import Config
from router.expected import explained
from warmroute.cli import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DECISIONS: Final = "decisions"
"""The format of a router's own log, which is read as a whole."""
LOG_START: Final = b'{"warmroute":"decisions"'
SEEDS: Final = 2**63
NAMES: Final = ("format", "skip_bad", "limit", "rate", "speed", "jitter_s")


class Feed(Struct, frozen=True, kw_only=True):
    """The requests that are replayed, and what was passed over."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    skipped_lines: int = 0
    first_skipped: tuple[str, ...] = ()


class _PolicyField(Struct, frozen=True):
    """Wraps a policy, so that the decoder names it."""

    policy: AnyPolicy


def count(text: str) -> int:
    """Return a flag's whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        message = f"expected a whole number of at least 1, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def seed_of(text: str) -> int:
    """Return a flag's seed."""
    if not text.isdecimal() or int(text) >= SEEDS:
        message = f"expected a whole number below 2**63, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def positive(text: str) -> float:
    """Return a flag's number above 0."""
    return _number(text, "above 0", lambda value: value > 0)


def not_negative(text: str) -> float:
    """Return a flag's number of at least 0."""
    return _number(text, "of at least 0", lambda value: value >= 0)


def _number(text: str, wanted: str, is_right: Any) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not is_right(value):
        message = f"expected a number {wanted}, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return value


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags about the trace."""
    group = parser.add_argument_group("the trace")
    names = [*map(str, Format), DECISIONS]
    group.add_argument(
        "--format", choices=names, help="what the file is (default: told from its content)"
    )
    group.add_argument("--skip-bad", action="store_true", help="pass over lines of no use")
    group.add_argument("--limit", type=count, metavar="N", help="take the first requests only")
    group.add_argument(
        "--jitter",
        type=positive,
        dest="jitter_s",
        metavar="S",
        help="spread arrivals over so many seconds, where the trace has rounded them",
    )
    pace = group.add_mutually_exclusive_group()
    pace.add_argument(
        "--speed", type=positive, metavar="X", help="so many times as fast as recorded"
    )
    pace.add_argument("--rate", type=positive, metavar="R", help="mean requests per second")


def read_feed(options: argparse.Namespace, seed: int) -> Feed:
    """Return what the flags say; raises UsageError where the trace cannot be used."""
    path = Path(options.trace)
    try:
        if options.format == DECISIONS or (options.format is None and _is_decision_log(path)):
            trace: TraceFile | LoggedTrace = LoggedTrace(path)
        else:
            trace = open_trace(path, format=options.format, skip_bad=options.skip_bad)
        requests = tuple(_shaped(trace, options, seed))
    except TraceError as error:
        shown = str(error)
        message = shown if shown.startswith(str(path)) else f"{path}: {shown}"
        raise UsageError(message) from None
    return Feed(
        name=trace.name,
        block_tokens=trace.block_tokens,
        requests=requests,
        skipped_lines=trace.skipped if isinstance(trace, TraceFile) else 0,
        first_skipped=trace.first_skipped if isinstance(trace, TraceFile) else (),
    )


def _is_decision_log(path: Path) -> bool:
    """Return whether a router's log of decisions is there, be it that it was just rotated away."""
    try:
        with unpacked(path) as file:
            return file.read(len(LOG_START)) == LOG_START
    except FileNotFoundError:
        older = path.with_name(f"{path.name}.1")
        return older.exists() or older.with_name(f"{older.name}.zst").exists()
    except UNPACK_ERRORS:
        return False


def _shaped(
    requests: Iterable[TraceRequest], options: argparse.Namespace, seed: int
) -> Iterable[TraceRequest]:
    """Cut, then spread what was rounded, then change the pace."""
    if options.limit is not None:
        requests = transform.limit(requests, options.limit)
    if options.jitter_s is not None:
        requests = transform.with_jitter(requests, options.jitter_s, seed)
    if options.speed is not None:
        requests = transform.speed_up(requests, options.speed)
    if options.rate is not None:
        try:
            requests = transform.at_rate(requests, options.rate)
        except ValueError as error:
            message = f"--rate: {error}"
            raise UsageError(message) from None
    return requests


def policy_of(text: str) -> AnyPolicy:
    """Return the policy that ``--policy`` names: a kind, or a mapping with it, JSON or YAML.

    Raises UsageError.
    """
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        message = f"--policy: neither a kind nor YAML: {' '.join(str(error).split())}"
        raise UsageError(message) from None
    if isinstance(raw, str):
        raw = {"kind": raw}
    try:
        return msgspec.convert({"policy": raw}, _PolicyField).policy
    except msgspec.ValidationError as error:
        message = f"--{explained(error, _PolicyField, {'policy': raw})}"
        raise UsageError(message) from None


def policies_of(texts: Sequence[str]) -> dict[str, AnyPolicy]:
    """Return the named policies, else the router's own, by what reports call them.

    That is the kind, and the whole text where a kind comes more than once. Raises UsageError.
    """
    if not texts:
        own = Config().policy
        return {kind_of(own): own}
    policies = [policy_of(text) for text in texts]
    kinds = [kind_of(policy) for policy in policies]
    named: dict[str, AnyPolicy] = {}
    for text, policy, kind in zip(texts, policies, kinds, strict=True):
        name = kind if kinds.count(kind) == 1 else " ".join(text.split())
        if name in named:
            message = f"--policy: {name} is there twice"
            raise UsageError(message)
        named[name] = policy
    return named


def kind_of(policy: AnyPolicy) -> str:
    """Return the name of a policy's kind, as in the configuration."""
    return str(policy.__struct_config__.tag)
