"""Where the router's own code spends its time: flame graphs of requests and of a streamed chunk.

    python bench/flame_bench.py [--only 1,32,256,chunk] [--kind exact] [--samples 4000]

The router runs without sockets, as in ``request_bench.py`` and ``chunk_bench.py``, and is sampled
every millisecond (``flame.py``) while it works, not while requests are made up. Writes one SVG for
each scenario, and the shares of the files as a table for ``publish.py``.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvloop

from chunk_bench import BURST, TURN_CHARS, Stream
from conversation import Conversations, chars_per_token
from figures import REPORT_HELP, table, write_report
from flame import Sampler, own_shares, share_below, svg
from prompt.codec import load_codec
from request_bench import (
    EXACT,
    KIB,
    KINDS,
    SESSIONS,
    TURN_TOKENS,
    settle,
    subject_of,
    talks_of,
)
from warmroute.corpus import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flame import Stack

CHUNK = "chunk"
SCENARIOS = ("1", "32", "256", CHUNK)
BURST_REQUESTS = 24
WARM_BURSTS = 5
FILES = 8
"""Rows of the table of files."""
STEPS = {
    "the client's connection: head and body": "ClientConnection.data_received",
    "read the prompt": "Proxy._read",
    "- decode it": "ChatTurns.decode",
    "- render and tokenize it": "PromptReader._tokens",
    "choose a replica": "Proxy._choose",
    "- look up what is cached, make views": "Outlook.views",
    "- the policy": "ExpectedTtft.pick",
    "send it on": "Proxy._try",
    "the replica's answer, a chunk": "UpstreamConnection.data_received",
    "account and record": "Proxy._account",
}
"""Steps of a request and the functions that are theirs, with all that they call."""


async def sampled_requests(
    kind: str, size_kib: int, tokenizer: Path, samples: int
) -> dict[Stack, int]:
    """Return the stacks of requests of one size."""
    chars = int(TURN_TOKENS * chars_per_token(tokenizer))
    talks = talks_of(size_kib, chars, load_codec(tokenizer))
    subject = await subject_of(kind, load_codec(tokenizer))
    await subject.client.burst(list(itertools.islice(talks, SESSIONS)))
    settle()
    with Sampler() as sampler:
        for at in itertools.count():
            turns = list(itertools.islice(talks, BURST_REQUESTS))
            subject.refresh()
            sampler.is_on = at >= WARM_BURSTS
            await subject.client.burst(turns)
            sampler.is_on = False
            if sampler.samples >= samples:
                return sampler.stacks()
    raise AssertionError


async def sampled_chunks(kind: str, tokenizer: Path, samples: int) -> dict[Stack, int]:
    """Return the stacks of chunks of one stream."""
    [body] = Conversations(KIB, 1, TURN_CHARS, 1, stamp="").openers()
    stream = await Stream.opened(kind, load_codec(tokenizer), body)
    settle()
    with Sampler() as sampler:
        for at in itertools.count():
            sampler.is_on = at >= WARM_BURSTS
            await stream.burst(BURST)
            sampler.is_on = False
            if sampler.samples >= samples:
                return sampler.stacks()
    raise AssertionError


def title_of(scenario: str, kind: str) -> str:
    """Return what a graph shows."""
    what = "a streamed chunk" if scenario == CHUNK else f"a request of {scenario} KiB"
    return f"{what}, {kind}, without sockets"


def file_of(scenario: str) -> str:
    """Return the name of a graph's file."""
    return f"profile-{scenario if scenario == CHUNK else f'{scenario}kib'}.svg"


Shares = dict[str, dict[str, float]]


def share_table(title: str, shares: Shares, names: Sequence[str]) -> str:
    """Return the shares of some names, by scenario."""
    rows = [[name, *(f"{found.get(name, 0.0):.0%}" for found in shares.values())] for name in names]
    heads = ("a chunk" if scenario == CHUNK else f"{scenario} KiB" for scenario in shares)
    return table([title, *heads], rows)


def largest(shares: Shares) -> list[str]:
    """Return the names that take most of any scenario, the largest first."""
    most: dict[str, float] = {}
    for found in shares.values():
        for name, share in found.items():
            most[name] = max(most.get(name, 0.0), share)
    return sorted(most, key=lambda name: -most[name])[:FILES]


async def run(options: argparse.Namespace, tokenizer: Path) -> None:
    """Sample the wanted scenarios; write graphs and table."""
    steps: Shares = {}
    files: Shares = {}
    options.folder.mkdir(parents=True, exist_ok=True)
    for scenario in options.scenarios:
        if scenario == CHUNK:
            stacks = await sampled_chunks(options.kind, tokenizer, options.samples)
        else:
            size_kib = int(scenario)
            stacks = await sampled_requests(options.kind, size_kib, tokenizer, options.samples)
        path = options.folder / file_of(scenario)
        path.write_text(svg(stacks, title_of(scenario, options.kind)), encoding="utf-8")
        steps[scenario] = {step: share_below(stacks, name) for step, name in STEPS.items()}
        files[scenario] = own_shares(stacks)
        print(f"{path}: {path.stat().st_size / KIB:.0f} KiB", flush=True)
    tables = [
        share_table("with all that it calls", steps, list(STEPS)),
        share_table("in a file, and what it calls of libraries", files, largest(files)),
    ]
    path = write_report(options.report, {"steps": steps, "files": files}, tables)
    print("\n" + "\n\n".join(tables) + f"\n\nall values and tables: {path}.json, .md")


def main() -> None:
    """Sample; graphs go to files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default=",".join(SCENARIOS), help="scenarios, with commas")
    parser.add_argument("--kind", default=EXACT, choices=KINDS)
    parser.add_argument("--samples", type=int, default=4_000, help="of each scenario")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"), help="of the graphs")
    parser.add_argument("--report", default="profiles", help=REPORT_HELP)
    options = parser.parse_args()
    options.scenarios = options.only.split(",")
    if not set(options.scenarios) <= set(SCENARIOS):
        parser.error(f"--only: expected some of {','.join(SCENARIOS)}")
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        uvloop.run(run(options, write_tokenizer(Path(name), 0)))


if __name__ == "__main__":
    main()
