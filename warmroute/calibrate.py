"""``warmroute calibrate``: fit the step-time model to a live engine."""

from __future__ import annotations

import os
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct
from rich.console import Console
from rich.table import Table

from policies.prefill import PrefillCost
from replay.calibrate import Prober, ProbeSettings
from replay.fit import OVERHEADS, TERMS, FitError, StepFit, fit_steps
from replay.heldout import HeldOut, RunSettings, hold_out, median_errors
from replay.probe import EngineFacts, alone_row, draw_tokens, salted
from replay.token_client import AskError, TokenClient
from sidecar.scrape import EngineClient
from warmroute.cli import UsageError
from warmroute.engine_facts import (
    Limits,
    UnreachableError,
    find_facts,
    is_loopback,
    read_metrics,
)
from warmroute.flag import add_setting_flags, settings_of
from warmroute.process import LOOPS, run_loop
from warmroute.progress import progress_on
from warmroute.sidecar import API_KEY_VARIABLE
from warmroute.tls_option import told_context, told_tls

if TYPE_CHECKING:
    import argparse

    from warmroute.progress import Progress

EXIT_FAILED: Final = 1
PROBE_SHARE: Final = 0.6
"""Of the seconds; the rest is for held-out runs."""
TARGET_ERROR: Final = 0.15
TYPICAL: Final = (2_000, 200)
"""Tokens of the prompt and of the answer for which shares are shown."""
FOREIGN_SHARE: Final = 0.02
"""Of the prompt tokens that an engine counted, which may come from elsewhere."""
FIRST_PROMPT: Final = 4
FLAGS: Final = {
    "engine": "engine to measure, http://host:port",
    "model": "model to ask, where the engine serves several",
    "seconds": "about how long to measure",
    "runs": "held-out runs to predict and measure; 0 for none",
    "step_tokens": "tokens of one step at most (default: as told, else 8192)",
    "max_sequences": "sequences of one step at most (default: as told, else 256)",
    "seed": "seed of lengths, order and arrivals",
    "output": "file for the cost model (YAML)",
}
EXAMPLES: Final = f"""\
examples:
  warmroute calibrate --engine http://127.0.0.1:8000 --output cost.yaml
  warmroute calibrate --engine http://127.0.0.1:8000 --seconds 180 --step-tokens 2048

The engine should have no other traffic, and its machine nothing else to do. Prompts are random
token ids; they fill its prefix cache. vLLM tells the tokens of a step in its development mode only:
name them where the engine was started with --max-num-batched-tokens. {API_KEY_VARIABLE} holds the
engine's key. Exit codes: 0 measured, 1 the engine failed, 2 wrong usage.
"""


class CalibrateSettings(Struct, frozen=True, kw_only=True):
    """What the flags say."""

    engine: str
    model: str | None = None
    seconds: Annotated[float, Meta(ge=1, le=3600)] = 75.0
    runs: Annotated[int, Meta(ge=0, le=50)] = 5
    step_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_sequences: Annotated[int, Meta(ge=1)] | None = None
    seed: int = 0
    output: str | None = None


class Calibration(Struct, frozen=True, kw_only=True):
    """What was found, as ``--json`` prints it. ``prefill`` is for the router's configuration."""

    engine: str
    facts: EngineFacts
    fit: StepFit
    prefill: PrefillCost
    shares: dict[str, float]
    typical_tokens: tuple[int, int]
    runs: tuple[HeldOut, ...]
    warnings: tuple[str, ...]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    add_setting_flags(parser, CalibrateSettings, FLAGS)
    parser.add_argument(
        "--allow-remote", action="store_true", help="measure an engine on another machine, too"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--loop", choices=LOOPS, default="uvloop", help="event loop (default: uvloop)"
    )


