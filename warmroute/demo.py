"""``warmroute demo``: the same agents under three policies, on a fleet of this machine.

Real processes (Valkey, workers, sidecars, router) on free local ports, a real page pool in every
worker, and a clock instead of a GPU; with ``--compute numpy`` the workers compute real tokens, and
cold prefixes are compared with warm ones. What is printed was measured in this run.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct, structs
from rich.console import Console
from rich.markup import escape

from prompt.codec import load_codec
from state.prefix import TOKEN_BYTES
from state.store import StateError
from warmroute.cli import EXIT_INTERRUPTED, UsageError
from warmroute.contest import (
    COMPUTE_THREADS,
    PRESET,
    Arena,
    ComputeName,
    ContestError,
    FleetSettings,
    Round,
)
from warmroute.corpus import write_tokenizer
from warmroute.explain import candidates_table, headline
from warmroute.flag import add_setting_flags, settings_of
from warmroute.local import ChildFailedError
from warmroute.process import run_loop
from warmroute.progress import progress_on
from warmroute.score import InfiniteCache, Sample, Score, findings, score_of, score_table
from warmroute.warmth import (
    Warmth,
    WarmthSettings,
    build_probes,
    measure_warmth,
    warmth_finding,
    warmth_of,
    warmth_table,
)
from warmroute.workload import WorkloadSize, build_sessions

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from prompt.codec import Codec
    from warmroute.driver import Exchange
    from warmroute.warmth import Probe
    from warmroute.workload import Message, Session

EXIT_FAILED: Final = 1
POLICIES: Final = {
    "round robin": "round_robin",
    "least loaded": "least_loaded",
    "warmroute": "expected_ttft",
}
"""What a person reads -> ``--policy``, in the order of play."""
OWN_POLICY: Final = POLICIES["warmroute"]
SPEED_UP: Final = 1.0
PAGE_TOKENS: Final = 16
POOL_SHARE: Final = 0.6
LONGEST_SESSIONS: Final = 3
COMPUTES: Final[tuple[ComputeName, ...]] = ("synthetic", "numpy")
COMPUTED_AMOUNTS: Final = {"workers": 2, "sessions": 8, "turns": 4, "prefixes": 5}
"""What the flags are by default where workers compute: a processor does less than the clock."""
COMPUTED_SIZE: Final = WorkloadSize(agents=2, open_sessions=4, text_share=0.5)
PROBE_ROOM: Final = 1.5
"""The pages of a pool over those of one prefix, at least: its endings have to fit as well."""
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FAILURES: Final = (ChildFailedError, ContestError, StateError)
FLAGS: Final = {
    "workers": "workers, each with its own cache",
    "sessions": "agent sessions to play under each policy",
    "turns": "requests of each session",
    "seed": "seed of workload, replies and routing",
}
WARMTH_FLAGS: Final = {
    "prefixes": "prefixes to compare cold and warm (default: 0, with --compute numpy 5)",
    "prefix_tokens": "length of these prefixes in tokens",
}
EXAMPLES: Final = """\
examples:
  warmroute demo
  warmroute demo --workers 2 --sessions 12 --seed 7
  warmroute demo --compute numpy
  warmroute demo --json > result.json
  warmroute demo --keep-logs /tmp/demo-logs

Needs no GPU, no Redis and no network; takes about a minute. Ctrl-C cleans up. With --compute numpy
the defaults are smaller: 2 workers, 8 sessions of 4 turns with texts of half the length.
"""


class DemoSettings(Struct, frozen=True, kw_only=True):
    """What the flags say."""

    workers: Annotated[int, Meta(ge=1, le=32)] = 4
    sessions: Annotated[int, Meta(ge=1, le=2_000)] = 24
    turns: Annotated[int, Meta(ge=1, le=20)] = 6
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


class Plan(Struct, frozen=True, kw_only=True):
    """What is played."""

    compute: ComputeName
    settings: DemoSettings
    warmth: WarmthSettings
    size: WorkloadSize


class Report(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result as ``--json`` prints it. Without a clock there is no ``preset``."""

    settings: DemoSettings
    compute: ComputeName = "synthetic"
    preset: str | None = None
    speed_up: float | None = None
    page_tokens: int
    pages_per_worker: int
    pool_tokens: int
    working_set_tokens: int
    policies: dict[str, Score]
    duration_s: dict[str, float]
    ideal: Score
    warmth: Warmth | None = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--compute",
        choices=COMPUTES,
        default=COMPUTES[0],
        help="what the workers run: a clock, or real arithmetic (default: synthetic)",
    )
    add_setting_flags(parser, DemoSettings, FLAGS)
    add_setting_flags(parser, WarmthSettings, WARMTH_FLAGS)
    parser.add_argument("--keep-logs", metavar="DIR", help="keep the logs of all processes there")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(options: argparse.Namespace) -> int:
    """Run the demo; returns the exit code."""
    plan = _plan(options)
    logs = _logs_directory(options.keep_logs)
    try:
        result = run_loop(_until_signalled(plan, logs), "uvloop")
    except FAILURES as error:
        print(f"warmroute demo: {error}", file=sys.stderr)
        return EXIT_FAILED
    if result is None:
        # All is cleaned up; keys pressed again must not change how the process ends.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return EXIT_INTERRUPTED
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(result[0])).decode())
    else:
        _print(*result)
    return 0


