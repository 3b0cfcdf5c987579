"""A decoder's forward pass in NumPy, float32 throughout: the reference of what a model computes.

Pre-norm blocks of grouped-query attention and a gated SiLU (Touvron et al., LLaMA, arXiv
2302.13971; Ainslie et al., GQA, arXiv 2305.13245). A token's keys, values and logits come out the
same, bit for bit, however its text is cut into steps and whatever else a step computes: every
product over rows goes through ``tile``, attention through ``attention``, and all else works on
single rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sidecar.compute.attention import BLOCK_TOKENS, Attention
from sidecar.compute.rope import RopeConfig, rope_rows
from sidecar.compute.tile import Linear, Proofs, rounded_up

if TYPE_CHECKING:
    from sidecar.compute.model import ModelConfig
    from sidecar.compute.weights import Weights

LEAST_TABLE_POSITIONS: Final = 1024


class Segment(Struct, frozen=True):
    """New tokens of one sequence.

    ``tokens`` stand at ``first_position`` and after it; ``pages`` hold all positions up to there.
    """

    tokens: NDArray[np.int64]
    first_position: int
    pages: NDArray[np.int64]


class PositionTable:
    """Cosine and sine of positions, computed when they are first needed."""

    def __init__(self, config: RopeConfig, head_width: int) -> None:
        self._config = config
        self._head_width = head_width
        self._cosine = np.empty((0, head_width // 2), dtype=np.float32)
        self._sine = self._cosine

    def rows(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return cosine and sine, each ``(positions, 1, head_width // 2)``."""
        needed = int(positions.max(initial=0)) + 1
        known = len(self._cosine)
        if needed > known:
            grown = max(needed, 2 * known, LEAST_TABLE_POSITIONS)
            cosine, sine = rope_rows(self._config, self._head_width, np.arange(known, grown))
            self._cosine = np.concatenate((self._cosine, cosine))
            self._sine = np.concatenate((self._sine, sine))
        return self._cosine[positions][:, None], self._sine[positions][:, None]


