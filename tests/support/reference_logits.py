"""Logits that transformers computes for tiny checkpoints, stored beside this file.

``python tests/support/reference_logits.py PYTHON`` computes them again, with a Python that has
torch and transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from support.checkpoint import VOCABULARY_SIZE, config_table, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

FOLDER: Final = Path(__file__).with_name("logits")
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
TOKENS_COUNT: Final = 150
"""More than two blocks of keys, more than any trained context of the tiny models."""
STORED_POSITIONS: Final = (0, 1, 15, 16, 63, 64, 65, 127, 128, 149)
RELATIVE_TOLERANCE: Final = 1e-4
"""Of the spread of the logits: both sides are float32 and add up in different orders."""
CASES: Final[dict[str, dict[str, Any]]] = {
    "llama": config_table("llama"),
    "llama_biases": config_table("llama", "theta", attention_bias=True, mlp_bias=True),
    "llama_bfloat16_llama3": config_table("llama", "llama3", torch_dtype="bfloat16"),
    "llama_tied_linear": config_table("llama", "linear", tie_word_embeddings=True),
    "llama_dynamic_heads": config_table("llama", "dynamic", num_key_value_heads=6),
    "llama_head_width": config_table("llama", "linear_new", head_dim=16),
    "qwen2": config_table("qwen2", "theta_new"),
    "qwen2_float16_yarn": config_table("qwen2", "yarn", torch_dtype="float16"),
    "qwen2_tied_one_kv": config_table("qwen2", tie_word_embeddings=True, num_key_value_heads=1),
    "qwen3": config_table("qwen3"),
    "qwen3_bfloat16_yarn_new": config_table("qwen3", "yarn_new", torch_dtype="bfloat16"),
    "qwen3_biases_tied": config_table(
        "qwen3", "yarn_attention", attention_bias=True, tie_word_embeddings=True
    ),
}


def tokens() -> list[int]:
    """Return the text that all cases are asked about."""
    drawn = np.random.Philox(key=np.array([7, 7], dtype=np.uint64)).random_raw(TOKENS_COUNT)
    return [int(each) for each in drawn % VOCABULARY_SIZE]


def compute_reference(python: Path, folders: Sequence[Path]) -> None:
    """Have transformers write the logits of ``folders``; raises CalledProcessError."""
    for folder in folders:
        (folder / "tokens.json").write_text(json.dumps(tokens()), encoding="utf-8")
    script = Path(__file__).with_name("reference_model.py")
    subprocess.run(
        [python, "-P", script, *folders],
        env={**os.environ, **OFFLINE},
        check=True,
    )


def stored_logits(case: str) -> NDArray[np.float32]:
    """Return the logits of ``STORED_POSITIONS``, ``(positions, vocabulary)``."""
    logits: NDArray[np.float32] = np.load(FOLDER / f"{case}.npz")["logits"]
    return logits


def relative_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return the largest difference as a part of the spread of ``expected``."""
    return float(np.abs(found - expected).max() / expected.std())


def main() -> None:
    """Compute and store all cases."""
    python = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        folders = [write_checkpoint(Path(name) / case, table) for case, table in CASES.items()]
        compute_reference(python, folders)
        for folder in folders:
            logits = np.load(folder / "logits.npy")[list(STORED_POSITIONS)]
            np.savez(FOLDER / f"{folder.name}.npz", logits=logits)


if __name__ == "__main__":
    main()
