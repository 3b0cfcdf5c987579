"""Cold and warm: how long the first token takes when no cache holds the prefix, and when one does.

Each prefix is asked for twice in turn, streamed, with another ending each time. The first request
of a pair is cold, the second one warm. Prefixes differ from their first words on, so that none
warms another.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta, Struct
from rich.table import Table

from state.prefix import TOKEN_BYTES
from warmroute.corpus import Prose
from warmroute.score import Sample, quantile
from warmroute.workload import Message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prompt.codec import Codec
    from warmroute.contest import Settle
    from warmroute.driver import ChatClient, Reply
    from warmroute.progress import Progress

REPLY_TOKENS: Final = 4
ENDING_CHARS: Final = 120
ENDINGS: Final = ("First: ", "Second: ")
PREFIX_CHARS_PER_TOKEN: Final = 12
"""More than a token has on average: a prefix is cut from a text that is too long."""


class WarmthSettings(Struct, frozen=True, kw_only=True):
    """What the flags say. ``prefixes`` None: as many as the compute has time for."""

    prefixes: Annotated[int, Meta(ge=0, le=100)] | None = None
    prefix_tokens: Annotated[int, Meta(ge=64, le=16_000)] = 2_000


class Probe(Struct, frozen=True):
    """One prefix and the two prompts that begin with it."""

    shared_tokens: int
    cold: tuple[Message, ...]
    warm: tuple[Message, ...]


class Warmth(Struct, frozen=True, kw_only=True):
    """What was measured: one cold and one warm request for each prefix, in their order.

    ``shared_tokens`` is the length of each prefix with what the chat template puts around it.
    ``ratio`` is the cold median over the warm one; None where nothing was timed.
    """

    prefix_tokens: int
    shared_tokens: tuple[int, ...]
    cold: tuple[Sample, ...]
    warm: tuple[Sample, ...]
    same_replica: int
    cold_ttft_p50_s: float | None
    warm_ttft_p50_s: float | None
    ratio: float | None


def build_probes(settings: WarmthSettings, codec: Codec, seed: int) -> tuple[Probe, ...]:
    """Return the prompts: each pair has ``prefix_tokens`` leading tokens in common, or few more."""
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    prose = Prose(rng)
    return tuple(
        _probe(prose, index, settings.prefix_tokens, codec)
        for index in range(settings.prefixes or 0)
    )


def _probe(prose: Prose, index: int, prefix_tokens: int, codec: Codec) -> Probe:
    rules = prose.rules(prefix_tokens * PREFIX_CHARS_PER_TOKEN)
    words = f"{index}. Handbook of {prose.title()}. Its rules: {rules}".split(" ")
    endings = [{"role": "user", "content": each + prose.task(ENDING_CHARS)} for each in ENDINGS]

    def prompts(kept_words: int) -> tuple[tuple[Message, ...], ...]:
        system = {"role": "system", "content": " ".join(words[:kept_words])}
        return tuple((system, ending) for ending in endings)

    def shared_tokens(kept_words: int) -> int:
        return _shared_tokens(prompts(kept_words), codec)

    kept_words = bisect_left(range(len(words)), prefix_tokens, key=shared_tokens)
    return Probe(shared_tokens(kept_words), *prompts(kept_words))


def _shared_tokens(prompts: Sequence[Sequence[Message]], codec: Codec) -> int:
    one, other = (codec.chat_tokens(list(each), None, options={}) for each in prompts)
    end = min(len(one), len(other))
    places = range(0, end, TOKEN_BYTES)
    differs = (at for at in places if one[at : at + TOKEN_BYTES] != other[at : at + TOKEN_BYTES])
    return next(differs, end) // TOKEN_BYTES


async def measure_warmth(
    client: ChatClient, settle: Settle, probes: Sequence[Probe], progress: Progress
) -> list[tuple[Reply, Reply]]:
    """Ask for each prefix twice, one request at a time; raises ChatFailedError.

    ``settle`` waits until the fleet is idle, also in the eyes of the router: a queue that is gone
    must not lead a request away from its cache.
    """

    async def ask(prompt: Sequence[Message]) -> Reply:
        await settle()
        reply = await client.chat(prompt, REPLY_TOKENS)
        progress.advance()
        return reply

    return [(await ask(probe.cold), await ask(probe.warm)) for probe in probes]


def warmth_of(
    prefix_tokens: int, probes: Sequence[Probe], pairs: Sequence[tuple[Reply, Reply]]
) -> Warmth:
    """Return what the replies say."""
    cold, warm = (
        tuple(
            Sample(
                prompt_tokens=reply.prompt_tokens,
                cached_tokens=reply.cached_tokens,
                ttft_s=reply.ttft_s,
                replica=reply.replica,
            )
            for reply in replies
        )
        for replies in ([first for first, _ in pairs], [second for _, second in pairs])
    )
    cold_s, warm_s = (quantile(_times(samples), 0.5) for samples in (cold, warm))
    return Warmth(
        prefix_tokens=prefix_tokens,
        shared_tokens=tuple(probe.shared_tokens for probe in probes),
        cold=cold,
        warm=warm,
        same_replica=sum(
            one.replica is not None and one.replica == other.replica
            for one, other in zip(cold, warm, strict=True)
        ),
        cold_ttft_p50_s=cold_s,
        warm_ttft_p50_s=warm_s,
        ratio=cold_s / warm_s if cold_s and warm_s else None,
    )


def _times(samples: Sequence[Sample]) -> list[float]:
    return [sample.ttft_s for sample in samples if sample.ttft_s is not None]


def warmth_table(warmth: Warmth) -> Table:
    """Return the table of cold and warm."""
    prefixes = len(warmth.cold)
    title = f"cold and warm: {prefixes} prefixes of {warmth.prefix_tokens:,} tokens"
    caption = (
        "Each prefix twice, with another ending each time, one request at a time through"
        " warmroute, the fleet idle; both went to the same worker"
        f" {warmth.same_replica} of {prefixes} times."
    )
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("prefix", no_wrap=True)
    for name in ("TTFT p50", "least", "most", "cached tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, samples in (("cold", warmth.cold), ("warm", warmth.warm)):
        times = _times(samples)
        cached = [sample.cached_tokens for sample in samples]
        shown = (f"{value:.3f} s" for value in (quantile(times, 0.5), min(times), max(times)))
        table.add_row(name, *shown, _span(cached))
    return table


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} - {high:,}"


def warmth_finding(warmth: Warmth) -> str:
    """Return what the table says, in one sentence that holds whatever the numbers are."""
    if warmth.ratio is None:
        return "Cold and warm: nothing was timed."
    return (
        f"Median time to first token of a prefix of {warmth.prefix_tokens:,} tokens: cold is"
        f" {warmth.ratio:.1f} times warm."
    )
