"""A Llama with random weights of any size, for engines that shall take their time."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Final

from tokenizers import AddedToken, Tokenizer, pre_tokenizers, trainers

from support.checkpoint import config_table, write_checkpoint
from support.tokenizer import SPECIAL_TOKENS
from support.vllm import write_model_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

CONTEXT_TOKENS: Final = 4_096
HEAD_WIDTH: Final = 64
VOCABULARY: Final = 320


def write_llama(folder: Path, layers: int, width: int) -> Path:
    """Write a model that vLLM and the worker can serve; ``width`` is a multiple of 64.

    Its tokenizer has each letter with a space before it as one token, as large ones do. 12 layers
    of 768 are 88 million parameters.
    """
    path = write_model_tokenizer(folder) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL_TOKENS],
    )
    letters = "".join(f" {letter}" for letter in string.ascii_letters)
    tokenizer.train_from_iterator([letters] * 20, trainer)
    tokenizer.save(str(path))
    heads = max(1, width // HEAD_WIDTH)
    table = config_table(
        "llama",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD_WIDTH,
        max_position_embeddings=2 * CONTEXT_TOKENS,
        bos_token_id=SPECIAL_TOKENS.index("<|bos|>"),
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
    )
    return write_checkpoint(folder, table)