def _plan(options: argparse.Namespace) -> Plan:
    """Return what the flags say; raises UsageError naming the wrong flag."""
    size = WorkloadSize()
    if options.compute != "synthetic":
        size = COMPUTED_SIZE
        for name, amount in COMPUTED_AMOUNTS.items():
            if getattr(options, name) is None:
                setattr(options, name, amount)
    settings = settings_of(options, DemoSettings, FLAGS)
    return Plan(
        compute=options.compute,
        settings=settings,
        warmth=settings_of(options, WarmthSettings, WARMTH_FLAGS),
        size=structs.replace(size, sessions=settings.sessions, turns=settings.turns),
    )


def _logs_directory(path: str | None) -> Path | None:
    if path is None:
        return None
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"--keep-logs: {path}: {error.strerror}"
        raise UsageError(message) from None
    return Path(path)


async def _until_signalled(plan: Plan, logs: Path | None) -> tuple[Report, Round] | None:
    """Return what was played; None when a signal ended it, everything being cleaned up."""
    demo = asyncio.create_task(_play_in_directory(plan, logs))
    is_interrupted = False

    def interrupt() -> None:
        nonlocal is_interrupted
        # Cleaning up takes a few seconds at most: further signals do not cut it short.
        if not is_interrupted:
            is_interrupted = True
            demo.cancel()

    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    await asyncio.wait([demo])
    if not is_interrupted:
        return demo.result()
    if not demo.cancelled():
        demo.exception()  # the children got the same signal and may have been seen ending
    return None


async def _play_in_directory(plan: Plan, logs: Path | None) -> tuple[Report, Round]:
    """Play with a directory that lasts as long."""
    with tempfile.TemporaryDirectory(
        prefix="warmroute-demo-", ignore_cleanup_errors=True
    ) as directory:
        return await _play(plan, Path(directory), Path(directory) if logs is None else logs)


async def _play(plan: Plan, directory: Path, logs: Path) -> tuple[Report, Round]:
    """Play all rounds; returns the report and the round of the last policy."""
    settings, size = plan.settings, plan.size
    sessions = build_sessions(size, settings.seed)
    with progress_on(Console(stderr=True)) as progress:
        progress.begin("starting the fleet")
        tokenizer = write_tokenizer(directory / "tokenizer", settings.seed)
        codec = load_codec(tokenizer)
        probes = build_probes(plan.warmth, codec, settings.seed)
        pages = pages_for(sessions, codec, settings.workers)
        fleet = FleetSettings(
            compute=plan.compute,
            workers=settings.workers,
            pages=max([pages, *map(pages_of, probes)]),
            page_tokens=PAGE_TOKENS,
            speed_up=SPEED_UP,
            tokenizer=str(tokenizer),
            seed=settings.seed,
        )
        rounds = {}
        warmth = None
        async with Arena(fleet, logs) as arena:
            for name, policy in POLICIES.items():
                progress.begin(name, size.sessions * size.turns)
                rounds[name] = await arena.play(policy, sessions, size.open_sessions, progress)
            if probes:
                progress.begin("cold and warm", 2 * len(probes))
                pairs = await arena.ask(
                    OWN_POLICY,
                    lambda client, settle: measure_warmth(client, settle, probes, progress),
                )
                warmth = warmth_of(plan.warmth.prefix_tokens, probes, pairs)
            progress.begin("stopping the fleet")
    return _report(plan, fleet, codec, rounds, warmth), list(rounds.values())[-1]


def pages_of(probe: Probe) -> int:
    """Return the pages that a pool needs for one prefix and its endings."""
    return ceil(PROBE_ROOM * probe.shared_tokens / PAGE_TOKENS)


