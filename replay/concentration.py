"""How few prefixes or tenants stand for how much: top shares and the Gini coefficient."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec import Struct

from policies.concentration import gini as gini
from policies.concentration import top_share as top_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from replay.outcome import Outcome

LEADERS = 10


class Leader(Struct, frozen=True, kw_only=True):
    """One of the largest groups: its name, its amount and its share of all."""

    name: str
    amount: int
    share: float


class Concentration(Struct, frozen=True, kw_only=True):
    """How an amount spreads over named groups, those with none of it included.

    The shares are None when the whole amount is 0. ``half_groups`` is how many of the largest
    groups hold half of the amount. ``gini`` is 0 when all groups hold the same and (groups - 1) /
    groups when one holds all. ``unnamed`` is the amount that belongs to no named group and is in no
    share.
    """

    groups: int
    amount: int
    unnamed: int
    top_1_share: float | None
    top_10_share: float | None
    top_100_share: float | None
    half_groups: int | None
    gini: float | None
    leaders: tuple[Leader, ...]


class SharingFacts(Struct, frozen=True, kw_only=True):
    """How much the prompts of a replay have in common, as far as its outcomes tell.

    ``shared_request_share`` counts the requests that share at least a block with another one, in
    either order: no more than these can hit. ``repeated_prompts`` is the least number of different
    prompts that make up 90 % of all requests, taking those with the same shared prefix and the same
    length for the same prompt. ``possible_hit_ratio`` is the share of prompt tokens that a cache
    without limits would hit, None where nobody computed it. Shares are None without requests.
    """

    requests: int
    shared_request_share: float | None
    distinct_prefixes: int
    repeated_prompts: int | None
    possible_hit_ratio: float | None
    hit_ratio: float | None


NEARLY_ALL = 0.9


def concentration(amounts: Mapping[str, int]) -> Concentration | None:
    """Return how ``amounts`` spread over their names; "" is no name, and None is without any."""
    named = {name: amount for name, amount in amounts.items() if name}
    if not named:
        return None
    largest = sorted(named.items(), key=lambda item: (-item[1], item[0]))
    total = sum(named.values())
    sums = accumulate(amount for _, amount in largest)
    return Concentration(
        groups=len(named),
        amount=total,
        unnamed=amounts.get("", 0),
        top_1_share=top_share(named.values(), 1),
        top_10_share=top_share(named.values(), 10),
        top_100_share=top_share(named.values(), 100),
        half_groups=_groups_until(sums, 0.5 * total) if total else None,
        gini=gini(named.values()),
        leaders=tuple(
            Leader(name=name, amount=amount, share=amount / total)
            for name, amount in largest[:LEADERS]
            if amount
        ),
    )


def _groups_until(sums: Iterable[float], wanted: float) -> int:
    """Return how many of the running ``sums`` it takes to reach ``wanted``."""
    return next(count for count, reached in enumerate(sums, start=1) if reached >= wanted)


def sharing_facts(
    outcomes: Iterable[Outcome], possible_hit_ratio: float | None = None
) -> SharingFacts:
    """Return what the outcomes tell of their prompts."""
    prompts: Counter[tuple[str, int]] = Counter()
    requests = unshared = prompt_tokens = cached_tokens = 0
    prefixes = set()
    for outcome in outcomes:
        requests += 1
        if outcome.prefix:
            prompts[outcome.prefix, outcome.prompt_tokens] += 1
            prefixes.add(outcome.prefix)
        else:
            unshared += 1
        if outcome.error is None and outcome.cached_tokens is not None:
            prompt_tokens += outcome.prompt_tokens
            cached_tokens += outcome.cached_tokens
    counts = [*(count for _, count in prompts.most_common()), *[1] * unshared]
    return SharingFacts(
        requests=requests,
        shared_request_share=1 - unshared / requests if requests else None,
        distinct_prefixes=len(prefixes),
        repeated_prompts=_groups_until(accumulate(counts), NEARLY_ALL * requests)
        if counts
        else None,
        possible_hit_ratio=possible_hit_ratio,
        hit_ratio=cached_tokens / prompt_tokens if prompt_tokens else None,
    )
