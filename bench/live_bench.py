"""Time to first token of one live replay through several routers, in front of the same engines.

    python bench/live_bench.py [--engines worker|vllm] [--rounds 5] [--quick]

Two engines with sidecars: the bundled worker on NumPy, or the vLLM that WARMROUTE_VLLM names. The
trace has the shape of Mooncake's: agents that share system prompts, conversations that grow turn by
turn, blocks of 512 tokens; ``warmroute replay`` sends it with all lengths shrunken. Each round goes
through every router, in another order; before each, the engines forget everything, and prompts are
made of another seed. Shown are medians of the rounds. A peer is measured where it is installed
(make bench-peers).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "tests"))

import aiohttp
from msgspec import Struct, structs

from contender import VLLM, label, missing
from figures import Figures, ratio_table, write_report
from meter import Noise
from peers.install import peer_python
from support.engine_process import Engines, EngineStartError
from support.fleet import FleetPlan, LocalFleet, until
from support.mid_llama import CONTEXT_TOKENS, write_llama
from support.port import free_ports
from support.vllm import (
    MODEL,
    PAGE_TOKENS,
    VARIABLE,
    NoEngineError,
    vllm_command,
    vllm_executable,
)
from support.worker_engine import worker_command
from warmroute.local import ChildFailedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from support.engine_process import Command

ROOT: Final = Path(__file__).resolve().parent.parent
OWN, ROUND_ROBIN = "warmroute", "warmroute, round robin"
POLICIES: Final = {OWN: "expected_ttft", ROUND_ROBIN: "round_robin"}
BLOCK_TOKENS: Final = 512
SHRINK: Final = 16
ENGINES: Final = 2
EXIT_FAILED: Final = 1
HTTP_OK: Final = 200
WARM_UP: Final = 8
CONFIG: Final = {"receipts": True}
START_S: Final = 120.0
MEAN, P50, P99, HITS, FAILED, LATE = (
    "mean TTFT, ms",
    "p50 TTFT, ms",
    "p99 TTFT, ms",
    "tokens from cache, %",
    "failed",
    "p99 sent late, ms",
)


class Amounts(Struct, frozen=True, kw_only=True):
    """How much is sent, and the size of the model. Lengths are before shrinking.

    The caches of both engines together hold the sessions that are active, one of them does not.
    """

    rounds: int = 5
    agents: int = 3
    system_blocks: int = 4
    sessions: int = 30
    most_turns: int = 6
    opening_tokens: int = 6_000
    turn_tokens: int = 2_500
    output_tokens: int = 160
    think_s: float = 4.0
    requests_per_s: float = 3.0
    pages: int = 224
    layers: int = 12
    width: int = 512


AMOUNT_FLAGS: Final = {
    "rounds": "measured rounds",
    "sessions": "conversations in a round",
    "requests_per_s": "mean rate of all requests",
    "pages": "KV cache of an engine, in pages of 32 tokens",
    "layers": "of the model",
    "width": "of the model, a multiple of 64",
}
QUICK: Final = Amounts(rounds=1, sessions=6, most_turns=3, think_s=0.5, layers=2, width=64)


def write_trace(path: Path, amounts: Amounts, seed: int) -> int:
    """Write a trace of multi-turn sessions and return the number of its requests.

    An agent's sessions share its system prompt; a turn's prompt has the turns before it.
    """
    draw = random.Random(seed)  # noqa: S311 - reproducible
    ids = itertools.count(10_000)
    systems = [[next(ids) for _ in range(amounts.system_blocks)] for _ in range(amounts.agents)]
    lines: list[dict[str, Any]] = []
    turns_mean = (1 + amounts.most_turns) / 2
    start_s = 0.0
    for _ in range(amounts.sessions):
        chain = list(draw.choice(systems))
        length = BLOCK_TOKENS * len(chain) + draw.randrange(1, 2 * amounts.opening_tokens)
        start_s += draw.expovariate(amounts.requests_per_s / turns_mean)
        at_s = start_s
        for _ in range(draw.randint(1, amounts.most_turns)):
            if length > (CONTEXT_TOKENS - PAGE_TOKENS) * SHRINK - 2 * amounts.output_tokens:
                break
            chain += [next(ids) for _ in range(length // BLOCK_TOKENS - len(chain))]
            output_tokens = draw.randrange(SHRINK, 2 * amounts.output_tokens)
            line = {
                "timestamp": round(1_000 * at_s),
                "input_length": length,
                "output_length": output_tokens,
                "hash_ids": [*chain, next(ids)] if length % BLOCK_TOKENS else list(chain),
            }
            lines.append(line)
            length += output_tokens + draw.randrange(1, 2 * amounts.turn_tokens)
            at_s += draw.expovariate(1 / amounts.think_s)
    lines.sort(key=lambda line: int(line["timestamp"]))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return len(lines)


def engine_command(kind: str, model: Path, amounts: Amounts) -> Command:
    """Return how an engine is started; raises NoEngineError where there is none."""
    size = ("--max-model-len", str(CONTEXT_TOKENS))
    if kind == "worker":
        return worker_command(model, amounts.pages, *size)
    vllm = vllm_executable(os.environ.get(VARIABLE))
    return vllm_command(vllm, model, amounts.pages, *size)


class Stand:
    """The engines, and the routers in front of them by name."""

    def __init__(self, engines: Engines, fleet: LocalFleet) -> None:
        self._engines = engines
        self._fleet = fleet
        self.urls: dict[str, str] = {}

    async def start_routers(self, names: Sequence[str]) -> None:
        """Start every one, and wait until it can route."""
        for name in names:
            if name in POLICIES:
                router = await self._fleet.start_router(policy={"kind": POLICIES[name]})
                await self._fleet.all_up(router, ENGINES)
                self.urls[name] = router.url
            else:
                self.urls[name] = await self._peer()

    async def _peer(self) -> str:
        python = peer_python(VLLM)
        if python is None:
            raise ChildFailedError(VLLM)
        port, metrics_port = free_ports(2)
        command = [str(python), "-m", "vllm_router.launch_router", "--policy", "cache_aware"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
        command += ["--worker-urls", *(engine.url for engine in self._engines.engines)]
        child = self._fleet.processes.start_command(VLLM, command)
        url = f"http://127.0.0.1:{port}"

        async def is_ready() -> bool:
            if not child.is_alive():
                raise ChildFailedError(child.log_tail())
            with contextlib.suppress(aiohttp.ClientError):
                async with self._fleet.http.get(f"{url}/v1/models") as answer:
                    return answer.status == HTTP_OK
            return False

        await until(is_ready, VLLM, START_S)
        return url

    async def forget(self) -> None:
        """Empty the caches of the engines."""
        for engine in self._engines.engines:
            await self._engines.reset(engine)


@contextlib.asynccontextmanager
async def open_stand(folder: Path, kind: str, amounts: Amounts) -> AsyncIterator[Stand]:
    """Start engines and sidecars; none outlives the block."""
    model = write_llama(folder / "model", amounts.layers, amounts.width)
    command = engine_command(kind, model, amounts)
    plan = FleetPlan(replicas=0, model=MODEL, tokenizer=model, routers=0, config=CONFIG)
    async with Engines(folder, command) as engines:
        for number in range(ENGINES):
            engines.add(f"e{number}")
        for engine in engines.engines:
            await engines.ready(engine)
        async with LocalFleet(folder, plan) as fleet:
            for engine in engines.engines:
                flags = ("--block-tokens", str(PAGE_TOKENS))
                await fleet.start_sidecar(engine.name, engine.url, *flags).ready()
            yield Stand(engines, fleet)


async def replayed(trace: Path, url: str, seed: int, *words: str) -> dict[str, Any]:
    """Return the JSON report of one live replay; raises ChildFailedError."""
    report = trace.with_name(f"report-{seed}.json")
    command = [sys.executable, "-m", "warmroute", "replay", str(trace), "--target", url, "--text"]
    command += ["--shrink", str(SHRINK), "--seed", str(seed), "--json", str(report), *words]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, err = await process.communicate()
    if process.returncode:
        raise ChildFailedError(err.decode(errors="replace"))
    told: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return told


def note(figures: Figures, name: str, told: dict[str, Any]) -> float:
    """Add what a replay came to and return its mean time to first token."""
    score = told["runs"][0]["score"]
    mean_ms = 1_000 * float(score["ttft"]["mean_s"])
    figures.add(MEAN, name, mean_ms)
    figures.add(P50, name, 1_000 * score["ttft"]["p50_s"])
    figures.add(P99, name, 1_000 * score["ttft"]["p99_s"])
    figures.add(HITS, name, 100 * (score["token_hit_ratio"] or 0.0))
    figures.add(FAILED, name, score["failed"])
    figures.add(LATE, name, 1_000 * told["live"]["p99_s"])
    return mean_ms


async def measured(
    kind: str, names: Sequence[str], amounts: Amounts, figures: Figures
) -> dict[str, list[float]]:
    """Play all rounds; return each contender's mean to that of the first, round by round."""
    ratios: dict[str, list[float]] = {name: [] for name in names[1:]}
    with tempfile.TemporaryDirectory(prefix="warmroute-bench-") as directory:
        folder = Path(directory)
        async with open_stand(folder, kind, amounts) as stand:
            await stand.start_routers(names)
            for number in range(amounts.rounds + 1):
                trace = folder / f"trace-{number}.jsonl"
                requests = write_trace(trace, amounts, number)
                order = [*names[number % len(names) :], *names[: number % len(names)]]
                means = {}
                for name in order:
                    await stand.forget()
                    seed = number * len(names) + names.index(name)
                    # The first round, a short one, warms up.
                    words = () if number else ("--limit", str(WARM_UP))
                    told = await replayed(trace, stand.urls[name], seed, *words)
                    if number:
                        means[name] = note(figures, name, told)
                        print(
                            f"round {number}, {requests} requests, {label(name)}: mean TTFT"
                            f" {means[name]:.1f} ms",
                            flush=True,
                        )
                for name in names[1:] if number else ():
                    ratios[name].append(means[name] / means[names[0]])
    return ratios


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--engines", choices=("worker", "vllm"), default="worker")
    parser.add_argument("--quick", action="store_true", help="small amounts: does it work?")
    for name, text in AMOUNT_FLAGS.items():
        kind = type(getattr(Amounts(), name))
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    return parser.parse_args(words)


