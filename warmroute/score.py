"""What a run achieved: hit ratios, times to first token, balance, and the best that was possible.

- *token hit*: prompt tokens that came from a cache, of all prompt tokens, as the engines reported.
- *request hit*: requests of which at least half of the prompt came from a cache.
- *imbalance*: replicas x the largest share of requests that one of them got; 1 is even.
- *ideal*: one cache that never forgets and is never behind, fed with the same requests in the
  order in which they started.
"""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from rich.table import Table

from state.model import BlockId, ModelIdentity
from state.prefix import TOKEN_BYTES, cacheable_tokens, chain_of, chain_root

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

HIT_SHARE: Final = 0.5
"""A request is a hit when this part of its prompt was cached."""
UNKNOWN: Final = "-"


class Sample(Struct, frozen=True, kw_only=True):
    """One request that was answered. ``ttft_s`` None: nothing was timed."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float | None = None
    replica: str | None = None


class Score(Struct, frozen=True, kw_only=True):
    """What a run achieved; None is what was not measured."""

    requests: int
    prompt_tokens: int
    computed_tokens: int
    request_hit_ratio: float
    token_hit_ratio: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    imbalance: float | None


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that ``share`` of all do not exceed (nearest rank)."""
    if not values:
        return None
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def imbalance_of(served: Iterable[str | None], replicas: int) -> float | None:
    """Return ``replicas`` x the largest share; None where some request's replica is unknown."""
    counts = Counter(served)
    if not counts or None in counts:
        return None
    return replicas * max(counts.values()) / counts.total()


def score_of(samples: Sequence[Sample], replicas: int) -> Score:
    """Return the score of one run over ``replicas``."""
    prompt_tokens = sum(sample.prompt_tokens for sample in samples)
    cached_tokens = sum(sample.cached_tokens for sample in samples)
    hits = sum(sample.cached_tokens >= HIT_SHARE * sample.prompt_tokens for sample in samples)
    times = [sample.ttft_s for sample in samples if sample.ttft_s is not None]
    return Score(
        requests=len(samples),
        prompt_tokens=prompt_tokens,
        computed_tokens=prompt_tokens - cached_tokens,
        request_hit_ratio=hits / max(1, len(samples)),
        token_hit_ratio=cached_tokens / max(1, prompt_tokens),
        ttft_p50_s=quantile(times, 0.5),
        ttft_p99_s=quantile(times, 0.99),
        imbalance=imbalance_of((sample.replica for sample in samples), replicas),
    )


class InfiniteCache:
    """One cache of pages that never forgets; tells what it would have saved."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._root = chain_root(ModelIdentity(model="ideal", block_tokens=page_tokens), 0)
        self._held: set[BlockId] = set()

    @property
    def held_tokens(self) -> int:
        """All distinct content so far: the working set."""
        return len(self._held) * self._page_tokens

    def ask(self, packed_prompt: bytes) -> Sample:
        """Return what of a prompt is held, then hold all of it."""
        chain = self._chain(packed_prompt)
        missing = (place for place, page in enumerate(chain) if page not in self._held)
        held_pages = next(missing, len(chain))
        prompt_tokens = len(packed_prompt) // TOKEN_BYTES
        # A page that holds the last token does not count: the engine computes that one itself.
        usable_pages = min(held_pages, cacheable_tokens(prompt_tokens) // self._page_tokens)
        self._held.update(chain)
        return Sample(prompt_tokens=prompt_tokens, cached_tokens=usable_pages * self._page_tokens)

    def hold(self, packed_tokens: bytes) -> None:
        """Hold a prompt together with its answer."""
        self._held.update(self._chain(packed_tokens))

    def _chain(self, packed_tokens: bytes) -> tuple[BlockId, ...]:
        return chain_of(self._root, packed_tokens, self._page_tokens, 0)


def score_table(scores: Mapping[str, Score], ideal: Score, title: str, caption: str) -> Table:
    """Return the table of all policies; the ideal stands last."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("policy", no_wrap=True)
    for name in ("request hit", "token hit", "TTFT p50", "TTFT p99", "imbalance"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, score in scores.items():
        table.add_row(name, *_cells(score))
    table.add_section()
    table.add_row("infinite cache", *_cells(ideal), style="dim")
    return table


def _cells(score: Score) -> tuple[str, ...]:
    return (
        f"{score.request_hit_ratio:.1%}",
        f"{score.token_hit_ratio:.1%}",
        _seconds(score.ttft_p50_s),
        _seconds(score.ttft_p99_s),
        UNKNOWN if score.imbalance is None else f"{score.imbalance:.2f}",
    )


def _seconds(value_s: float | None) -> str:
    return UNKNOWN if value_s is None else f"{value_s:.3f} s"


def findings(scores: Mapping[str, Score], ideal: Score) -> list[str]:
    """Return what the numbers say, in two lines of text that hold whatever they are."""
    computed = ", ".join(f"{name} {score.computed_tokens:,}" for name, score in scores.items())
    lines = [f"Prompt tokens computed: {computed}; one infinite cache {ideal.computed_tokens:,}."]
    names = list(scores)
    base = scores[names[0]].ttft_p50_s
    if base:
        ratios = ", ".join(
            f"{name} {(scores[name].ttft_p50_s or 0) / base:.0%}" for name in names[1:]
        )
        lines.append(f"Median time to first token, {names[0]} being 100%: {ratios}.")
    return lines
