from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec import structs

from sidecar.compute.sampler import sample
from sidecar.runner import Draw

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOGITS = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], dtype=np.float32))
WARM = Draw(seed=1, index=0, temperature=1.0)
DRAWS = 2_500


def drawn(
    draw: Draw, logits: NDArray[np.float32] = LOGITS, suppressed: tuple[int, ...] = ()
) -> NDArray[np.float64]:
    """Return how often each token comes, as a part of ``DRAWS``."""
    counts = np.zeros(len(logits))
    for index in range(DRAWS):
        once = structs.replace(draw, index=index)
        counts[sample(logits, once, end_ids=(), suppressed=suppressed).token] += 1
    return counts / DRAWS


def is_close(found: NDArray[np.float64], expected: list[float]) -> bool:
    """Chi-square: the limit is passed by chance in one of a million for four degrees."""
    wanted = np.array(expected) / sum(expected)
    assert not found[wanted == 0].any()
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    return bool(DRAWS * (np.square(found - wanted) / wanted).sum() < 33)


def test_greedy_takes_the_lowest_id_among_the_highest() -> None:
    logits = np.array([1.0, 5.0, 2.0, 5.0], dtype=np.float32)
    assert sample(logits, Draw(seed=9, index=3), end_ids=(), suppressed=()).token == 1
    assert sample(logits, Draw(seed=9, index=3), end_ids=(), suppressed=(1,)).token == 3


def test_tokens_come_as_often_as_the_softmax_says() -> None:
    assert is_close(drawn(WARM), [0.4, 0.3, 0.15, 0.1, 0.05])


def test_temperature_sharpens_and_flattens() -> None:
    hot = [math.sqrt(part) for part in (0.4, 0.3, 0.15, 0.1, 0.05)]
    cold = [part**2 for part in (0.4, 0.3, 0.15, 0.1, 0.05)]
    assert is_close(drawn(structs.replace(WARM, temperature=2.0)), hot)
    assert is_close(drawn(structs.replace(WARM, temperature=0.5)), cold)


def test_the_smallest_temperature_is_greedy() -> None:
    tiny = structs.replace(WARM, temperature=5e-324)
    assert sample(LOGITS, tiny, end_ids=(), suppressed=()).token == 0


def test_top_k_leaves_the_k_most_probable() -> None:
    assert is_close(drawn(structs.replace(WARM, top_k=2)), [0.4, 0.3, 0, 0, 0])
    assert is_close(drawn(structs.replace(WARM, top_k=50)), [0.4, 0.3, 0.15, 0.1, 0.05])


def test_top_k_keeps_what_ties_with_the_last() -> None:
    logits = np.array([0.0, 1.0, 0.0, -9.0], dtype=np.float32)
    found = drawn(structs.replace(WARM, top_k=2), logits)
    assert is_close(found, [1.0, math.e, 1.0, 0])


def test_top_p_leaves_the_fewest_tokens_that_reach_it() -> None:
    assert is_close(drawn(structs.replace(WARM, top_p=0.69)), [0.4, 0.3, 0, 0, 0])
    assert is_close(drawn(structs.replace(WARM, top_p=0.71)), [0.4, 0.3, 0.15, 0, 0])
    assert is_close(drawn(structs.replace(WARM, top_p=1e-9)), [1, 0, 0, 0, 0])
    assert is_close(drawn(structs.replace(WARM, top_p=0.0)), [1, 0, 0, 0, 0])


def test_top_p_counts_what_top_k_left() -> None:
    both = structs.replace(WARM, top_k=2, top_p=0.55)
    assert is_close(drawn(both), [1, 0, 0, 0, 0])  # 0.4 of 0.7 reaches 0.55, 0.4 of 1 does not


def test_suppressed_tokens_never_come_and_leave_their_share() -> None:
    assert is_close(drawn(WARM, suppressed=(0, 3)), [0, 0.3, 0.15, 0, 0.05])


def test_a_draw_depends_on_seed_sample_and_index_only() -> None:
    logits = np.zeros(1 << 16, dtype=np.float32)

    def token(**changed: int) -> int:
        draw = structs.replace(WARM, **changed)
        return sample(logits, draw, end_ids=(), suppressed=()).token

    assert token() == token() == token(prompt_key=5, top_logprobs=1)
    drawn = {
        token(),
        token(seed=2),
        token(sample=1),
        token(index=1),
        token(seed=-1),
        token(seed=1 << 63),
        token(seed=1, sample=1, index=1),
    }
    assert len(drawn) == 7


def test_the_same_draw_gives_the_same_token_on_every_machine() -> None:
    logits = np.zeros(1 << 16, dtype=np.float32)
    found = [
        sample(logits, structs.replace(WARM, index=index), end_ids=(), suppressed=()).token
        for index in range(3)
    ]
    assert found == [19894, 23469, 61975]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    draw = Draw(seed=0, index=0, temperature=0.1, top_k=1, top_logprobs=2)
    sampled = sample(LOGITS * 2 + 5, draw, end_ids=(), suppressed=(0,))
    weights = np.square([0.4, 0.3, 0.15, 0.1, 0.05])
    expected = np.log(weights / weights.sum())
    assert sampled.token == 1
    assert sampled.logprob == pytest.approx(expected[1], abs=1e-6)
    assert [token for token, _ in sampled.top] == [0, 1]
    assert [logprob for _, logprob in sampled.top] == pytest.approx(expected[:2], abs=1e-6)


def test_the_best_are_listed_by_id_where_they_tie() -> None:
    logits = np.array([0.0, 2.0, 1.0, 2.0, 1.0], dtype=np.float32)

    def best(count: int) -> list[int]:
        draw = Draw(seed=0, index=0, top_logprobs=count)
        sampled = sample(logits, draw, end_ids=(), suppressed=())
        assert sampled.logprob is not None
        return [token for token, _ in sampled.top]

    assert best(0) == []
    assert best(1) == [1]
    assert best(3) == [1, 3, 2]
    assert best(20) == [1, 3, 2, 4, 0]


def test_no_logprobs_unless_they_are_asked_for() -> None:
    sampled = sample(LOGITS, Draw(seed=0, index=0), end_ids=(), suppressed=())
    assert (sampled.logprob, sampled.top) == (None, ())


def test_an_end_token_says_so() -> None:
    assert sample(LOGITS, Draw(seed=0, index=0), end_ids=(0, 4), suppressed=()).is_end
    assert not sample(LOGITS, Draw(seed=0, index=0), end_ids=(1,), suppressed=()).is_end


def test_the_logits_stay_as_they_are() -> None:
    logits = LOGITS.copy()
    sample(logits, structs.replace(WARM, top_k=2, top_p=0.5), end_ids=(), suppressed=(0,))
    assert np.array_equal(logits, LOGITS)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(wrong: float) -> None:
    logits = np.array([1.0, wrong, 0.0], dtype=np.float32)
    with pytest.raises(ValueError, match="logits: expected"):
        sample(logits, WARM, end_ids=(), suppressed=())


def test_a_vocabulary_with_nothing_left_is_refused() -> None:
    with pytest.raises(ValueError, match="not suppressed"):
        sample(LOGITS, WARM, end_ids=(), suppressed=range(5))