def main() -> None:
    """Measure, print the table and write all values beside."""
    options = options_of(sys.argv[1:])
    given = {name: getattr(options, name) for name in AMOUNT_FLAGS}
    amounts = structs.replace(
        QUICK if options.quick else Amounts(),
        **{name: value for name, value in given.items() if value is not None},
    )
    names = [OWN, ROUND_ROBIN]
    absent = missing(VLLM)
    if absent is None:
        names.append(VLLM)
    else:
        print(f"{VLLM}: {absent}")
    noise, figures = Noise(), Figures()
    try:
        ratios = asyncio.run(measured(options.engines, names, amounts, figures))
    except (NoEngineError, EngineStartError, ChildFailedError) as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_FAILED)
    columns = {name: label(name) for name in names}
    cells = ratio_table(figures, columns, OWN, "{:,.1f}".format, (HITS, FAILED, LATE))
    said = [
        f"{label(name)}: mean TTFT x{statistics.median(all_of):.2f} that of {OWN}, the median of"
        f" {len(all_of)} rounds ({min(all_of):.2f} to {max(all_of):.2f})."
        for name, all_of in ratios.items()
    ]
    setting = f"Engines: 2 x {options.engines}. {amounts}"
    told = {"setting": setting, "figures": figures.plain(), "ratios": ratios}
    part = "" if amounts == Amounts() else "-part"
    path = write_report(f"live-{options.engines}{part}", told, [cells, *said])
    print("\n".join(["", cells, "", *said, "", setting, noise.told()]))
    print(f"all values and tables: {path}.json, .md")


if __name__ == "__main__":
    main()
