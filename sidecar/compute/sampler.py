"""Chooses the next token from logits, the same way for every runner.

The random number of a draw depends on its seed, sample and index only. Temperature, then top-k,
then top-p narrow the distribution, in vLLM's order: top-k keeps every token that ties with the
k-th, top-p the smallest set of the most probable ones whose sum reaches p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from sidecar.runner import Sampled

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from sidecar.compute.model import ModelConfig
    from sidecar.runner import Draw, Slot

_MASK_64: Final = (1 << 64) - 1
_UNIFORM_BITS: Final = 53


def sample_slots(
    slots: Sequence[Slot], logits: Iterable[NDArray[np.float32]], config: ModelConfig
) -> tuple[tuple[Sampled, ...], ...]:
    """Return a token for each draw of each slot; ``logits`` has a row for each slot with draws."""
    end_ids, suppressed = config.eos_token_ids, config.suppressed_token_ids
    rows = iter(logits)
    return tuple(
        tuple(
            sample(row, draw, end_ids=end_ids, suppressed=suppressed)
            for row in [next(rows)]
            for draw in slot.draws
        )
        if slot.draws
        else ()
        for slot in slots
    )


def sample(
    logits: NDArray[np.float32],
    draw: Draw,
    *,
    end_ids: Sequence[int],
    suppressed: Sequence[int],
) -> Sampled:
    """Return one token for ``logits``, float32 ``(vocabulary,)``, which stay as they are.

    Greedy takes the lowest id among the highest. ``suppressed`` tokens are never taken, but keep
    their place in the logprobs, which are those of the raw logits. Raises ValueError where no token
    is left or a logit is not a number.
    """
    if np.isnan(logits).any():
        message = "logits: expected numbers, found NaN"
        raise ValueError(message)
    allowed = logits.astype(np.float64)
    allowed[list(suppressed)] = -np.inf
    if not np.isfinite(allowed.max()):
        message = "logits: expected a finite highest one among the tokens that are not suppressed"
        raise ValueError(message)
    is_greedy = draw.temperature == 0.0
    token = int(allowed.argmax()) if is_greedy else _drawn(allowed, draw)
    if draw.top_logprobs is None:
        return Sampled(token, is_end=token in end_ids)
    logprobs = _log_softmax(logits.astype(np.float64))
    top = _best(logprobs, draw.top_logprobs)
    return Sampled(
        token,
        is_end=token in end_ids,
        logprob=float(logprobs[token]),
        top=tuple((int(each), float(logprobs[each])) for each in top),
    )


def _drawn(allowed: NDArray[np.float64], draw: Draw) -> int:
    """Return a token of the narrowed distribution by inverting its cumulative sum, in id order."""
    with np.errstate(over="ignore"):  # minus infinity is right where the temperature is tiny
        scaled = (allowed - allowed.max()) / draw.temperature
    if 0 < draw.top_k < len(scaled):
        threshold = np.partition(scaled, -draw.top_k)[-draw.top_k]
        scaled[scaled < threshold] = -np.inf
    weights = np.exp(scaled)
    if draw.top_p < 1.0:
        weights[_beyond_top_p(weights, draw.top_p)] = 0.0
    kept = np.flatnonzero(weights)
    reached = np.cumsum(weights[kept])
    place = np.searchsorted(reached, _uniform(draw) * reached[-1], side="right")
    return int(kept[min(place, len(kept) - 1)])


def _beyond_top_p(weights: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """Return the tokens before which more probable ones reach ``top_p``; never the first."""
    order = np.argsort(-weights, kind="stable")
    sums = np.cumsum(weights[order])
    before = np.concatenate(([0.0], sums[:-1]))
    is_beyond = before >= top_p * sums[-1]
    is_beyond[0] = False
    beyond: NDArray[np.intp] = order[is_beyond]
    return beyond


def _uniform(draw: Draw) -> float:
    """Return a number in [0, 1) of a counter-based generator (Salmon et al., Philox, SC 2011)."""
    key = np.array([draw.seed & _MASK_64, draw.sample & _MASK_64], dtype=np.uint64)
    counter = np.array([0, draw.index & _MASK_64, 0, 0], dtype=np.uint64)
    bits = int(np.random.Philox(key=key, counter=counter).random_raw())
    return float((bits >> (64 - _UNIFORM_BITS)) * 2.0**-_UNIFORM_BITS)


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def _best(logprobs: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Return the ids of the ``count`` most probable tokens, best first, the lowest id on ties."""
    count = min(count, len(logprobs))
    if count == 0:
        return np.empty(0, dtype=np.intp)
    threshold = np.partition(logprobs, -count)[-count]
    candidates = np.flatnonzero(logprobs >= threshold)
    best: NDArray[np.intp] = candidates[np.argsort(-logprobs[candidates], kind="stable")][:count]
    return best
