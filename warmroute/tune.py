"""``warmroute tune``: better policy weights for a trace, by replay in virtual time."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

import msgspec
from msgspec import Struct
from rich.console import Console

from replay.crew import Alone, Processes
from replay.evidence import Objective
from replay.space import SpaceError, kind_of, parse_vary, space_of
from replay.sweep import Sweep
from replay.sweep_journal import JournalError, SweepJournal
from replay.trace import TraceError
from replay.trial import TrialError
from replay.trial_replay import Loaded, ReplayTrials, TrialSettings, trace_digest
from replay.tune import TunePlan, tune
from router.config import Config, ConfigError, load_config
from warmroute.cli import EXIT_INTERRUPTED, UsageError, version
from warmroute.flag import add_setting_flags, settings_of
from warmroute.progress import progress_on
from warmroute.replay_fleet import PRESETS, fleet_of
from warmroute.replay_input import (
    add_input_flags,
    count,
    not_negative,
    policy_of,
    positive,
    read_feed,
)
from warmroute.tune_patch import patch_text
from warmroute.tune_report import TuneRun, show

if TYPE_CHECKING:
    from collections.abc import Callable

    from policies.union import AnyPolicy
    from replay.crew import Crew
    from replay.setting import FleetSettings
    from replay.space import Dimension

EXIT_FAILED: Final = 1
DIGEST_LETTERS: Final = 12
TRACE_SEED: Final = 0
"""Of what a trace leaves open: starts of conversations, jitter."""
PLAN_HELP: Final = {
    "budget": "settings to try, beside the present one",
    "seeds": "replays of each setting at each load",
    "check_seeds": "fresh seeds for the winner, on either part of the trace",
    "seed": "of the search; the same seed searches the same way",
}
TRIAL_HELP: Final = {
    "hold_out": "last part of the trace's time that nothing is chosen by",
    "kept": "share of the sessions that each seed keeps",
}
EXAMPLES: Final = """\
examples:
  warmroute tune calls.jsonl
  warmroute tune calls.jsonl --config warmroute.yaml --fleet fleet.yaml --patch patch.yaml
  warmroute tune calls.jsonl --vary w_prefix,w_recent=0.05:1 --loads 0.8,1.0 --budget 60
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    parser.add_argument("trace", metavar="TRACE", help="the trace to replay")
    add_input_flags(parser)
    _add_fleet_flags(parser)
    add = parser.add_argument_group("the search").add_argument
    add(
        "--vary",
        metavar="FIELDS",
        help="fields of the policy, with or without a range: w_prefix,w_queue=0.1:10 "
        "(default: its weights)",
    )
    add(
        "--loads",
        default="0.7,1.0,1.3",
        metavar="LIST",
        help="speeds of the trace (default: %(default)s)",
    )
    objectives = get_args(Objective)
    add("--objective", choices=objectives, default=objectives[0], help="(default: %(default)s)")
    add_setting_flags(parser, TunePlan, PLAN_HELP)
    add_setting_flags(parser, TrialSettings, TRIAL_HELP)
    add(
        "--minutes",
        type=positive,
        metavar="M",
        help="end the search after M minutes; then the winner is judged",
    )
    add("--jobs", type=count, metavar="N", help="processes (default: one per core)")
    add("--journal", type=Path, metavar="FILE", help="where trials are kept, to go on later")
    add("--patch", type=Path, metavar="FILE", help="write the winner here, as configuration")
    add("--force", action="store_true", help="write it although the held-out part disagrees")
    add("--json", action="store_true", help="print the report as JSON")


def _add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the policy and the fleet").add_argument
    add("--config", type=Path, metavar="FILE", help="router configuration with the present policy")
    add("--policy", metavar="KIND|YAML", help="the present policy (default: the router's own)")
    add("--fleet", metavar="FILE", help="YAML of the fleet; flags win over it")
    add("--replicas", type=count, metavar="N", help="replicas (default: 8)")
    add("--capacity-tokens", type=count, metavar="N", help="KV cache of each (default: 440000)")
    add("--cost", choices=PRESETS, help=f"their clock (default: {PRESETS[1]})")
    add("--routers", type=count, metavar="N", help="routers (default: 1)")
    add(
        "--event-delay",
        type=not_negative,
        dest="event_delay_ms",
        metavar="MS",
        help="how late routers learn what caches hold (default: 0)",
    )


def run(options: argparse.Namespace) -> int:
    """Search, report, and write the patch where it is due; returns the exit code."""
    policy, fleet = _present(options)
    plan = msgspec.structs.replace(
        settings_of(options, TunePlan, PLAN_HELP),
        loads=_loads(options.loads),
        objective=options.objective,
    )
    trials = msgspec.structs.replace(settings_of(options, TrialSettings, TRIAL_HELP), fleet=fleet)
    if options.patch is not None:
        _check_writable(options.patch)
    try:
        space = space_of(policy, None if options.vary is None else parse_vary(options.vary))
    except SpaceError as error:
        message = f"--vary: {error}"
        raise UsageError(message) from None
    loaded = _loaded(options)
    console = Console(stderr=True)
    about = TuneRun(
        trace=loaded.name,
        requests=len(loaded.requests),
        policy=policy,
        space=space,
        plan=plan,
        hold_out=trials.hold_out,
    )
    digest = _digest(loaded, policy, space, trials)
    journal = options.journal or Path(f"tune-{digest[:DIGEST_LETTERS]}.jsonl")
    del loaded
    return _tuned(options, about, _Parts(trials, journal, digest), console)


