"""Prompts made up for a trace: they share what the chains share, no more and no less."""

from __future__ import annotations

from itertools import combinations, takewhile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.synthesis import Form, SynthesisError, SynthesisSettings, SyntheticPrompts
from replay.trace import TraceRequest
from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_TOKENS = 16


def block(number: int) -> BlockId:
    return BlockId(number.to_bytes(16, "big"))


def request(
    numbers: Sequence[int], tail_tokens: int = 3, block_tokens: int = BLOCK_TOKENS
) -> TraceRequest:
    prompt_tokens = max(1, len(numbers) * block_tokens + tail_tokens)
    return TraceRequest(
        arrival_s=0.0,
        prompt_tokens=prompt_tokens,
        output_tokens=9,
        chain=tuple(map(block, numbers)),
    )


def shared(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the length of the longest common prefix."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )


def contents(
    requests: Sequence[TraceRequest], block_tokens: int, settings: SynthesisSettings
) -> list[list[object]]:
    """Return each prompt as tokens; a letter and its space are one."""
    prompts = SyntheticPrompts(requests, block_tokens, settings)
    made = [prompts.prompt_for(at, one).content for at, one in enumerate(requests)]
    return [[*one[1::2]] if isinstance(one, str) else [*one] for one in made]


def blocks_of(content: Sequence[object], block_tokens: int) -> list[tuple[object, ...]]:
    whole = len(content) // block_tokens
    return [tuple(content[at * block_tokens : (at + 1) * block_tokens]) for at in range(whole)]


@given(
    chains=st.lists(
        st.tuples(
            st.lists(st.integers(min_value=0, max_value=5), max_size=5),
            st.integers(min_value=0, max_value=40),
        ),
        min_size=2,
        max_size=7,
    ),
    block_tokens=st.integers(min_value=1, max_value=20),
    shrink=st.integers(min_value=1, max_value=6),
    form=st.sampled_from(["tokens", "text"]),
    seed=st.integers(min_value=-(2**63), max_value=2**63),
)
def test_prompts_share_exactly_the_blocks_that_their_chains_share(
    chains: list[tuple[list[int], int]], block_tokens: int, shrink: int, form: Form, seed: int
) -> None:
    requests = [request(numbers, tail, block_tokens) for numbers, tail in chains]
    settings = SynthesisSettings(form=form, shrink=shrink, seed=seed)
    made = contents(requests, block_tokens, settings)
    size = max(1, block_tokens // shrink)
    for (left, left_made), (right, right_made) in combinations(zip(requests, made, strict=True), 2):
        assert shared(blocks_of(left_made, size), blocks_of(right_made, size)) == shared(
            left.chain, right.chain
        )


@given(numbers=st.sets(st.integers(min_value=8, max_value=2**128 - 1), min_size=2, max_size=40))
def test_siblings_differ_in_their_first_token_while_the_vocabulary_has_room(
    numbers: set[int],
) -> None:
    made = contents([request([7, one]) for one in numbers], BLOCK_TOKENS, SynthesisSettings())
    assert len({one[BLOCK_TOKENS] for one in made}) == len(numbers)


def test_a_thousand_siblings_of_one_token_each_are_told_apart_or_refused() -> None:
    requests = [request([one], 0, 1) for one in range(200)]
    made = contents(requests, 1, SynthesisSettings(vocabulary_size=1_000))
    assert len({tuple(one) for one in made}) == 200
    with pytest.raises(SynthesisError, match=r"blocks of 1 tokens, each one of 75, .* shrink less"):
        SyntheticPrompts(requests, 1, SynthesisSettings(vocabulary_size=100))


def test_what_is_a_requests_own_is_no_others_block() -> None:
    requests = [request([], 1, 1) for _ in range(20)] + [request([at], 0, 1) for at in range(20)]
    made = contents(requests, 1, SynthesisSettings(vocabulary_size=100))
    assert len({tuple(one) for one in made}) == 40


def test_a_prompt_does_not_depend_on_the_ones_made_before() -> None:
    requests = [request([1, one], 30) for one in range(50)]
    settings = SynthesisSettings(vocabulary_size=60, shrink=8)
    whole = contents(requests, BLOCK_TOKENS, settings)
    late = SyntheticPrompts(requests, BLOCK_TOKENS, settings).prompt_for(40, requests[40])
    assert late.content == whole[40]


def test_another_seed_gives_other_content_from_the_start() -> None:
    requests = [request([1, 2])]
    one, other = (
        contents(requests, BLOCK_TOKENS, SynthesisSettings(seed=seed))[0] for seed in (1, 2)
    )
    assert shared(one, other) == 0


def test_lengths_are_those_of_the_trace() -> None:
    requests = [request([1, 2], 5), request([], 1)]
    prompts = SyntheticPrompts(requests, BLOCK_TOKENS, SynthesisSettings())
    made = [prompts.prompt_for(at, one) for at, one in enumerate(requests)]
    assert [(one.prompt_tokens, one.output_tokens) for one in made] == [(37, 9), (1, 9)]
    assert [len(one.content) for one in made] == [37, 1]


def test_shrinking_divides_every_length_and_leaves_something_of_each() -> None:
    requests = [request([1, 2], 9), request([], 3)]
    prompts = SyntheticPrompts(requests, BLOCK_TOKENS, SynthesisSettings(shrink=4))
    made = [prompts.prompt_for(at, one) for at, one in enumerate(requests)]
    assert prompts.block_tokens == 4
    assert [(one.prompt_tokens, one.output_tokens) for one in made] == [(10, 2), (1, 2)]


@pytest.mark.parametrize(("size", "low"), [(1_000, 100), (256, 64), (100_000, 100)])
def test_token_ids_are_those_of_the_vocabulary_without_its_beginning(size: int, low: int) -> None:
    settings = SynthesisSettings(vocabulary_size=size)
    ids = SyntheticPrompts([], BLOCK_TOKENS, settings).prompt_for(0, request([], 20_000)).content
    assert isinstance(ids, list)
    assert low <= min(ids) < low + size // 50
    assert size - size // 50 <= max(ids) < size


def test_text_is_one_letter_and_one_space_a_token() -> None:
    settings = SynthesisSettings(form="text")
    made = SyntheticPrompts([], BLOCK_TOKENS, settings).prompt_for(0, request([], 5))
    assert isinstance(made.content, str)
    assert made.prompt_tokens == 5
    assert len(made.content) == 10
    assert made.content[::2] == " " * 5
    assert made.content[1::2].isalpha()


def test_content_stays_what_it_is() -> None:
    """What was sent yesterday is cached by engines today: this may change with a version only."""
    made = contents([request([1], 2)], BLOCK_TOKENS, SynthesisSettings())[0]
    assert made[:3] == [368, 449, 559]
