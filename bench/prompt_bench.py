"""What reading a prompt costs: warm turns against the length of their history, cold text, memory.

A warm turn is a known conversation plus one new turn of about 500 tokens, never the same body
twice. Its work: decode, render, tokenize, and the chain of 64-token blocks. Times are CPU of this
process, medians; run it from the project's root.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import resource
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from figures import REPORT_HELP, write_report  # noqa: E402 - the path comes first
from prompt.codec import Codec, load_codec  # noqa: E402
from prompt.reader import CHAT_PATH, COMPLETION_PATH, PromptReader  # noqa: E402
from prompt.segment import PIECE_CHARS  # noqa: E402
from prompt.tokenizer_codec import TokenizerCodec  # noqa: E402
from state.model import ModelIdentity  # noqa: E402
from state.prefix import TOKEN_BYTES, chain_root, pack_tokens  # noqa: E402
from support.data import data_file, json_lines, unpacked  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HISTORY_TOKENS = (2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 128_000)
TURN_TOKENS = 500
TURNS = 9
BUDGET_M_TOKENS = 4
SPEEDS, TIMES = "M tokens per s", "us"
LONG_NEW, ALONE, KNOWN = "a long new text, as a prompt", "tokenizers alone", "a known segment"
BLOCK_TOKENS = 64
CHAIN_ROOT = chain_root(ModelIdentity(model="bench", block_tokens=BLOCK_TOKENS), 0)
TOOL_NAMES = ("search", "read_file", "write_file", "run")


def codec_of(name: str) -> Codec:
    """Return the codec of one of the shared tokenizers."""
    source = data_file(f"tokenizers/{name}")
    with tempfile.TemporaryDirectory() as folder:
        for path in source.glob("*.json"):
            (Path(folder) / path.name).write_bytes(path.read_bytes())
        if not (source / "tokenizer.json").exists():
            packed = unpacked(f"tokenizers/{name}/tokenizer.json.zst")
            (Path(folder) / "tokenizer.json").write_bytes(packed)
        return load_codec(Path(folder))


def prose() -> str:
    """Return a long text: what people and models said in the shared conversations."""
    texts = []
    for name in ("arena_hard_v2", "oasst1_en"):
        for item in json_lines(f"text/{name}.jsonl.zst"):
            texts += [str(message["content"]) for message in item["messages"]]
    return "\n".join(texts)


def turns_of(text: str, tokens_per_char: float) -> Iterator[str]:
    """Yield contents that make a turn of two messages some ``TURN_TOKENS`` long, for ever."""
    chars = int(TURN_TOKENS / tokens_per_char / 2)
    position = 0
    while True:
        if position + chars > len(text):
            position = 7
        yield text[position : position + chars]
        position += chars


def body_of(path: str, messages: list[dict[str, Any]]) -> bytes:
    """Return the body of a request as a client writes it."""
    fields: dict[str, Any] = {"model": "bench"}
    if path == CHAT_PATH:
        parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
        fields["messages"] = messages
        fields["tools"] = [
            {"type": "function", "function": {"name": name, "parameters": parameters}}
            for name in TOOL_NAMES
        ]
    else:
        fields["prompt"] = "\n".join(str(message["content"]) for message in messages)
    fields |= {"stream": True, "max_tokens": 100}
    return json.dumps(fields).encode()


async def warm_us(
    codec: Codec, path: str, text: str, tokens_per_char: float, history_tokens: int
) -> tuple[float, int, int]:
    """Return the median cost of a turn in us of CPU, the body's bytes and the prompt's tokens.

    Each turn is the second one of a conversation of its own, all with the same first message.
    """
    contents = turns_of(text, tokens_per_char)
    roles = ("assistant", "tool") if path == CHAT_PATH else ("user", "user")
    spent_us, tokens, size = [], 0, 0
    async with PromptReader({"bench": codec}, codec) as reader:
        for _ in range(TURNS):
            messages = [{"role": "system", "content": "You are a careful agent. " * 20}]
            messages += [{"role": "user", "content": next(contents)}]
            while len(messages) * TURN_TOKENS / 2 < history_tokens:
                messages += [{"role": role, "content": next(contents)} for role in roles]
            known = (await reader.read(path, body_of(path, messages))).prompts[0]
            known.chain(CHAIN_ROOT, BLOCK_TOKENS, 0)
            messages += [{"role": role, "content": next(contents)} for role in roles]
            body = body_of(path, messages)
            gc.collect()  # the garbage of writing bodies is none of the reader's
            began = time.process_time_ns()
            prompt = (await reader.read(path, body)).prompts[0]
            prompt.chain(CHAIN_ROOT, BLOCK_TOKENS, 0)
            spent_us.append((time.process_time_ns() - began) / 1e3)
            size, tokens = len(body), prompt.count
    return statistics.median(spent_us), size, tokens


def least_s(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the least CPU of this thread, in seconds, of some runs: others make runs dearer."""
    spent_s = []
    for _ in range(repeats):
        began_s = time.thread_time()
        work()
        spent_s.append(time.thread_time() - began_s)
    return min(spent_s)


