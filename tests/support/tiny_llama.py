"""Give a directory with a tokenizer the configuration and random weights of a tiny Llama.

Runs with the Python of an engine, which has torch and transformers: ``tiny_llama.py FOLDER``.
The same tokenizer gives the same weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found]

WEIGHT_SPREAD = 0.1
"""Wide enough that the next token depends on the whole prompt and is no near-tie."""


def write_model(folder: Path) -> None:
    """Write configuration and weights beside the tokenizer in ``folder``."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = [token["id"] for token in tokenizer["added_tokens"]]
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    torch.manual_seed(0)
    settings = LlamaConfig(
        vocab_size=max(*tokenizer["model"]["vocab"].values(), *added) + 1,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=WEIGHT_SPREAD,
        bos_token_id=ids["<|bos|>"],
        eos_token_id=ids["<|im_end|>"],
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(settings).save_pretrained(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
