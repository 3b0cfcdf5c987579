"""Writes checkpoints as they are published: a config, and weights in safetensors files.

Tiny ones of every family that the worker serves. Weights are those of ``random_weights``, so a
seed stands for them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sidecar.compute.model import read_model_config
from sidecar.compute.weights import random_weights, tensor_shapes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

VOCABULARY_SIZE: Final = 97
ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
NAMES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ROPES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "theta": {"rope_theta": 500.0},
    "theta_new": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "linear_new": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 2000.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama3": {
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "yarn": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    },
    "yarn_new": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 3000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.2,
            "mscale_all_dim": 0.7,
            "beta_fast": 8.0,
            "beta_slow": 0.25,
            "truncate": False,
        }
    },
    "yarn_attention": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.3,
        }
    },
}
"""Every way of placing tokens, in the old form of the config and the new."""


def config_table(family: str, rope: str = "plain", **changed: object) -> dict[str, Any]:
    """Return a tiny ``config.json``; None in ``changed`` leaves a field out."""
    table: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **ROPES[rope],
    }
    if family == "qwen3":
        table["head_dim"] = 12
    table |= changed
    return {name: value for name, value in table.items() if value is not None}


def write_checkpoint(
    folder: Path, table: Mapping[str, object], *, seed: int = 1, shards: int = 1
) -> Path:
    """Write ``table`` and random weights in its ``torch_dtype`` to ``folder``; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(table), encoding="utf-8")
    config = read_model_config(folder)
    weights = random_weights(config, seed)
    tensors = {
        name: stored(weights.array(name), config.torch_dtype) for name in tensor_shapes(config)
    }
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        write_safetensors(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return folder


def stored(array: NDArray[np.float32], dtype: str) -> tuple[str, NDArray[np.generic]]:
    """Return ``array`` as a file has it: the format's name of ``dtype`` and the values.

    A bfloat16 is cut off, not rounded: any one will do.
    """
    if dtype == "float16":
        return "F16", array.astype("<f2")
    if dtype == "bfloat16":
        return "BF16", (array.view(np.uint32) >> 16).astype("<u2")
    return "F32", array.astype("<f4")


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, NDArray[np.generic]]]) -> None:
    """Write named tensors, each with the format's name of its dtype."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    first = 0
    for name, (dtype, array) in tensors.items():
        end = first + array.nbytes
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [first, end]}
        first = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    content = [array.tobytes() for _, array in tensors.values()]
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(content))
