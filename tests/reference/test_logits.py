"""Our logits beside those of transformers: ``WARMROUTE_VLLM`` names the environment it is in."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sidecar.compute.model import read_model_config
from sidecar.compute.numpy_forward import Forward, KvCache, Segment
from sidecar.compute.weights import open_weights
from support.checkpoint import ROPES, config_table, write_checkpoint
from support.reference_logits import (
    CASES,
    STORED_POSITIONS,
    compute_reference,
    relative_error,
    stored_logits,
    tokens,
)
from support.vllm import VARIABLE, NoEngineError, vllm_executable

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

pytestmark = pytest.mark.heavy
TIMEOUT_S = 1200
TOLERANCE = 2e-4
"""Of the spread, as for the stored logits, but the worst of hundreds of thousands."""
DTYPES = ("float32", "float16", "bfloat16")
KV_HEADS = (1, 2, 6)
BIASES: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": ({}, {"attention_bias": True}, {"mlp_bias": True}),
    "qwen2": ({},),
    "qwen3": ({}, {"attention_bias": True}),
}


def matrix() -> dict[str, dict[str, Any]]:
    """Return every family with every kind of positions, dtype, head, GQA and bias."""
    found = {}
    for family, rope, dtype in itertools.product(BIASES, ROPES, DTYPES):
        for kv_heads, is_tied, biases in itertools.product(KV_HEADS, (False, True), BIASES[family]):
            named = "-".join((family, rope, dtype, str(kv_heads), str(is_tied), *biases))
            found[named] = config_table(
                family,
                rope,
                torch_dtype=dtype,
                num_key_value_heads=kv_heads,
                tie_word_embeddings=is_tied,
                **biases,
            )
    return found


def logits_of(folder: Path) -> NDArray[np.float32]:
    """Return our logits of all tokens."""
    config = read_model_config(folder)
    forward = Forward(config, open_weights(folder, config), len(tokens()))
    pages = np.arange(10)
    rows = forward.hidden([Segment(np.array(tokens()), 0, pages)], KvCache(config, 10, 16))
    return forward.logits(rows)


@pytest.fixture(scope="session")
def python() -> Path:
    try:
        return vllm_executable(os.environ.get(VARIABLE)).with_name("python")
    except NoEngineError as error:
        message = str(error)
    pytest.fail(message, pytrace=False)


@pytest.mark.timeout(TIMEOUT_S)
def test_every_kind_of_model_has_the_logits_of_transformers(python: Path, tmp_path: Path) -> None:
    folders = [
        write_checkpoint(tmp_path / name, table, seed=place)
        for place, (name, table) in enumerate(matrix().items())
    ]
    compute_reference(python, folders)
    errors = {}
    for folder in folders:
        expected = np.load(folder / "logits.npy")
        errors[folder.name] = relative_error(logits_of(folder), expected)
        errors[f"{folder.name} saved"] = relative_error(logits_of(folder / "saved"), expected)
    worst = max(errors, key=errors.__getitem__)
    print(f"{len(errors)} models, largest error {errors[worst]:.1e} of the spread: {worst}")  # noqa: T201
    assert errors[worst] < TOLERANCE


def test_the_stored_logits_are_those_of_today(python: Path, tmp_path: Path) -> None:
    folders = [write_checkpoint(tmp_path / case, table) for case, table in CASES.items()]
    compute_reference(python, folders)
    for folder in folders:
        found = np.load(folder / "logits.npy")[list(STORED_POSITIONS)]
        assert relative_error(found, stored_logits(folder.name)) < TOLERANCE
