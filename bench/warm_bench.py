"""The first requests after a restart, with and without warm-up: hits and times to first token.

    python bench/warm_bench.py [--rounds N] [--rate R] [--first N] [--own N] [--speed-up X]

Three bundled workers with the clock of an 8B model on an H100, times ``--speed-up``, a sidecar
each, one router. Twelve system prompts of 4,096 tokens, their shares of the traffic by Zipf's law,
each request with ``own`` tokens of its own. One worker is killed under load and started again.
Looked at are the ``first`` requests from the moment on at which the router knows of its new life:
all of them, and those that it answered. Its warm-up, where there is one, begins then, under the
same load. Rounds take turns, with the same draws.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "tests"))

from support.fleet import MODEL, FleetPlan, until
from support.warm import WarmFleet, tokens_of

PREFIXES: Final = 12
PREFIX_TOKENS: Final = 4_096
OUTPUT_TOKENS: Final = 4
WORKERS: Final = 3
WARM_REQUESTS: Final = 90
"""Sent before the restart."""


@dataclass(slots=True)
class Served:
    """One request: when it was sent, who answered, how long until the first token, what was hit."""

    sent_s: float
    replica: str
    ttft_s: float
    cached_tokens: int
    prompt_tokens: int


@dataclass(slots=True)
class Traffic:
    """An open loop of requests, a fixed number per second, in the order of a seed."""

    fleet: WarmFleet
    rate_per_s: float
    own_tokens: int
    draw: random.Random
    served: list[Served] = field(default_factory=list)

    async def run(self) -> None:
        """Send until cancelled."""
        shares = [1.0 / rank for rank in range(1, PREFIXES + 1)]
        prefixes = [tokens_of(f"system {index}", PREFIX_TOKENS) for index in range(PREFIXES)]
        async with asyncio.TaskGroup() as tasks:
            number, due_s = 0, time.monotonic()
            while True:
                [prefix] = self.draw.choices(prefixes, shares)
                prompt = prefix + tokens_of(f"own {number}", self.own_tokens)
                tasks.create_task(self.ask(prompt))
                number, due_s = number + 1, due_s + 1.0 / self.rate_per_s
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def ask(self, prompt: list[int]) -> None:
        """Send one request, and note what it got; one that a dying worker takes along is none."""
        with contextlib.suppress(aiohttp.ClientError):
            await self._ask(prompt)

    async def _ask(self, prompt: list[int]) -> None:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_s, first_s, usage = time.monotonic(), 0.0, None
        url = f"{self.fleet.router.url}/v1/completions"
        async with self.fleet.http.post(url, data=json.dumps(body)) as answer:
            if answer.status != 200:  # noqa: PLR2004
                return
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    first_s = first_s or time.monotonic()
                    usage = json.loads(line[6:]).get("usage") or usage
            if usage is None:
                return
            details = usage.get("prompt_tokens_details") or {}
            self.served.append(
                Served(
                    sent_s,
                    answer.headers["x-warmroute-replica"],
                    first_s - sent_s,
                    int(details.get("cached_tokens") or 0),
                    int(usage["prompt_tokens"]),
                )
            )


async def one_run(folder: Path, options: argparse.Namespace, *, is_warmed: bool) -> dict[str, Any]:
    """Run one fleet through a restart; return its figures."""
    plan = FleetPlan(replicas=0, routers=0, pages=16_384)
    async with WarmFleet(folder, plan) as fleet:
        told = "on" if is_warmed else "off"
        tell(f"{WORKERS} workers, a sidecar each and a router start, warm-up {told}")
        clock = ("--preset", "llama-8b-h100", "--speed-up", str(options.speed_up))
        await fleet.start_engines(WORKERS, *clock)
        await fleet.add_router(
            warm_up={"enabled": is_warmed},
            hot_prefix={},
            health={"slow_start_s": 60.0 / options.rate},
        )
        draw = random.Random(1)  # noqa: S311 - traffic
        traffic = Traffic(fleet, options.rate, options.own, draw)
        load = asyncio.create_task(traffic.run())
        tell(f"traffic: {WARM_REQUESTS} requests at {options.rate:g} per second")
        await asyncio.sleep(WARM_REQUESTS / options.rate)
        tell("w0 is killed under load and started again")
        await fleet.restart(0)
        since_s = time.monotonic()
        tell(f"w0 is back: waiting for the answers to {options.first} requests")

        async def are_served() -> bool:
            if load.done():
                await load  # ends with what ended it
            return len(after()) >= int(options.first)

        def after() -> list[Served]:
            return sorted((one for one in traffic.served if one.sent_s >= since_s), key=_sent)

        await until(are_served, "the first requests after the restart", 600.0)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        if is_warmed:
            tell("waiting for the end of its warm-up")
        job = await fleet.job("warm_up", "w0") if is_warmed else {}
        first = after()[: options.first]
        own = [one for one in first if one.replica == "w0"]
        return {"all": figures(first), "w0": figures(own), "warm_up": job}


def tell(phase: str) -> None:
    """Say on stderr what a run is at."""
    print(f"{time.strftime('%H:%M:%S')}  {phase}", file=sys.stderr, flush=True)


def _sent(one: Served) -> float:
    return one.sent_s


def figures(served: list[Served]) -> dict[str, float]:
    """Return counts, the share of tokens that were cached, and times to first token in ms."""
    times = sorted(1e3 * one.ttft_s for one in served)
    prompt = sum(one.prompt_tokens for one in served)
    return {
        "requests": len(served),
        "token_hit": sum(one.cached_tokens for one in served) / prompt if prompt else 0.0,
        "mean_ms": statistics.fmean(times) if times else 0.0,
        "p95_ms": times[min(len(times) - 1, int(0.95 * len(times)))] if times else 0.0,
    }


async def main(options: argparse.Namespace) -> None:
    """Run the rounds, and print the medians."""
    runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for number in range(options.rounds):
        for is_warmed in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                run = await one_run(Path(folder), options, is_warmed=is_warmed)
            runs[is_warmed].append(run)
            print(f"round {number + 1}, warm-up {'on' if is_warmed else 'off'}: {run}", flush=True)
    print("warm-up | of | requests | token hit ratio | mean TTFT ms | p95 TTFT ms")
    for is_warmed, rows in runs.items():
        for which in ("all", "w0"):
            told = {
                key: statistics.median([row[which][key] for row in rows]) for key in rows[0][which]
            }
            print(
                f"{'on' if is_warmed else 'off'} | {which} | {told['requests']:.0f} | "
                f"{told['token_hit']:.1%} | {told['mean_ms']:.0f} | {told['p95_ms']:.0f}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (default: 3)")
    parser.add_argument(
        "--rate", type=float, default=12.0, help="requests per second (default: 12)"
    )
    parser.add_argument(
        "--own", type=int, default=1_024, help="tokens that are a request's own (default: 1024)"
    )
    parser.add_argument(
        "--speed-up", type=float, default=1.0, help="of the workers' clock (default: 1)"
    )
    parser.add_argument("--first", type=int, default=120, help="requests looked at (default: 120)")
    asyncio.run(main(parser.parse_args()))