def _each(way: Callable[[str], bytes], texts: Sequence[str]) -> None:
    for text in texts:
        way(text)


def speeds_of(codec: TokenizerCodec, text: str) -> dict[str, dict[str, float]]:
    """Print and return how fast new text becomes tokens, by each way that it may go.

    In millions of tokens per second; known text in microseconds a segment.
    """
    engine = codec._tokenizer._engine  # noqa: SLF001 - its ways are looked at one by one
    pieces = [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)]
    spaced = [piece for piece in pieces if "  " not in piece and "\n " not in piece]

    def slow(piece: str) -> bytes:
        return pack_tokens(engine.slow_ids(piece, add_special_tokens=False))

    ways: list[tuple[str, Callable[[str], bytes], list[str]]] = [
        ("words that were seen before", engine.packed_short, spaced),
        ("any text, words seen before", engine.packed_short, pieces),
        ("tiktoken" if engine.is_fast else "tokenizers", engine.packed, pieces),
        (ALONE, slow, pieces[:64]),
    ]

    def read() -> int:
        tokens: int = codec.text_prompt(text, add_special_tokens=False).count
        return tokens

    def read_anew() -> int:
        codec.forget()
        return read()

    rows = []
    for name, way, texts in ways:
        tokens = sum(len(way(piece)) for piece in texts) // TOKEN_BYTES
        spent_s = least_s(partial(_each, way, texts))
        rows.append((name, tokens / spent_s / 1e6))
    rows.append((LONG_NEW, read() / least_s(read_anew) / 1e6))
    print(f"millions of tokens per second and core; budget: {BUDGET_M_TOKENS}")
    for name, speed in rows:
        print(f"  {name:<30} {speed:>7.2f}")
    segment_us = least_s(read) * 1e6 / len(pieces)
    print(f"known text: {segment_us:.2f} us a segment of {PIECE_CHARS} characters; budget: 2")
    return {SPEEDS: dict(rows), TIMES: {KNOWN: segment_us}}


def slope_of(points: Sequence[tuple[float, float]]) -> float:
    """Return the log-log slope of the least squares line."""
    xs = [math.log(x) for x, _ in points]
    ys = [math.log(y) for _, y in points]
    return statistics.linear_regression(xs, ys).slope


async def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", default="qwen3", choices=("qwen3", "tiny-chat", "gpt-oss"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--speeds", action="store_true", help="no more than tokens per second")
    parser.add_argument("--report", help=REPORT_HELP)
    arguments = parser.parse_args()
    began = time.perf_counter()
    codec = codec_of(arguments.tokenizer)
    print(f"{arguments.tokenizer}: loaded in {time.perf_counter() - began:.1f} s")
    text = prose()
    sample = text[:400_000]
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_ns = time.process_time_ns()
    prompt = codec.text_prompt(sample, add_special_tokens=False)  # type: ignore[attr-defined]
    cold_s = (time.process_time_ns() - began_ns) / 1e9
    tokens_per_char = prompt.count / len(sample)
    print(f"cold text: {prompt.count / cold_s / 1e6:.2f} M tokens/s per core")
    if isinstance(codec, TokenizerCodec):
        told = speeds_of(codec, sample)
        if arguments.report:
            write_report(arguments.report, told, [])
    if arguments.speeds:
        return
    for path in (CHAT_PATH, COMPLETION_PATH):
        print(f"{path}: us of CPU per turn of {TURN_TOKENS} new tokens")
        points = []
        for history_tokens in HISTORY_TOKENS:
            rounds = [
                await warm_us(codec, path, text, tokens_per_char, history_tokens)
                for _ in range(arguments.rounds)
            ]
            cost_us, size, tokens = min(rounds)
            points.append((tokens, cost_us))
            print(f"  {tokens:>7} tokens {size / 1024:>6.0f} KiB {cost_us:>8.0f} us")
        print(f"  log-log slope {slope_of(points):.2f}")
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"memory: {(after_kib - before_kib) / 1024:.0f} MiB more at the peak")


if __name__ == "__main__":
    asyncio.run(main())
