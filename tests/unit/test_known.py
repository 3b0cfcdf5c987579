"""Tokens that were asked for stay what they were, whatever they share with others."""

from __future__ import annotations

from array import array
from random import Random

from prompt.known import KnownTokens
from state.model import BlockId
from state.prefix import chain_of

ROOT = BlockId(b"\2" * 16)


def packed_of(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


def test_prompts_that_share_beginnings_keep_their_ids_and_chains() -> None:
    random = Random(3)
    known = KnownTokens()
    prompts = [[random.randrange(2**32) for _ in range(3_000)]]
    for key in range(120):
        base = random.choice(prompts[-4:])
        kept = random.choice((len(base), len(base), len(base) - 1, 1_024, 1_500, 3))
        fresh = [random.randrange(2**32) for _ in range(random.choice((0, 1, 700, 2_000)))]
        prompts.append([*base[:kept], *fresh])
        known.put(key, packed_of(prompts[-1]))
    for key, ids in enumerate(prompts[1:]):
        tokens = known.get(key)
        assert tokens is not None
        assert tokens.is_exact
        assert tokens.packed == packed_of(ids)
        assert tokens.chain(ROOT, 64, 5) == chain_of(ROOT, packed_of(ids), 64, 5)


def test_a_prompt_that_goes_on_is_hashed_from_where_it_does() -> None:
    known = KnownTokens()
    ids = list(range(50_000))
    first = known.put("a", packed_of(ids))
    longer = known.put("b", packed_of([*ids, *range(100)]))
    assert first._run is not None
    assert longer._run is not None
    assert longer._run.run is first._run.run


def test_memory_is_bounded_and_what_was_used_last_stays() -> None:
    known = KnownTokens(capacity_bytes=200_000)
    for key in range(100):
        known.put(key, packed_of([key] * 2_000))
        known.get(0)
        assert known.used_bytes <= 100_000
    assert known.get(99) is not None
    assert known.get(0) is not None
    assert known.get(50) is None


def test_what_is_put_again_replaces_what_was_there() -> None:
    known = KnownTokens()
    for length in range(1, 50):
        known.put("a", packed_of([length] * length))
        again = known.get("a")
        assert again is not None
        assert again.count == length
    assert known.used_bytes < 49 * 4 + 1_000


def test_many_short_prompts_are_bounded_too() -> None:
    known = KnownTokens(capacity_bytes=100_000)
    for key in range(1_000):
        known.put(key, packed_of([key]))
    assert sum(known.get(key) is not None for key in range(1_000)) < 100
