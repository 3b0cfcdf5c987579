"""``warmroute kv size``: what a model's KV cache takes.

For each token, each layer keeps one key and one value per KV head:
``2 * layers * kv_heads * head_width * bytes per number``.
"""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from warmroute.cli import UsageError

if TYPE_CHECKING:
    import argparse

    from sidecar.compute.model import ModelConfig

NUMBER_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
DECIMAL_UNITS: Final = ("B", "KB", "MB", "GB", "TB", "PB")
PAGE_TOKENS: Final = 16
LARGEST_TOKENS: Final = 1 << 40
_MEMORY: Final = re.compile(
    r"([0-9]{1,20}(?:\.[0-9]{1,9})?) ?([KMGTP]?i?B?)", re.ASCII | re.IGNORECASE
)


class Fit(Struct, frozen=True, kw_only=True):
    """What fits in ``memory_bytes`` of pages: ``sequences`` of the context that was asked for."""

    memory_bytes: int
    pages: int
    tokens: int
    sequences: int


class KvSize(Struct, frozen=True, kw_only=True):
    """The KV cache of ``sequences`` that are ``context_tokens`` long, in fixed pages.

    ``waste_tokens`` and ``waste_bytes`` are the empty end of each sequence's last page.
    """

    dtype: str
    page_tokens: int
    context_tokens: int
    sequences: int
    token_bytes: int
    page_bytes: int
    sequence_bytes: int
    sequence_pages: int
    waste_tokens: int
    waste_bytes: int
    total_pages: int
    total_bytes: int
    fit: Fit | None = None


class Plan(Struct, frozen=True, kw_only=True):
    """What to size. ``memory_bytes`` None: nothing has to fit anywhere."""

    context_tokens: int
    sequences: int
    page_tokens: int = PAGE_TOKENS
    memory_bytes: int | None = None


def size_cache(config: ModelConfig, dtype: str, plan: Plan) -> KvSize:
    """Return what ``plan`` takes; ``dtype`` is a key of NUMBER_BYTES."""
    numbers = 2 * config.layers * config.kv_heads * config.head_width
    token_bytes = numbers * NUMBER_BYTES[dtype]
    page_bytes = token_bytes * plan.page_tokens
    sequence_pages = -(-plan.context_tokens // plan.page_tokens)
    waste_tokens = sequence_pages * plan.page_tokens - plan.context_tokens
    fit = None
    if plan.memory_bytes is not None:
        pages = plan.memory_bytes // page_bytes
        fit = Fit(
            memory_bytes=plan.memory_bytes,
            pages=pages,
            tokens=pages * plan.page_tokens,
            sequences=pages // sequence_pages,
        )
    return KvSize(
        dtype=dtype,
        page_tokens=plan.page_tokens,
        context_tokens=plan.context_tokens,
        sequences=plan.sequences,
        token_bytes=token_bytes,
        page_bytes=page_bytes,
        sequence_bytes=sequence_pages * page_bytes,
        sequence_pages=sequence_pages,
        waste_tokens=waste_tokens,
        waste_bytes=waste_tokens * token_bytes,
        total_pages=sequence_pages * plan.sequences,
        total_bytes=sequence_pages * plan.sequences * page_bytes,
        fit=fit,
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the action's flags."""
    parser.add_argument("model", type=Path, metavar="MODEL_DIR", help="folder with config.json")
    parser.add_argument("--context", required=True, metavar="N", help="tokens of each sequence")
    parser.add_argument("--sequences", required=True, metavar="M", help="sequences at a time")
    parser.add_argument(
        "--page-tokens", default=str(PAGE_TOKENS), metavar="N", help=f"default: {PAGE_TOKENS}"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", *NUMBER_BYTES],
        help="precision of keys and values (default: auto, as the weights are stored)",
    )
    parser.add_argument("--memory", metavar="BYTES", help="room for pages: 24GiB, 80GB, bytes")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the figures; raises UsageError naming the wrong flag or field."""
    from sidecar.compute.model import ModelError, read_model_config  # noqa: PLC0415

    try:
        config = read_model_config(options.model)
    except ModelError as error:
        message = f"{options.model}: {error}"
        raise UsageError(message) from None
    plan = Plan(
        context_tokens=_count("--context", options.context),
        sequences=_count("--sequences", options.sequences),
        page_tokens=_count("--page-tokens", options.page_tokens),
        memory_bytes=None if options.memory is None else parse_memory(options.memory),
    )
    if plan.context_tokens > config.max_position_tokens:
        message = (
            f"--context: expected at most {config.max_position_tokens} tokens, the model's "
            f"longest text, got {plan.context_tokens}"
        )
        raise UsageError(message)
    dtype = config.torch_dtype if options.dtype == "auto" else options.dtype
    size = size_cache(config, dtype, plan)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(size)).decode())
    else:
        print("\n".join(_lines(config, size)))
    return 0


def parse_memory(text: str) -> int:
    """Return bytes of ``24GiB`` (powers of 1024), ``24GB`` (of 1000) or a number of bytes."""
    found = _MEMORY.fullmatch(text.strip())
    units: dict[str, int] = {"": 1}
    for power, (unit, decimal_unit) in enumerate(zip(UNITS, DECIMAL_UNITS, strict=True)):
        units[decimal_unit.lower()] = 1000**power
        units[unit.lower()] = 1024**power
    if found is None or found[2].lower() not in units:
        message = f"--memory: expected a size such as 24GiB, 80GB or bytes, got {text!r}"
        raise UsageError(message)
    return int(Decimal(found[1]) * units[found[2].lower()])


def _count(flag: str, text: str) -> int:
    is_count = text.isascii() and text.isdecimal() and len(text) <= len(str(LARGEST_TOKENS))
    if not is_count or not 1 <= int(text) <= LARGEST_TOKENS:
        message = f"{flag}: expected a whole number of at least 1, got {text!r}"
        raise UsageError(message)
    return int(text)


def _lines(config: ModelConfig, size: KvSize) -> list[str]:
    shape = f"{config.layers} layers x {config.kv_heads} KV heads x {config.head_width}"
    held = f"{size.context_tokens} tokens in {size.sequence_pages} pages"
    lines = [
        f"{config.family}, {shape}, {size.dtype}, pages of {size.page_tokens} tokens",
        f"per token      {_bytes(size.token_bytes)}",
        f"per page       {_bytes(size.page_bytes)}",
        f"per sequence   {_bytes(size.sequence_bytes)}: {held}",
        f"  of it empty  {_bytes(size.waste_bytes)}: {size.waste_tokens} tokens of the last page",
        f"{size.sequences} sequences: {size.total_pages} pages, {_bytes(size.total_bytes)}",
    ]
    fit = size.fit
    if fit is not None:
        what = f"{fit.sequences} sequences ({fit.tokens} tokens, {fit.pages} pages)"
        lines.append(f"{_bytes(fit.memory_bytes)} have room for {what}")
        if fit.sequences < size.sequences:
            missing_bytes = size.total_bytes - fit.pages * size.page_bytes
            lines.append(f"not enough for {size.sequences}: {_bytes(missing_bytes)} are missing")
    return lines


def _bytes(count: int) -> str:
    """Return ``count`` exactly, and in a readable unit where that is shorter."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    exact = f"{count:,} bytes"
    return exact if power == 0 else f"{exact} ({count / 1024**power:.2f} {UNITS[power]})"
