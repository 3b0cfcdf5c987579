"""Give a directory with a tokenizer the configuration and random weights of a tiny Idefics3.

Runs with the Python of an engine, which has torch and transformers, and need not have torchvision:
``tiny_idefics.py FOLDER``. The same tokenizer gives the same weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]
from transformers import (  # type: ignore[import-not-found]
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3VisionConfig,
    LlamaConfig,
)

WEIGHT_SPREAD = 0.1
"""Wide enough that the next token depends on the whole prompt and is no near-tie."""
TILE = 56
"""Edge of what the vision tower sees at once, in pixels."""
PATCH = 7
SCALE = 2
TILE_TOKENS = (TILE // PATCH // SCALE) ** 2
EDGE = 4 * TILE
"""Of the longer side that every image is made to have."""


def write_model(folder: Path) -> None:
    """Write configuration, weights and processor beside the tokenizer in ``folder``."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=max(*tokenizer["model"]["vocab"].values(), *ids.values()) + 1,
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
        pad_token_id=ids["<|im_end|>"],
        tie_word_embeddings=False,
    )
    sight = Idefics3VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=TILE,
        patch_size=PATCH,
        initializer_range=WEIGHT_SPREAD,
    )
    settings = Idefics3Config(
        text_config=text,
        vision_config=sight,
        scale_factor=SCALE,
        image_token_id=ids["<image>"],
        pad_token_id=ids["<|im_end|>"],
        tie_word_embeddings=False,
    )
    Idefics3ForConditionalGeneration(settings).save_pretrained(folder)
    _write_processor(folder)


def _write_processor(folder: Path) -> None:
    image = {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "size": {"longest_edge": EDGE},
        "max_image_size": {"longest_edge": TILE},
        "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3,
    }
    whole = {"processor_class": "Idefics3Processor", "image_seq_len": TILE_TOKENS}
    for name, fields in (("preprocessor_config", image), ("processor_config", whole)):
        (folder / f"{name}.json").write_text(json.dumps(fields))


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