class _Parts(Struct, frozen=True):
    """What a search is made of, beside the report's own facts."""

    trials: TrialSettings
    journal: Path
    digest: str


def build_trials(options: argparse.Namespace, settings: TrialSettings) -> ReplayTrials:
    """Load the trace that the flags say: what each process of a search does once."""
    return ReplayTrials(_loaded(options), settings)


def _loaded(options: argparse.Namespace) -> Loaded:
    feed = read_feed(options, TRACE_SEED)
    return Loaded(name=feed.name, block_tokens=feed.block_tokens, requests=feed.requests)


def _tuned(options: argparse.Namespace, about: TuneRun, parts: _Parts, console: Console) -> int:
    build = partial(build_trials, options, parts.trials)
    jobs = options.jobs or os.cpu_count() or 1
    try:
        with ExitStack() as stack:
            what = f"{kind_of(about.policy)} on {about.trace}"
            opened = SweepJournal.opened(parts.journal, parts.digest, what)
            journal = stack.enter_context(opened)
            known = len(journal.known)
            console.print(f"journal: {parts.journal} ({known} trials known)", soft_wrap=True)
            crew: Crew = Alone(build)
            if jobs > 1:
                crew = stack.enter_context(Processes(build, jobs))
            progress = stack.enter_context(progress_on(console))
            sweep = Sweep(about.policy, about.space, crew, journal, progress)
            report = tune(about.plan, sweep, _deadline(options.minutes))
    except JournalError as error:
        message = f"--journal: {error}"
        raise UsageError(message) from None
    except (TrialError, TraceError) as error:
        print(f"warmroute tune: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        kept = f"interrupted: {parts.journal} has what is known, the same command goes on there"
        print(kept, file=sys.stderr)
        return EXIT_INTERRUPTED
    if options.json:
        whole = {"run": msgspec.to_builtins(about), "report": msgspec.to_builtins(report)}
        print(msgspec.json.format(msgspec.json.encode(whole)).decode())
    else:
        show(about, report, Console())
    is_refused = report.verdict == "not_confirmed" and not options.force
    if options.patch is not None and report.best is not None and report.held_out is not None:
        if is_refused:
            print("no patch is written: see above, or use --force", file=sys.stderr)
        else:
            options.patch.write_text(patch_text(about, report), encoding="utf-8")
            console.print(f"patch: {options.patch}", soft_wrap=True)
    elif options.patch is not None:
        print("no patch is written: there is nothing to change", file=sys.stderr)
    return EXIT_FAILED if is_refused else 0


def _present(options: argparse.Namespace) -> tuple[AnyPolicy, FleetSettings]:
    """Return the present policy and the fleet that the flags say."""
    # The search has a seed of its own; that of the fleet is each trial's.
    fleet = fleet_of(argparse.Namespace(**{**vars(options), "seed": None}))
    policy = Config().policy
    if options.config is not None:
        try:
            config = load_config(options.config)
        except ConfigError as error:
            message = f"--config: {error}"
            raise UsageError(message) from None
        policy = config.policy
        fleet = msgspec.structs.replace(fleet, hot=config.hot_prefix, hold=config.hold)
    if options.policy is not None:
        policy = policy_of(options.policy)
    return policy, fleet


def _loads(text: str) -> tuple[float, ...]:
    try:
        loads = [float(part) for part in text.split(",")]
        checked = msgspec.convert({"loads": loads}, TunePlan).loads
    except (ValueError, msgspec.ValidationError):
        checked = ()
    if not checked or len(set(checked)) != len(checked):
        message = f"--loads: expected different numbers above 0, up to 100, got {text!r}"
        raise UsageError(message)
    return checked


def _check_writable(path: Path) -> None:
    """Refuse now what could not be written after an hour."""
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        message = f"--patch: {path}: not a file that can be written"
        raise UsageError(message)


def _digest(
    loaded: Loaded, policy: AnyPolicy, space: tuple[Dimension, ...], trials: TrialSettings
) -> str:
    """Return a name for all that a trial's figures depend on, beside the trial itself."""
    names = [dimension.name for dimension in space]
    parts = [version(), trace_digest(loaded), policy, names, trials]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def _deadline(minutes: float | None) -> Callable[[], bool]:
    if minutes is None:
        return lambda: False
    end_s = time.monotonic() + 60.0 * minutes
    return lambda: time.monotonic() >= end_s
