"""Fits the step model to measured times: robust least squares with terms that cannot be negative.

A row says what some steps did, in the terms of the model, and how long they took together. Rows
weigh by relative error, with a floor for the jitter that a short time has as well as a long one.
Outliers lose weight the farther they are off (Huber's rule, reweighted until it settles).
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct

from sidecar.clock import StepCost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

JITTER_MS: Final = 10.0
"""Added to a time before it divides its error."""
_HUBER: Final = 1.345
_NORMAL_MAD: Final = 0.6745
_ROUNDS: Final = 50
_SETTLED: Final = 1e-9
_DROPPED_WEIGHT: Final = 0.3
_LEAST_SPREAD: Final = 1e-6
TERMS: Final = (
    "step_ms",
    "prefill_token_ms",
    "attention_pair_ms",
    "decode_sequence_ms",
    "kv_token_read_ms",
)
OVERHEADS: Final = ("overhead_ms", "overhead_token_ms")


class FitError(Exception):
    """The rows do not determine the model; the text says what is missing."""


class StepRow(Struct, frozen=True, kw_only=True):
    """What was done in ``ms``: ``steps`` engine steps and, over all of them, the sums of the model.

    ``requests`` is 1 where the time includes a request's way in and out, else 0; then
    ``prompt_tokens`` came in with it, cached ones too.
    """

    probe: str
    ms: float
    steps: int
    prefill_tokens: int = 0
    attention_pairs: int = 0
    decode_sequences: int = 0
    kv_tokens_read: int = 0
    requests: int = 0
    prompt_tokens: int = 0

    def features(self) -> tuple[float, ...]:
        """Return the factors of the terms, in the order of TERMS and OVERHEADS."""
        return (
            self.steps,
            self.prefill_tokens,
            self.attention_pairs,
            self.decode_sequences,
            self.kv_tokens_read,
            self.requests,
            self.prompt_tokens,
        )


class StepFit(Struct, frozen=True, kw_only=True):
    """The model that explains the rows best.

    A request takes ``overhead_ms`` besides its steps, and ``overhead_token_ms`` for each token of
    its prompt, cached or not: 0 where no prompt was cached, then it is part of the step model.
    ``error`` is the median of the rows' relative errors. ``outliers`` of ``rows`` count for little.
    """

    cost: StepCost
    overhead_ms: float
    overhead_token_ms: float
    error: float
    rows: int
    outliers: int

    def parts_ms(self, row: StepRow) -> dict[str, float]:
        """Return what each term adds to the time of ``row``."""
        terms = {name: getattr(self.cost, name) for name in TERMS}
        terms |= {name: getattr(self, name) for name in OVERHEADS}
        return {
            name: term * factor
            for (name, term), factor in zip(terms.items(), row.features(), strict=True)
        }

    def predicted_ms(self, row: StepRow) -> float:
        """Return what the model says of ``row``."""
        return sum(self.parts_ms(row).values())

    def request_ms(self, prompt_tokens: float) -> float:
        """Return what a request takes besides its steps."""
        return self.overhead_ms + self.overhead_token_ms * prompt_tokens


def fit_steps(rows: Sequence[StepRow]) -> StepFit:
    """Return the fit of ``rows``; raises FitError where a term has no row that tells it apart."""
    names: tuple[str, ...] = (*TERMS, *OVERHEADS)
    if all(row.prompt_tokens == row.prefill_tokens for row in rows):
        names = names[:-1]  # without cached prompts nothing tells it from the prefill
    features = [row.features()[: len(names)] for row in rows]
    factors = np.array(features, dtype=np.float64).reshape(len(rows), len(names))
    times_ms = np.array([row.ms for row in rows], dtype=np.float64)
    _check(factors, names)
    scales = 1.0 / (times_ms + JITTER_MS)
    factors_scaled, times_scaled = factors * scales[:, None], times_ms * scales
    trust = np.ones(len(rows))
    terms = np.zeros(factors.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(trust)
        before, terms = (
            terms,
            solve_nonnegative(factors_scaled * root[:, None], times_scaled * root),
        )
        misses = np.abs(factors_scaled @ terms - times_scaled)
        spread = max(float(np.median(misses)) / _NORMAL_MAD, _LEAST_SPREAD)
        trust = np.minimum(1.0, _HUBER * spread / np.maximum(misses, _LEAST_SPREAD * spread))
        if np.allclose(before, terms, rtol=_SETTLED, atol=0.0):
            break
    errors = np.abs(factors @ terms - times_ms) / times_ms
    values = dict(zip(names, map(float, terms), strict=True))
    return StepFit(
        cost=StepCost(**{name: values[name] for name in TERMS}),
        overhead_ms=values["overhead_ms"],
        overhead_token_ms=values.get("overhead_token_ms", 0.0),
        error=float(np.median(errors)),
        rows=len(rows),
        outliers=int(np.sum(trust < _DROPPED_WEIGHT)),
    )


def solve_nonnegative(factors: Vector, targets: Vector) -> Vector:
    """Return the terms, none negative, for which ``factors @ terms`` is next to ``targets``.

    The best solution is the ordinary one on some set of columns. There are few columns: larger sets
    come first, and all that may be the best are tried.
    """
    columns = factors.shape[1]
    widths = np.linalg.norm(factors, axis=0)
    unit = factors / np.where(widths > 0, widths, 1.0)
    best, best_miss = np.zeros(columns), float(np.linalg.norm(targets))
    for kept in range(columns, 0, -1):
        for chosen in combinations(range(columns), kept):
            part = unit[:, chosen]
            solved = np.linalg.lstsq(part, targets, rcond=None)[0]
            if solved.min() < 0:
                continue
            miss = float(np.linalg.norm(part @ solved - targets))
            if miss < best_miss:
                best_miss, best = miss, np.zeros(columns)
                best[list(chosen)] = solved
        if kept == columns and best.any():
            break  # no set can do better than all
    return best / np.where(widths > 0, widths, 1.0)


def _check(factors: Vector, names: Sequence[str]) -> None:
    """Raise FitError unless every term can be told from the others."""
    if len(factors) < len(names):
        message = f"too few measurements: {len(factors)} for {len(names)} terms"
        raise FitError(message)
    widths = np.linalg.norm(factors, axis=0)
    unseen = [name for name, width in zip(names, widths, strict=True) if not width]
    if unseen:
        message = f"nothing was measured that tells {', '.join(unseen)}"
        raise FitError(message)
    if np.linalg.matrix_rank(factors / widths, tol=_LEAST_SPREAD) < len(names):
        message = "the measurements do not tell the terms apart: give it more seconds"
        raise FitError(message)
