"""Rotary position embeddings: angles per position, for each way of scaling them.

A pair of dimensions ``i`` turns by ``position * theta ** (-2 i / width)`` (Su et al., RoFormer,
arXiv 2104.09864). Longer contexts change the frequencies: *linear* divides all (Chen et al., arXiv
2306.15595); *llama3* divides only the slow ones, with a ramp between (the Llama 3.1 model
card's code); *yarn* ramps over dimensions and enlarges cosine and sine (Peng et al., arXiv
2309.00071, section 3).

*dynamic* (NTK-aware) enlarges theta with the length of the text. Keys in a cache cannot turn again
when their text grows, so theta is taken once, for the longest text that is served, as vLLM does:
without ``max_trained_positions`` that is the trained context and theta stays what it is, exactly
what a growing text has before it leaves the trained context.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
from msgspec import Struct

if TYPE_CHECKING:
    from numpy.typing import NDArray

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


class RopeConfig(Struct, frozen=True, kw_only=True):
    """How positions turn queries and keys. Which fields count depends on ``kind``.

    ``original_tokens`` is the context that the model was trained with before it was scaled
    (dynamic, llama3, yarn), ``context_tokens`` the one it has now (dynamic). The betas, the two
    mscales and ``attention_factor`` are yarn's; without the last it follows from the others.
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_tokens: int = 1
    context_tokens: int = 1
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dimensions: float | None = None
    is_ramp_truncated: bool = True


def rope_rows(
    config: RopeConfig, head_width: int, positions: NDArray[np.integer]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosine and sine of ``positions``: float32 ``(len(positions), head_width // 2)`` each.

    The attention factor is folded in. The angle is a product of float32 values, as the models were
    trained with.
    """
    frequencies = inverse_frequencies(config, head_width).astype(np.float32)
    angles = positions.astype(np.float32)[:, None] * frequencies
    exact = angles.astype(np.float64)
    factor = attention_factor(config)
    cosine = (np.cos(exact) * factor).astype(np.float32)
    sine = (np.sin(exact) * factor).astype(np.float32)
    return cosine, sine


def inverse_frequencies(config: RopeConfig, head_width: int) -> NDArray[np.float64]:
    """Return radians per position for each pair of dimensions, ``(head_width // 2,)``."""
    if config.kind == "linear":
        return _plain(config.theta, head_width) / config.factor
    if config.kind == "dynamic":
        return _plain(_static_ntk_theta(config, head_width), head_width)
    if config.kind == "llama3":
        return _llama3(config, _plain(config.theta, head_width))
    if config.kind == "yarn":
        return _yarn(config, _plain(config.theta, head_width), head_width)
    return _plain(config.theta, head_width)


def attention_factor(config: RopeConfig) -> float:
    """Return what cosine and sine are multiplied by: 1 for all kinds but yarn."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dimensions:
        whole = _magnitude(config.factor, config.mscale_all_dimensions)
        return _magnitude(config.factor, config.mscale) / whole
    return _magnitude(config.factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _plain(theta: float, head_width: int) -> NDArray[np.float64]:
    exponents = np.arange(0, head_width, 2, dtype=np.float64) / head_width
    frequencies: NDArray[np.float64] = theta**-exponents
    return frequencies


def _static_ntk_theta(config: RopeConfig, head_width: int) -> float:
    stretch = config.factor * config.context_tokens / config.original_tokens - (config.factor - 1)
    return float(config.theta * stretch ** (head_width / (head_width - 2)))


def _llama3(config: RopeConfig, plain: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keep what turns often within the trained context, divide what hardly turns, mix between."""
    turns = config.original_tokens * plain / (2 * math.pi)
    low, high = config.low_frequency_factor, config.high_frequency_factor
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * (share + (1 - share) / config.factor)


def _yarn(config: RopeConfig, plain: NDArray[np.float64], head_width: int) -> NDArray[np.float64]:
    """Mix as llama3 does, but over the index of the dimension, between two numbers of turns."""
    low = _dimension_with_turns(config, config.beta_fast, head_width)
    high = _dimension_with_turns(config, config.beta_slow, head_width)
    if config.is_ramp_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_width - 1)
    width = high - low if high != low else 0.001
    ramp = (np.arange(head_width // 2, dtype=np.float64) - low) / width
    share: NDArray[np.float64] = 1 - np.clip(ramp, 0.0, 1.0)
    return plain * (share + (1 - share) / config.factor)


def _dimension_with_turns(config: RopeConfig, turns: float, head_width: int) -> float:
    ratio = config.original_tokens / (turns * 2 * math.pi)
    return head_width * math.log(ratio) / (2 * math.log(config.theta))
