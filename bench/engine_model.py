"""Models of the engine bench: shapes with random weights, for our runners and transformers alike.

Runs with the Python of an environment that has torch and transformers.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

import numpy as np
from msgspec import Struct

from sidecar.compute.model import ModelConfig
from sidecar.compute.rope import RopeConfig
from sidecar.compute.weights import random_weights, tensor_shapes

WEIGHTS_SEED = 1


class ModelShape(Struct, frozen=True, kw_only=True):
    """The size of a Llama."""

    layers: int
    hidden_width: int
    intermediate_width: int
    heads: int
    kv_heads: int
    vocabulary_size: int = 8192

    def config(self, max_position_tokens: int) -> ModelConfig:
        """Return the model."""
        return ModelConfig(
            family="llama",
            vocabulary_size=self.vocabulary_size,
            hidden_width=self.hidden_width,
            intermediate_width=self.intermediate_width,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_width=self.hidden_width // self.heads,
            norm_epsilon=1e-6,
            rope=RopeConfig(),
            max_position_tokens=max_position_tokens,
        )


SHAPES = {
    "mid": ModelShape(layers=12, hidden_width=768, intermediate_width=2048, heads=12, kv_heads=4),
    "small": ModelShape(layers=6, hidden_width=384, intermediate_width=1024, heads=6, kv_heads=2),
}


def shape_told(config: ModelConfig) -> str:
    """Return a model's size in words."""
    parameters = sum(int(np.prod(shape)) for shape in tensor_shapes(config).values())
    return (
        f"{config.layers} layers x {config.hidden_width}, {config.heads} heads, "
        f"{config.kv_heads} KV heads, {parameters / 1e6:.0f} M parameters"
    )


def transformers_model(config: ModelConfig, attention: str) -> Any:
    """Return transformers' model with the same weights, float32; ``attention`` is eager or sdpa."""
    import torch  # type: ignore[import-not-found] # noqa: PLC0415 - only in that environment
    from transformers import (  # type: ignore[import-not-found] # noqa: PLC0415
        LlamaConfig,
        LlamaForCausalLM,
    )

    settings = LlamaConfig(
        vocab_size=config.vocabulary_size,
        hidden_size=config.hidden_width,
        intermediate_size=config.intermediate_width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_width,
        rms_norm_eps=config.norm_epsilon,
        max_position_embeddings=config.max_position_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=False,
        attn_implementation=attention,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(settings).eval()
    weights = random_weights(config, WEIGHTS_SEED)
    state = {name: torch.from_numpy(weights.array(name)) for name in tensor_shapes(config)}
    model.load_state_dict(state, strict=True)
    return model


def versions_told() -> str:
    """Return the versions that figures depend on."""
    import torch  # noqa: PLC0415 - only in that environment
    import transformers  # noqa: PLC0415

    return (
        f"Python {sys.version.split()[0]}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, NumPy {np.__version__}, {platform.machine()}"
    )