def run(options: argparse.Namespace) -> int:
    """Measure, fit, predict, print; returns the exit code."""
    settings = settings_of(options, CalibrateSettings, FLAGS)
    if not is_loopback(settings.engine) and not options.allow_remote:
        message = (
            f"--engine: {settings.engine} is not on this machine; --allow-remote measures it, and"
            " the network with it"
        )
        raise UsageError(message)
    if settings.output is not None and not Path(settings.output).absolute().parent.is_dir():
        message = f"--output: {settings.output} is in no directory"
        raise UsageError(message)
    console = Console(stderr=True)
    try:
        with progress_on(console) as progress:
            found = run_loop(_calibrate(settings, progress), options.loop)
    except (UnreachableError, AskError, FitError) as error:
        print(f"warmroute calibrate: {error}", file=sys.stderr)
        return EXIT_FAILED
    for warning in found.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        _print(found)
    if settings.output is not None:
        try:
            Path(settings.output).write_text(cost_file(found), encoding="utf-8")
        except OSError as error:
            print(f"warmroute calibrate: {settings.output}: {error.strerror}", file=sys.stderr)
            return EXIT_FAILED
    return 0


async def _calibrate(settings: CalibrateSettings, progress: Progress) -> Calibration:
    api_key = os.environ.get(API_KEY_VARIABLE)
    tls = told_context()
    limits = Limits(step_tokens=settings.step_tokens, max_sequences=settings.max_sequences)
    try:
        client = EngineClient(settings.engine, api_key=api_key, tls=told_tls())
    except ValueError as error:
        message = f"--engine: {str(error).partition(': ')[2]}, got {settings.engine!r}"
        raise UsageError(message) from None
    async with client:
        progress.begin("asking the engine about itself")
        facts = await find_facts(client, settings.model, limits, api_key)
        before = await read_metrics(client)
        warnings = _assumptions(facts)
        busy = (before.load.running or 0) + (before.load.queued or 0)
        if busy:
            warnings.append(f"the engine is busy: {busy} requests run or wait that are not ours")
        clock = time.monotonic
        async with TokenClient(client.endpoint, facts.model, clock, api_key, tls) as tokens:
            salt = secrets.randbits(64)
            await _check_tokens(tokens, salt)
            probe_s = settings.seconds * (PROBE_SHARE if settings.runs else 1.0)
            probes = ProbeSettings(seconds=probe_s, seed=settings.seed, salt=salt)
            prober = Prober(tokens.ask, clock, facts, probes)
            progress.begin("probes")
            await prober.run()
            fit = fit_steps(prober.rows)
            after = await read_metrics(client)
            if before.prompt_tokens is not None and after.prompt_tokens is not None:
                counted = after.prompt_tokens - before.prompt_tokens
                foreign = counted - prober.asked_tokens - FIRST_PROMPT
                if foreign > FOREIGN_SHARE * counted:
                    warnings.append(f"others asked {foreign:,} prompt tokens during the probes")
            runs: list[HeldOut] = []
            if settings.runs:
                progress.begin("held-out runs")
                plan = RunSettings(
                    runs=settings.runs,
                    seconds=settings.seconds - probe_s,
                    seed=settings.seed + 1,
                    salt=salt,
                )
                runs = await hold_out(tokens.ask, clock, fit, facts, prober.longest_tokens, plan)
        progress.end()
    return _conclude(settings.engine, facts, fit, runs, warnings)


async def _check_tokens(client: TokenClient, salt: int) -> None:
    """Ask for one token, to learn early what cannot work; raises AskError."""
    try:
        await client.ask(draw_tokens(salted(0, salt), FIRST_PROMPT), 1)
    except AskError as error:
        if error.status is None:
            raise
        message = f"the engine does not take token ids as a prompt: {error}"
        raise AskError(message, error.status) from error


def _assumptions(facts: EngineFacts) -> list[str]:
    if "step_tokens" in facts.told:
        return []
    return [f"the engine does not tell its --step-tokens: {facts.step_tokens:,} assumed"]


