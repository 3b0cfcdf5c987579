"""What moving and computing pages costs here, learned from what it took.

Both models are linear in what was done (bytes; tokens, token pairs and so on) and are fitted to a
window of the latest observations, older ones counting less, by iteratively reweighted least squares
on relative errors: Huber's weights, then Tukey's bisquare (P. J. Huber, "Robust Statistics", 1981,
ch. 7; F. R. Hampel et al., "Robust Statistics", 1986, ch. 6). Each round is held back a
little, from the prior on, so what the observations leave open keeps the prior's proportions: steps
that are all alike tell one sum, not its parts.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.ma  # median needs it; files may have run out by then

from sidecar.clock import StepCost, StepLoad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.floating[Any]]

TRANSFER_WINDOW: Final = 256
STEP_WINDOW: Final = 1024
"""Observations that are kept: steps are many, and tell five costs instead of two."""
HALF_LIFE_SHARE: Final = 3 / 8
"""After such a share of the window in further observations, one counts half."""
FIRST_FIT: Final = 3
"""The prior holds until there are so many observations."""
PULL: Final = 1e-4
"""How much a round is held back, against the weight of the observations."""
LEAST_SHARE: Final = 1e-6
"""No parameter falls below this share of its prior."""
HUBER_ROUNDS: Final = 6
BISQUARE_ROUNDS: Final = 4
_HUBER: Final = 1.345  # 95 % efficient for normal errors
_BISQUARE: Final = 4.685  # the same
_MAD_TO_DEVIATION: Final = 1.4826  # of a normal distribution
_LEAST_DEVIATION: Final = 0.01
_LARGE_ERROR: Final = 2.0  # in natural logarithms, sevenfold
_MOST_MS: Final = 1e9
_LEAST_MS: Final = 1e-6


class LinearCost:
    """Nonnegative costs per unit of several features, from (features, ms) observations.

    ``prior`` has one positive cost in ms for each feature; the latest ``window`` observations are
    kept. All costs stay positive and finite.
    """

    def __init__(self, prior: Sequence[float], window: int) -> None:
        if not prior or not all(math.isfinite(cost) and cost > 0 for cost in prior):
            message = f"prior costs must be positive and finite, got {list(prior)}"
            raise ValueError(message)
        self._prior = np.array(prior, dtype=np.float64)
        self._costs: Array = self._prior
        self._seen: deque[tuple[tuple[float, ...], float]] = deque(maxlen=window)
        self._half_life = window * HALF_LIFE_SHARE
        self._unfitted = 0

    @property
    def observations(self) -> int:
        """How many observations are in the window."""
        return len(self._seen)

    def observe(self, features: Sequence[float], took_ms: float) -> None:
        """Learn from one observation; one that is not finite and nonnegative tells nothing."""
        values = tuple(map(float, features))
        if not all(math.isfinite(value) and value >= 0 for value in (*values, took_ms)):
            return
        if any(values):
            self._seen.append((values, min(max(took_ms, _LEAST_MS), _MOST_MS)))
            self._unfitted += 1

    def costs(self) -> Array:
        """Return the cost of one unit of each feature in ms."""
        seen = len(self._seen)
        if seen >= FIRST_FIT and self._unfitted > seen // 16:
            self._costs = self._fitted()
            self._unfitted = 0
        return self._costs

    def _fitted(self) -> Array:
        features = np.array([values for values, _ in self._seen])
        took = np.array([took_ms for _, took_ms in self._seen])
        age = np.arange(len(took) - 1, -1, -1)
        recency = np.exp2(-age / self._half_life)
        costs: Array = self._prior * float(np.median(took / (features @ self._prior)))
        for turn in range(HUBER_ROUNDS + BISQUARE_ROUNDS):
            expected = features @ costs
            weights = recency * _trust(np.log(took / expected), is_late=turn >= HUBER_ROUNDS)
            costs = self._solved(features / expected[:, None], took / expected, weights, costs)
        return costs

    def _solved(self, rows: Array, targets: Array, weights: Array, before: Array) -> Array:
        """Return the weighted least squares solution, with parameters at their floor where needed.

        The parameter that lies farthest below its floor is fixed there first, then the rest again.
        What the rows leave open stays as ``before``.
        """
        gram = rows.T @ (rows * weights[:, None])
        pull = PULL * np.diag(gram)
        gram = gram + np.diag(pull)
        aims = rows.T @ (targets * weights) + pull * before
        floor = self._prior * LEAST_SHARE
        costs = before.copy()
        free = np.diag(gram) > 0
        while free.any():
            rest = aims[free] - gram[np.ix_(free, ~free)] @ costs[~free]
            costs[free] = _solved_scaled(gram[np.ix_(free, free)], rest)
            lack = np.where(free, floor - costs, 0) / self._prior
            worst = int(lack.argmax())
            if lack[worst] <= 0:
                break
            costs[worst] = floor[worst]
            free[worst] = False
        return costs


def _solved_scaled(gram: Array, aims: Array) -> Array:
    scale = 1 / np.sqrt(np.diag(gram))
    scaled: Array = np.linalg.solve(gram * np.outer(scale, scale), aims * scale)
    return scaled * scale


def _trust(errors: Array, *, is_late: bool) -> Array:
    """Return the weight of each relative (logarithmic) error."""
    centre = np.median(errors)
    deviation = _MAD_TO_DEVIATION * float(np.median(np.abs(errors - centre)))
    units = np.abs(errors) / max(deviation, _LEAST_DEVIATION)
    # The fit is linear in took / expected: there a hiccup of a thousandfold weighs a thousandfold.
    large = np.maximum(errors, _LARGE_ERROR)
    damping = large / np.expm1(large) * (math.expm1(_LARGE_ERROR) / _LARGE_ERROR)
    if is_late and (units < _BISQUARE).any():
        trusted: Array = np.clip(1 - (units / _BISQUARE) ** 2, 0, 1) ** 2
        return trusted * damping
    weights: Array = np.minimum(1, _HUBER / np.maximum(units, _LEAST_MS))
    return weights * damping


class TransferModel:
    """Latency and rate of a path for bytes: host, disk, a peer."""

    def __init__(self, prior_latency_ms: float, prior_bytes_per_s: float) -> None:
        self._cost = LinearCost((prior_latency_ms, 1e3 / prior_bytes_per_s), TRANSFER_WINDOW)

    @property
    def observations(self) -> int:
        """How many transfers the model rests on; below 3 it is the prior."""
        return self._cost.observations

    @property
    def latency_ms(self) -> float:
        """What a transfer takes besides its bytes."""
        return float(self._cost.costs()[0])

    @property
    def bytes_per_s(self) -> float:
        """How fast bytes follow each other."""
        return 1e3 / float(self._cost.costs()[1])

    def observe(self, moved_bytes: int, seconds: float) -> None:
        """Learn that a transfer of ``moved_bytes`` took ``seconds``."""
        self._cost.observe((1.0, moved_bytes), seconds * 1e3)

    def predict_ms(self, moved_bytes: int) -> float:
        """Return how long a transfer of ``moved_bytes`` will take."""
        latency_ms, byte_ms = self._cost.costs()
        return float(latency_ms + byte_ms * moved_bytes)


class PrefillModel:
    """What the steps of this engine cost, and so what computing a run of tokens costs."""

    def __init__(self, prior: StepCost) -> None:
        self._cost = LinearCost(
            (
                prior.step_ms,
                prior.prefill_token_ms,
                prior.attention_pair_ms,
                prior.decode_sequence_ms,
                prior.kv_token_read_ms,
            ),
            STEP_WINDOW,
        )

    @property
    def observations(self) -> int:
        """How many steps the model rests on; below 3 it is the prior."""
        return self._cost.observations

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn that a step took ``seconds``."""
        self._cost.observe(
            (
                1.0,
                load.prefill_tokens,
                load.attention_pairs,
                load.decode_sequences,
                load.kv_tokens_read,
            ),
            seconds * 1e3,
        )

    def cost(self) -> StepCost:
        """Return the step model as learned so far."""
        step_ms, token_ms, pair_ms, sequence_ms, read_ms = self._cost.costs().tolist()
        return StepCost(
            step_ms=step_ms,
            prefill_token_ms=token_ms,
            attention_pair_ms=pair_ms,
            decode_sequence_ms=sequence_ms,
            kv_token_read_ms=read_ms,
        )

    def predict_ms(self, tokens: int, context: int) -> float:
        """Return what ``tokens`` more tokens after ``context`` ones add to the engine's steps.

        The constant of a step is left out: the steps come anyway, as the last token of a prompt is
        always computed.
        """
        _, token_ms, pair_ms, _, _ = self._cost.costs().tolist()
        pairs = tokens * context + tokens * (tokens + 1) / 2
        return float(token_ms * tokens + pair_ms * pairs)