def _report(
    plan: Plan,
    fleet: FleetSettings,
    codec: Codec,
    rounds: Mapping[str, Round],
    warmth: Warmth | None,
) -> Report:
    played = list(rounds.values())
    check_equal_prompts(played)
    ideal, working_set_tokens = ideal_of(played[-1].exchanges, codec)
    has_clock = plan.compute == "synthetic"
    return Report(
        settings=plan.settings,
        compute=plan.compute,
        preset=PRESET if has_clock else None,
        speed_up=SPEED_UP if has_clock else None,
        page_tokens=PAGE_TOKENS,
        pages_per_worker=fleet.pages,
        pool_tokens=fleet.pages * PAGE_TOKENS * fleet.workers,
        working_set_tokens=working_set_tokens,
        policies={
            name: score_of([_sample(each) for each in done.exchanges], fleet.workers)
            for name, done in rounds.items()
        },
        duration_s={name: done.duration_s for name, done in rounds.items()},
        ideal=ideal,
        warmth=warmth,
    )


def pages_for(sessions: Sequence[Session], codec: Codec, workers: int) -> int:
    """Return the pages of each worker's pool: together they hold ``POOL_SHARE`` of all content.

    A pool holds ``LONGEST_SESSIONS`` of the longest sessions in any case.
    """
    systems = {session.agent: _tokens_of([session.system], codec) for session in sessions}
    lengths = []
    for session in sessions:
        messages = [session.system, *(turn.message for turn in session.turns)]
        replies = sum(turn.reply_tokens for turn in session.turns)
        lengths.append(_tokens_of(messages, codec) + replies)
    own = sum(
        length - systems[session.agent] for session, length in zip(sessions, lengths, strict=True)
    )
    working_set_tokens = own + sum(systems.values())
    share_tokens = POOL_SHARE * working_set_tokens / workers
    return ceil(max(share_tokens, LONGEST_SESSIONS * max(lengths)) / PAGE_TOKENS)


def _tokens_of(messages: list[Message], codec: Codec) -> int:
    return len(codec.chat_tokens(messages, None, options={})) // TOKEN_BYTES


def check_equal_prompts(rounds: Sequence[Round]) -> None:
    """Raise ContestError unless all rounds asked the same, replies of the workers included."""
    asked = [
        {(each.session, each.turn): each.messages for each in played.exchanges} for played in rounds
    ]
    if any(other != asked[0] for other in asked[1:]):
        message = "the policies were not asked the same: the workers' replies differ"
        raise ContestError(message)


def ideal_of(exchanges: Sequence[Exchange], codec: Codec) -> tuple[Score, int]:
    """Return the score of one infinite cache, and the working set in tokens."""
    cache = InfiniteCache(PAGE_TOKENS)
    samples = []
    for exchange in sorted(exchanges, key=lambda each: each.started_s):
        prompt = codec.chat_tokens(list(exchange.messages), None, options={})
        samples.append(cache.ask(prompt))
        cache.hold(prompt + codec.text_tokens(exchange.reply.text, add_special_tokens=False))
    return score_of(samples, 1), cache.held_tokens


def _sample(exchange: Exchange) -> Sample:
    reply = exchange.reply
    return Sample(
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
        ttft_s=reply.ttft_s,
        replica=reply.replica,
    )


def _print(report: Report, last: Round) -> None:
    settings = report.settings
    console = Console(highlight=False)
    title = (
        f"{settings.sessions} agent sessions of {settings.turns} turns on {settings.workers}"
        f" workers, seed {settings.seed}"
    )
    caption = (
        f"Working set {report.working_set_tokens:,} tokens, pools {report.pool_tokens:,} tokens"
        f" together. {_compute_line(report)} TTFT in wall time as the client saw it. Request hit:"
        " at least half of the prompt was cached. Imbalance: workers x largest share of requests."
    )
    console.print()
    console.print(score_table(report.policies, report.ideal, title, caption))
    console.print()
    for line in findings(report.policies, report.ideal):
        console.print(line)
    if report.warmth is not None:
        console.print()
        console.print(warmth_table(report.warmth))
        console.print()
        console.print(warmth_finding(report.warmth))
    if last.decision is not None:
        console.print("\nOne decision of warmroute, as 'warmroute explain' shows it:")
        for line in headline(last.decision):
            console.print(escape(line), soft_wrap=True)
        console.print(candidates_table(last.decision.attempts[-1]))


def _compute_line(report: Report) -> str:
    if report.speed_up is not None:
        return f"Engine clock: {report.preset}, speed-up {report.speed_up:g}."
    return (
        "Real arithmetic: a small model with random weights on"
        f" NumPy, {COMPUTE_THREADS} thread per worker."
    )
