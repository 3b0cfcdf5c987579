"""Write adapters (LoRA) with random weights for the model of ``tiny_llama.py``.

Runs with the Python of an engine, which has torch: ``tiny_adapter.py MODEL FOLDER...``. Each folder
gets other weights; the same folder name gets the same ones.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import torch  # type: ignore[import-not-found]
from safetensors.torch import save_file  # type: ignore[import-not-found]

RANK = 8
WEIGHT_SPREAD = 0.1
"""Wide enough to change what the model says."""


def write_adapter(model: Path, folder: Path) -> None:
    """Write one adapter of ``model`` to ``folder``."""
    shape = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden = shape["hidden_size"]
    heads = {"q_proj": shape["num_attention_heads"], "v_proj": shape["num_key_value_heads"]}
    torch.manual_seed(zlib.crc32(folder.name.encode()))
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, count in heads.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            width = count * shape["head_dim"]
            weights[f"{at}.lora_A.weight"] = torch.randn(RANK, hidden) * WEIGHT_SPREAD
            weights[f"{at}.lora_B.weight"] = torch.randn(width, RANK) * WEIGHT_SPREAD
    settings = {
        "base_model_name_or_path": str(model),
        "bias": "none",
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": sorted(heads),
        "task_type": "CAUSAL_LM",
    }
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file(weights, folder / "adapter_model.safetensors")


if __name__ == "__main__":
    for each in sys.argv[2:]:
        write_adapter(Path(sys.argv[1]), Path(each))
