"""Compute logits with transformers, to compare ours with: ``reference_model.py FOLDER...``.

Runs with a Python that has torch and transformers. Each folder has a checkpoint and
``tokens.json``, a list of ids; its logits are written to ``logits.npy``, float32 ``(tokens,
vocabulary)``. They are computed in float32 whatever type the weights are stored in. The model is
also saved again below ``saved``, in shards, as transformers writes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM  # type: ignore[import-not-found]

SHARD_SIZE = "100KB"


def write_logits(folder: Path) -> None:
    """Compute what the checkpoint in ``folder`` makes of its tokens."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", use_safetensors=True
    ).eval()
    tokens = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    np.save(folder / "logits.npy", logits.numpy())
    model.save_pretrained(folder / "saved", max_shard_size=SHARD_SIZE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        write_logits(Path(name))