class KvCache:
    """Keys and values of all layers by page: float32 ``content``, one page after the other.

    ``content`` is ``(pages, layers, 2, page_tokens, kv_heads, head_width)``: a page is contiguous,
    so it is saved and loaded as one run of bytes.
    """

    def __init__(self, config: ModelConfig, pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        entry = (config.kv_heads, config.head_width)
        self.content = np.zeros((pages, config.layers, 2, page_tokens, *entry), dtype=np.float32)
        self._parts = self.content.reshape(-1, page_tokens, *entry)
        self._page_parts = config.layers * 2

    def write(
        self,
        layer: int,
        places: tuple[NDArray[np.int64], NDArray[np.int64]],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
    ) -> None:
        """Store ``(tokens, kv_heads, width)`` at ``places``: pages and offsets in them."""
        self.content[:, layer, 0][places] = keys
        self.content[:, layer, 1][places] = values

    def gather(
        self, layer: int, pages: NDArray[np.int64], positions_count: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return keys and values of a sequence, whole blocks with zeros after the last position."""
        pages = pages[: -(-positions_count // self.page_tokens)]
        first_parts = pages * self._page_parts + 2 * layer
        return (
            self._gather_parts(first_parts, positions_count),
            self._gather_parts(first_parts + 1, positions_count),
        )

    def _gather_parts(self, parts: NDArray[np.int64], positions_count: int) -> NDArray[np.float32]:
        entry = self._parts.shape[2:]
        block_positions = rounded_up(positions_count, BLOCK_TOKENS)
        page_positions = len(parts) * self.page_tokens
        gathered = np.empty((max(block_positions, page_positions), *entry), dtype=np.float32)
        target = gathered[:page_positions].reshape(len(parts), self.page_tokens, *entry)
        np.take(self._parts, parts, axis=0, out=target, mode="clip")  # in place only if it clips
        gathered[positions_count:] = 0.0
        return gathered[:block_positions]


class Forward:
    """A model ready to compute."""

    def __init__(self, config: ModelConfig, weights: Weights, max_tokens: int) -> None:
        proofs = Proofs(max_tokens)
        self._config = config
        self._table = PositionTable(config.rope, config.head_width)
        self._embeddings = weights.array("model.embed_tokens.weight")
        attention = Attention(config, proofs)
        self._layers = [
            _Layer(config, weights, layer, proofs, attention) for layer in range(config.layers)
        ]
        self._norm = weights.array("model.norm.weight")
        is_tied = config.has_tied_embeddings
        head = self._embeddings if is_tied else weights.array("lm_head.weight")
        self._head = Linear(head, None, proofs)

    def hidden(self, segments: Sequence[Segment], cache: KvCache) -> NDArray[np.float32]:
        """Write the segments' keys and values; return the last hidden states, one row per token.

        Rows are in the order of the segments, float32 ``(tokens, hidden_width)``.
        """
        tokens = np.concatenate([segment.tokens for segment in segments])
        positions = np.concatenate([_positions(segment) for segment in segments])
        places = (
            np.concatenate(
                [each.pages[_positions(each) // cache.page_tokens] for each in segments]
            ),
            positions % cache.page_tokens,
        )
        step = _Step(segments, self._table.rows(positions), places, cache)
        rows: NDArray[np.float32] = self._embeddings[tokens]
        with np.errstate(over="ignore"):  # exp of a very negative gate: the quotient is right
            for layer in self._layers:
                layer.apply(rows, step)
        return rows

    def logits(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return float32 ``(rows, vocabulary)`` for hidden states ``(rows, hidden_width)``."""
        return self._head(_normed(rows, self._norm, self._config.norm_epsilon))


def _positions(segment: Segment) -> NDArray[np.int64]:
    return segment.first_position + np.arange(len(segment.tokens))


class _Step(Struct, frozen=True):
    """What all layers need of a step: its segments, cosine and sine, places in the cache."""

    segments: Sequence[Segment]
    turns: tuple[NDArray[np.float32], NDArray[np.float32]]
    places: tuple[NDArray[np.int64], NDArray[np.int64]]
    cache: KvCache


class _Layer:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        layer: int,
        proofs: Proofs,
        attention: Attention,
    ) -> None:
        self._config = config
        self._layer = layer
        self._attention = attention
        prefix = f"model.layers.{layer}."
        self._attention_norm = weights.array(f"{prefix}input_layernorm.weight")
        self._mlp_norm = weights.array(f"{prefix}post_attention_layernorm.weight")
        source = _Projections(weights, proofs, f"{prefix}self_attn.")
        self._query_key_value = source.joined(
            ("q_proj", "k_proj", "v_proj"), has_bias=config.has_attention_bias
        )
        self._output = source.joined(("o_proj",), has_bias=config.has_output_bias)
        self._head_norms: tuple[NDArray[np.float32], ...] = ()
        if config.has_head_norms:
            names = ("q_norm", "k_norm")
            self._head_norms = tuple(
                weights.array(f"{prefix}self_attn.{name}.weight") for name in names
            )
        source = _Projections(weights, proofs, f"{prefix}mlp.")
        self._gate_up = source.joined(("gate_proj", "up_proj"), has_bias=config.has_mlp_bias)
        self._down = source.joined(("down_proj",), has_bias=config.has_mlp_bias)

    def apply(self, rows: NDArray[np.float32], step: _Step) -> None:
        """Add this layer's part to ``rows``, ``(tokens, hidden_width)``."""
        epsilon = self._config.norm_epsilon
        attended = self._attended(_normed(rows, self._attention_norm, epsilon), step)
        rows += self._output(attended)
        gate_up = self._gate_up(_normed(rows, self._mlp_norm, epsilon))
        gate, up = np.split(gate_up, 2, axis=1)
        rows += self._down(_silu(gate) * up)

    def _attended(self, rows: NDArray[np.float32], step: _Step) -> NDArray[np.float32]:
        queries, keys, values = self._projected(rows, step)
        step.cache.write(self._layer, step.places, keys, values)
        attended = np.empty_like(queries)
        first = 0
        for segment in step.segments:
            end = first + len(segment.tokens)
            positions_count = segment.first_position + end - first
            cached = step.cache.gather(self._layer, segment.pages, positions_count)
            attended[first:end] = self._attention(
                queries[first:end], *cached, segment.first_position
            )
            first = end
        return attended.reshape(len(rows), -1)

    def _projected(
        self, rows: NDArray[np.float32], step: _Step
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """Return turned queries and keys, and values: ``(tokens, heads or kv_heads, width)``."""
        config = self._config
        heads = self._query_key_value(rows).reshape(len(rows), -1, config.head_width)
        queries, keys, values = np.split(
            heads, [config.heads, config.heads + config.kv_heads], axis=1
        )
        if self._head_norms:
            query_norm, key_norm = self._head_norms
            queries = _normed(queries, query_norm, config.norm_epsilon)
            keys = _normed(keys, key_norm, config.norm_epsilon)
        return _turned(queries, step.turns), _turned(keys, step.turns), values


class _Projections:
    """Projections below one prefix; several over the same input become one product."""

    def __init__(self, weights: Weights, proofs: Proofs, prefix: str) -> None:
        self._weights = weights
        self._proofs = proofs
        self._prefix = prefix

    def joined(self, names: tuple[str, ...], *, has_bias: bool) -> Linear:
        weight = np.concatenate([self._array(f"{name}.weight") for name in names])
        bias = None
        if has_bias:
            bias = np.concatenate([self._array(f"{name}.bias") for name in names])
        return Linear(weight, bias, self._proofs)

    def _array(self, name: str) -> NDArray[np.float32]:
        return self._weights.array(self._prefix + name)


def _normed(
    rows: NDArray[np.float32], weight: NDArray[np.float32], epsilon: float
) -> NDArray[np.float32]:
    """Return RMSNorm over the last axis (Zhang and Sennrich, arXiv 1910.07467)."""
    squares = np.square(rows)
    means = squares.sum(axis=-1, keepdims=True) / np.float32(rows.shape[-1])
    normed: NDArray[np.float32] = rows / np.sqrt(means + np.float32(epsilon)) * weight
    return normed


def _silu(gate: NDArray[np.float32]) -> NDArray[np.float32]:
    exponentials: NDArray[np.float32] = np.exp(-gate)
    return gate / (exponentials + np.float32(1))


def _turned(
    heads: NDArray[np.float32], turns: tuple[NDArray[np.float32], NDArray[np.float32]]
) -> NDArray[np.float32]:
    """Return ``heads`` turned by their positions; a pair is ``i`` and ``i + width // 2``."""
    cosine, sine = turns
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    turned = np.empty_like(heads, order="C")
    turned[..., :half] = first * cosine - second * sine
    turned[..., half:] = second * cosine + first * sine
    return turned
