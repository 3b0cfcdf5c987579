"""The calibrated clock: how long an engine step takes on a given accelerator.

A step costs a constant (reading the weights once, launching), a share per prefilled token (the
linear layers), a share per attended token pair of prefill, a share per decoding sequence and a
share per KV token that decoding reads:

``c0 + cb * prefill_tokens + cq * sum(new * context) + cd * decode_sequences + ce * kv_tokens_read``

The presets follow from public figures by the roofline arithmetic of ``roofline_cost``; they are
estimates of a well-tuned engine, not measurements. Sources: model shapes from "The Llama 3 Herd of
Models" (arXiv 2407.21783, table 3); peak rates from NVIDIA's H100 SXM5 data sheet (dense: 989
TFLOPS BF16, 1,979 TFLOPS FP8; 3.35 TB/s HBM3).
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

PresetName = Literal["llama-8b-h100", "llama-70b-fp8-2xh100", "instant"]


class StepLoad(Struct, frozen=True):
    """What one step computes.

    ``attention_pairs`` counts, over all prefilled tokens, the tokens that each attends to, itself
    included. ``kv_tokens_read`` sums the contexts of the decoding sequences.
    """

    prefill_tokens: int
    attention_pairs: int
    decode_sequences: int
    kv_tokens_read: int


class StepCost(Struct, frozen=True, kw_only=True):
    """The coefficients of the step model, in ms."""

    step_ms: float
    prefill_token_ms: float
    attention_pair_ms: float
    decode_sequence_ms: float
    kv_token_read_ms: float

    def step_s(self, load: StepLoad) -> float:
        """Return the duration of a step in seconds."""
        return 1e-3 * (
            self.step_ms
            + self.prefill_token_ms * load.prefill_tokens
            + self.attention_pair_ms * load.attention_pairs
            + self.decode_sequence_ms * load.decode_sequences
            + self.kv_token_read_ms * load.kv_tokens_read
        )


class ModelShape(Struct, frozen=True, kw_only=True):
    """What the cost of a transformer depends on."""

    parameters: float
    layers: int
    hidden_width: int
    kv_heads: int
    head_width: int
    weight_bytes: float
    kv_bytes: float = 2.0


class Accelerator(Struct, frozen=True, kw_only=True):
    """Peak rates of the accelerators that hold one replica, taken together."""

    linear_flops_per_s: float
    attention_flops_per_s: float
    memory_bytes_per_s: float
    compute_fraction: float = 0.5
    """How much of the peak FLOPS a good engine reaches in prefill."""
    memory_fraction: float = 0.8
    """How much of the peak bandwidth it reaches in decode."""
    step_overhead_ms: float = 0.0
    """Launches and collectives that nothing hides."""


def roofline_cost(shape: ModelShape, accelerator: Accelerator) -> StepCost:
    """Return the step cost that follows from shapes and rates.

    - Linear layers: 2 FLOP per parameter and token, at ``linear_flops_per_s``.
    - Attention: per layer and pair, 2 FLOP per element for the scores and 2 for the values:
      ``4 * hidden_width * layers`` FLOP.
    - A step reads all weights once; at serving batch sizes that is what decoding waits for.
    - A decoding sequence is one more token in the linear layers.
    - Decoding reads keys and values of its context: ``2 * layers * kv_heads * head_width`` elements
      per token.
    """
    linear_rate = accelerator.linear_flops_per_s * accelerator.compute_fraction
    attention_rate = accelerator.attention_flops_per_s * accelerator.compute_fraction
    memory_rate = accelerator.memory_bytes_per_s * accelerator.memory_fraction
    token_ms = 1e3 * 2 * shape.parameters / linear_rate
    weights_ms = 1e3 * shape.parameters * shape.weight_bytes / memory_rate
    kv_elements = 2 * shape.layers * shape.kv_heads * shape.head_width
    return StepCost(
        step_ms=weights_ms + accelerator.step_overhead_ms,
        prefill_token_ms=token_ms,
        attention_pair_ms=1e3 * 4 * shape.hidden_width * shape.layers / attention_rate,
        decode_sequence_ms=token_ms,
        kv_token_read_ms=1e3 * kv_elements * shape.kv_bytes / memory_rate,
    )


LLAMA_8B_H100: Final = roofline_cost(
    ModelShape(
        parameters=8.03e9,
        layers=32,
        hidden_width=4096,
        kv_heads=8,
        head_width=128,
        weight_bytes=2,
    ),
    Accelerator(
        linear_flops_per_s=989e12, attention_flops_per_s=989e12, memory_bytes_per_s=3.35e12
    ),
)
"""Llama 3.1 8B, BF16, on one H100.

Prefill 2 x 8.03e9 / (989e12 x 0.5) = 32 us a token; attention 4 x 4096 x 32 / (989e12 x 0.5) = 1.1
ns a pair; a step 16.1 GB / (3.35e12 x 0.8) = 6.0 ms; 131,072 bytes of KV = 49 ns a token read.
"""

LLAMA_70B_FP8_2XH100: Final = roofline_cost(
    ModelShape(
        parameters=70.6e9,
        layers=80,
        hidden_width=8192,
        kv_heads=8,
        head_width=128,
        weight_bytes=1,
    ),
    Accelerator(
        linear_flops_per_s=2 * 1979e12,
        attention_flops_per_s=2 * 989e12,
        memory_bytes_per_s=2 * 3.35e12,
        compute_fraction=0.4,
        step_overhead_ms=1.6,
    ),
)
"""Llama 3.1 70B, FP8 weights and BF16 KV, tensor parallel on two H100.

Prefill 2 x 70.6e9 / (3958e12 x 0.4) = 89 us a token; attention 4 x 8192 x 80 / (1978e12 x 0.4) =
3.3 ns a pair; a step 70.6 GB / (6.7e12 x 0.8) = 13.2 ms, plus two all-reduces a layer at an assumed
10 us each = 1.6 ms; 327,680 bytes of KV = 61 ns a token read. 0.4 instead of 0.5 of the peak is an
assumption for tensor parallelism.
"""

INSTANT: Final = StepCost(
    step_ms=0.0,
    prefill_token_ms=0.0,
    attention_pair_ms=0.0,
    decode_sequence_ms=0.0,
    kv_token_read_ms=0.0,
)
"""No time at all: for tests."""


def preset_cost(name: PresetName) -> StepCost:
    """Return the step cost called ``name``."""
    match name:
        case "llama-8b-h100":
            return LLAMA_8B_H100
        case "llama-70b-fp8-2xh100":
            return LLAMA_70B_FP8_2XH100
        case "instant":
            return INSTANT


_KV_TOKEN_BYTES: Final[dict[PresetName, int]] = {
    "llama-8b-h100": 131_072,
    "llama-70b-fp8-2xh100": 327_680,
    "instant": 131_072,
}


def preset_page_bytes(name: PresetName, page_tokens: int) -> int:
    """Return the KV bytes of a page of the model behind the step cost called ``name``."""
    return _KV_TOKEN_BYTES[name] * page_tokens
