"""A trace against a real target: what the flags say, the journal, and how it ends."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

from msgspec import Struct, structs

from replay.journal import Journal, JournalError, JournalHead, Record, digest_of
from replay.live import (
    CONCURRENCY,
    LATE_S,
    Lateness,
    LiveReplay,
    LiveSettings,
    lateness_of,
    run_of,
)
from replay.outcome import ReplayRun
from replay.synthesis import SynthesisError, SynthesisSettings, SyntheticPrompts
from replay.target import (
    AddressError,
    EndpointName,
    Target,
    TargetSettings,
    checked_address,
    model_of,
    open_http,
)
from warmroute.cli import UsageError
from warmroute.process import run_loop
from warmroute.replay_input import count, positive
from warmroute.tls_option import told_context

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Coroutine

    from warmroute.progress import Progress
    from warmroute.replay_input import Feed

NAMES: Final = (
    "allow_remote",
    "endpoint",
    "model",
    "text",
    "vocab_size",
    "shrink",
    "no_ignore_eos",
    "concurrency",
    "timeout_s",
    "journal",
    "resume",
    "label",
)
"""What has no meaning without a target."""
TIMEOUT_S: Final = 600.0
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Plan(Struct, frozen=True, kw_only=True):
    """What the flags say. ``model`` None: the only one that the target serves."""

    url: str
    model: str | None
    endpoint: EndpointName
    ignore_eos: bool
    timeout_s: float
    concurrency: int
    synthesis: SynthesisSettings
    journal: Path | None
    is_resumed: bool
    label: str


class Played(Struct, frozen=True, kw_only=True):
    """A live replay so far; ``is_whole`` unless it was told to stop."""

    run: ReplayRun
    lateness: Lateness
    resumed_requests: int
    is_whole: bool


def add_live_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a live replay."""
    group = parser.add_argument_group("against a target")
    group.add_argument("--target", metavar="URL", help="a router or an engine: http://host:port")
    group.add_argument(
        "--allow-remote", action="store_true", help="the target may be another machine"
    )
    group.add_argument(
        "--endpoint", choices=get_args(EndpointName), help="API (default: completions)"
    )
    group.add_argument("--model", metavar="NAME", help="model to ask for (default: the only one)")
    group.add_argument(
        "--text", action="store_true", help="prompts are text, not token ids; so are all chats"
    )
    group.add_argument(
        "--vocab-size", type=count, metavar="N", help="token ids are below it (default: 1000)"
    )
    group.add_argument(
        "--shrink", type=count, metavar="K", help="divide all lengths, blocks' too, by this"
    )
    group.add_argument(
        "--no-ignore-eos", action="store_true", help="answers may end before their length"
    )
    group.add_argument(
        "--concurrency",
        type=count,
        metavar="N",
        help=f"requests under way; more are sent late (default: {CONCURRENCY})",
    )
    group.add_argument(
        "--timeout",
        type=positive,
        dest="timeout_s",
        metavar="S",
        help=f"for a whole answer (default: {TIMEOUT_S:g})",
    )
    group.add_argument("--journal", metavar="FILE", help="append every outcome to this file")
    group.add_argument(
        "--resume", action="store_true", help="go on where --journal ends, if it is there"
    )
    group.add_argument("--label", metavar="NAME", help="what reports call it (default: live)")


def plan_of(options: argparse.Namespace, seed: int) -> Plan:
    """Return what the flags say; raises UsageError."""
    try:
        url = checked_address(options.target, may_be_remote=options.allow_remote)
    except AddressError as error:
        message = f"--target: {error}"
        raise UsageError(message) from None
    if options.resume and options.journal is None:
        message = "--resume: expected --journal FILE, which says where to go on"
        raise UsageError(message)
    endpoint: EndpointName = options.endpoint or "completions"
    default = SynthesisSettings()
    vocabulary_size = options.vocab_size or default.vocabulary_size
    if vocabulary_size < 8:  # noqa: PLR2004 - as the settings say
        message = "--vocab-size: expected at least 8"
        raise UsageError(message)
    return Plan(
        url=url,
        model=options.model,
        endpoint=endpoint,
        ignore_eos=not options.no_ignore_eos,
        timeout_s=options.timeout_s or TIMEOUT_S,
        concurrency=options.concurrency or CONCURRENCY,
        synthesis=SynthesisSettings(
            form="text" if options.text or endpoint == "chat" else "tokens",
            vocabulary_size=vocabulary_size,
            shrink=options.shrink or default.shrink,
            seed=seed,
        ),
        journal=None if options.journal is None else Path(options.journal),
        is_resumed=options.resume,
        label=options.label or "live",
    )


