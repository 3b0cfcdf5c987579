"""Give a real tokenizer's directory the configuration and random weights of a tiny Llama.

Runs with the Python of an engine, which has torch and transformers: ``tiny_weights.py FOLDER``.
The model is there to be served, not to be asked: only its vocabulary fits the tokenizer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]


def write_model(folder: Path) -> None:
    """Write configuration and weights beside the tokenizer in ``folder``."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    torch.manual_seed(0)
    settings = LlamaConfig(
        vocab_size=max(*tokenizer["model"]["vocab"].values(), *ids.values()) + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=ids[config["eos_token"]],
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(settings).save_pretrained(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