def _conclude(
    engine: str, facts: EngineFacts, fit: StepFit, runs: list[HeldOut], warnings: list[str]
) -> Calibration:
    if fit.error > TARGET_ERROR:
        warnings.append(f"the measurements scatter by {fit.error:.0%}: is the machine quiet?")
    if runs and max(median_errors(runs)) > TARGET_ERROR:
        warnings.append(
            f"held-out runs are predicted no better than {max(median_errors(runs)):.0%}: was the"
            " machine busy?"
        )
    prompt, output = TYPICAL
    typical = (min(prompt, facts.context_tokens // 2), min(output, facts.context_tokens // 4))
    return Calibration(
        engine=engine,
        facts=facts,
        fit=fit,
        prefill=PrefillCost(
            # A long prompt fills its steps: each token bears its part of what a step takes.
            token_ms=fit.cost.prefill_token_ms + fit.cost.step_ms / facts.step_tokens,
            attention_pair_ms=fit.cost.attention_pair_ms,
        ),
        shares=_shares(fit.parts_ms(alone_row(*typical, facts.step_tokens))),
        typical_tokens=typical,
        runs=tuple(runs),
        warnings=tuple(warnings),
    )


def _shares(parts_ms: dict[str, float]) -> dict[str, float]:
    total_ms = sum(parts_ms.values()) or 1.0
    return {name: part_ms / total_ms for name, part_ms in parts_ms.items()}


def cost_file(found: Calibration) -> str:
    """Return the cost model as YAML; what is no part of it stands in comments."""
    cost = "".join(f"{name}: {_number(getattr(found.fit.cost, name))}\n" for name in TERMS)
    overheads = "".join(f"#   {name}: {_number(getattr(found.fit, name))}\n" for name in OVERHEADS)
    return (
        f"# Step times of {found.facts.model} at {found.engine}: warmroute replay --cost FILE\n"
        f"{cost}# Besides its steps a request takes, and a token of its prompt:\n{overheads}"
        f"# Tokens of a step at most: {found.facts.step_tokens}\n"
        f"# For the router's configuration:\n# {_prefill_line(found.prefill)}\n"
    )


def _prefill_line(prefill: PrefillCost) -> str:
    token_ms, pair_ms = _number(prefill.token_ms), _number(prefill.attention_pair_ms)
    return f"prefill: {{token_ms: {token_ms}, attention_pair_ms: {pair_ms}}}"


def _number(value: float) -> str:
    """Return six digits in a form that YAML reads as a number: it wants the point."""
    shown = f"{value:.6g}"
    mantissa, exponent, power = shown.partition("e")
    return shown if "." in mantissa or not exponent else f"{mantissa}.0e{power}"


def _print(found: Calibration) -> None:
    console = Console()
    prompt, output = found.typical_tokens
    facts, fit = found.facts, found.fit
    print(f"step times of {facts.model}, of at most {facts.step_tokens:,} tokens a step")
    table = Table()
    table.add_column("term", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for name in TERMS:
        table.add_row(name, _number(getattr(fit.cost, name)), f"{found.shares[name]:.1%}")
    table.add_section()
    for name in OVERHEADS:
        table.add_row(name, _number(getattr(fit, name)), f"{found.shares[name]:.1%}")
    console.print(table)
    print(
        f"share: of a cold request of {prompt:,} prompt and {output:,} output tokens, alone\n"
        f"{fit.rows} measurements, median error {fit.error:.1%}, {fit.outliers} outliers\n"
        f"router configuration: {_prefill_line(found.prefill)}"
    )
    if found.runs:
        print("held-out runs of mixed requests with Poisson arrivals:")
        console.print(_runs_table(found.runs))
        ttft, tpot = median_errors(found.runs)
        print(f"median error of held-out runs: TTFT {ttft:.1%}, TPOT {tpot:.1%}")


def _runs_table(runs: tuple[HeldOut, ...]) -> Table:
    table = Table()
    for name in ("requests", "TTFT ms", "predicted", "error", "TPOT ms", "predicted", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for run_ in runs:
        table.add_row(
            str(run_.requests),
            f"{run_.ttft_ms:.1f}",
            f"{run_.predicted_ttft_ms:.1f}",
            f"{run_.ttft_error:+.1%}",
            f"{run_.tpot_ms:.2f}",
            f"{run_.predicted_tpot_ms:.2f}",
            f"{run_.tpot_error:+.1%}",
        )
    return table