def replay_live(feed: Feed, plan: Plan, progress: Progress) -> Played:
    """Send the requests of ``feed``; raises UsageError, JournalError and TargetError."""
    try:
        prompts = SyntheticPrompts(feed.requests, feed.block_tokens, plan.synthesis)
    except SynthesisError as error:
        raise UsageError(str(error)) from None
    return run_loop(_until_signalled(feed, plan, prompts, progress), "uvloop")


async def _until_signalled(
    feed: Feed, plan: Plan, prompts: SyntheticPrompts, progress: Progress
) -> Played:
    """Play until all is done or a signal comes."""
    records: list[Record] = []
    with ExitStack() as stack:
        async with open_http(plan.timeout_s, told_context()) as http:
            model = plan.model or await model_of(http, plan.url)
            target = Target(
                http,
                TargetSettings(
                    url=plan.url,
                    model=model,
                    endpoint=plan.endpoint,
                    ignore_eos=plan.ignore_eos,
                    timeout_s=plan.timeout_s,
                ),
                time.monotonic,
            )
            append = _opened(feed, plan, model, records, stack)
            resumed_requests = len(records)
            progress.begin("sending", len(feed.requests) - resumed_requests)

            def take(record: Record) -> None:
                append(record)
                records.append(record)
                progress.advance()

            live = LiveReplay(
                target, prompts, LiveSettings(concurrency=plan.concurrency), time.monotonic, take
            )
            done = {record.outcome.ordinal for record in records}
            is_whole = await _unless_signalled(live.play(feed.requests, done))
    return Played(
        run=run_of(feed.name, plan.label, records, plan.synthesis.seed),
        lateness=lateness_of(records),
        resumed_requests=resumed_requests,
        is_whole=is_whole,
    )


def _opened(
    feed: Feed, plan: Plan, model: str, records: list[Record], stack: ExitStack
) -> Callable[[Record], None]:
    """Open the journal, put what it has into ``records`` and return what appends to it."""
    if plan.journal is None:
        return lambda _: None
    head = JournalHead(
        trace=feed.name,
        requests=len(feed.requests),
        digest=digest_of(feed.requests),
        settings={
            "target": plan.url,
            "model": model,
            "endpoint": plan.endpoint,
            "ignore_eos": plan.ignore_eos,
            "concurrency": plan.concurrency,
            "block_tokens": feed.block_tokens,
            **structs.asdict(plan.synthesis),
        },
    )
    try:
        if plan.is_resumed:
            journal, found = Journal.resume(plan.journal, head)
            records.extend(found)
        else:
            journal = Journal(plan.journal, head)
    except JournalError as error:
        message = f"--journal: {error}"
        raise UsageError(message) from None
    return stack.enter_context(journal).append


async def _unless_signalled(playing: Coroutine[object, object, None]) -> bool:
    """Return whether it came to its end; a signal ends it before."""
    task = asyncio.ensure_future(playing)
    is_signalled = False

    def interrupt() -> None:
        nonlocal is_signalled
        is_signalled = True
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, interrupt)
    try:
        await asyncio.wait([task])
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
    if task.cancelled():
        if not is_signalled:
            raise asyncio.CancelledError
        return False
    task.result()
    return True


def lateness_line(lateness: Lateness) -> str:
    """Return how punctual the replay was, in words."""
    if not lateness.late_requests:
        return f"All requests were sent in time, within {LATE_S * 1_000:.0f} ms."
    return (
        f"Sent late, by more than {LATE_S * 1_000:.0f} ms: {lateness.late_requests:,} requests,"
        f" p99 of all {lateness.p99_s:.3f} s, at most {lateness.max_s:.3f} s."
    )
