from __future__ import annotations

import hashlib
import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sidecar.compute.model import ModelConfig, ModelError, read_model_config
from sidecar.compute.weights import (
    SAMPLE_BYTES,
    SAMPLE_WINDOWS,
    builtin_config,
    open_weights,
    random_weights,
    tensor_shapes,
    widened_bfloat16,
)
from support.checkpoint import config_table, stored, write_checkpoint, write_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    from sidecar.compute.weights import Weights

SHARD = "model-00001-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def opened(folder: Path) -> Weights:
    return open_weights(folder, read_model_config(folder))


def tensors_of(folder: Path) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """Return what a checkpoint holds, to write it changed."""
    weights = opened(folder)
    shapes = tensor_shapes(read_model_config(folder))
    return {name: weights.raw(name)[::-1] for name in shapes}


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    for value in (0.0, -0.0, 1.0, -2.5, 3.140625, 2.0**-126, 2.0**120, np.inf):
        bits = struct.unpack("<I", struct.pack("<f", np.float32(value)))[0] >> 16
        found = widened_bfloat16(np.array([bits], dtype=np.uint16))
        assert found.dtype == np.float32
        assert found[0] == value
    assert np.isnan(widened_bfloat16(np.array([0x7FC0], dtype=np.uint16)))[0]


@pytest.mark.parametrize(
    ("dtype", "name", "raw"),
    [("float32", "F32", "<f4"), ("float16", "F16", "<f2"), ("bfloat16", "BF16", "<u2")],
)
def test_values_are_exactly_those_in_the_file(
    dtype: str, name: str, raw: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, config_table("llama", torch_dtype=dtype), seed=3)
    config = read_model_config(folder)
    weights, original = open_weights(folder, config), random_weights(config, 3)
    for tensor, shape in tensor_shapes(config).items():
        found, found_name = weights.raw(tensor)
        expected = stored(original.array(tensor), dtype)[1]
        assert (found_name, found.dtype, found.shape) == (name, np.dtype(raw), shape)
        assert np.array_equal(found, expected)
        array = weights.array(tensor)
        assert array.dtype == np.float32
        assert array.flags.owndata or array.base is not None
        assert np.array_equal(stored(array, dtype)[1], expected)


def test_shards_hold_the_same_model_as_one_file(tmp_path: Path) -> None:
    one = opened(write_checkpoint(tmp_path / "one", config_table("qwen3")))
    three = opened(write_checkpoint(tmp_path / "three", config_table("qwen3"), shards=3))
    assert one.digest == three.digest
    name = "model.layers.1.self_attn.k_norm.weight"
    assert np.array_equal(one.array(name), three.array(name))


def test_the_digest_tells_models_apart(tmp_path: Path) -> None:
    def digest(name: str, seed: int = 1, **changed: Any) -> str:
        table = config_table("llama", **changed)
        return opened(write_checkpoint(tmp_path / name, table, seed=seed)).digest

    same = digest("a")
    assert digest("b") == same
    assert len(same) == 16
    others = {
        digest("seed", seed=2),
        digest("half", torch_dtype="float16"),
        digest("epsilon", rms_norm_eps=1e-6),
        digest("eos", rope_theta=99.0),
    }
    assert len(others | {same}) == 5


def test_the_digest_tells_types_of_the_same_bits_apart(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config_table("llama", torch_dtype="float16"))
    before = opened(folder).digest
    tensors = {name: ("BF16", bits) for name, (_, bits) in tensors_of(folder).items()}
    write_safetensors(folder / "model.safetensors", tensors)
    assert opened(folder).digest != before


def test_the_digest_sees_one_value_in_every_window(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config_table("llama", vocab_size=2000))
    tensors = tensors_of(folder)
    before = opened(folder).digest
    name = "lm_head.weight"
    values = np.array(tensors[name][1])
    last = values.nbytes - SAMPLE_BYTES
    assert last > (SAMPLE_WINDOWS - 1) * SAMPLE_BYTES
    for window in range(SAMPLE_WINDOWS):
        changed = values.copy()
        changed.reshape(-1)[-(-last * window // (SAMPLE_WINDOWS - 1) // 4) + 1] += 1
        write_safetensors(folder / "model.safetensors", tensors | {name: ("F32", changed)})
        assert opened(folder).digest != before


def test_tensors_that_follow_from_others_are_passed_over(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config_table("llama", tie_word_embeddings=True))
    tensors = tensors_of(folder)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", np.ones(4, dtype="<f4")),
        "model.layers.1.self_attn.rotary_emb.inv_freq": ("I64", np.ones(4, dtype="<i8")),
    }
    before = opened(folder).digest
    write_safetensors(folder / "model.safetensors", tensors | extra)
    assert opened(folder).digest == before


def without(name: str) -> Any:
    return lambda tensors: {each: tensors[each] for each in tensors if each != name}


def replaced(name: str, dtype: str, array: np.ndarray[Any, Any]) -> Any:
    return lambda tensors: tensors | {name: (dtype, array)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("lm_head.weight"), r"lm_head.weight: expected a tensor of shape \[97, 48\]"),
        (
            replaced("model.norm.weight", "F32", np.ones(47, dtype="<f4")),
            r"model.norm.weight: expected shape \[48\], found \[47\]",
        ),
        (
            replaced("lm_head.weight", "F32", np.ones((48, 97), dtype="<f4")),
            r"lm_head.weight: expected shape \[97, 48\], found \[48, 97\]",
        ),
        (
            replaced("model.norm.weight", "F64", np.ones(48)),
            "model.norm.weight: expected one of F32, F16, BF16, found F64",
        ),
        (
            replaced("model.layers.2.mlp.up_proj.weight", "F32", np.ones((80, 48), "<f4")),
            "model.layers.2.mlp.up_proj.weight: expected no such tensor in this llama",
        ),
        (
            replaced("model.layers.0.self_attn.q_proj.bias", "F32", np.ones(48, "<f4")),
            "q_proj.bias: expected no such tensor",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    change: Any, message: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, config_table("llama"))
    write_safetensors(folder / "model.safetensors", change(tensors_of(folder)))
    with pytest.raises(ModelError, match=message):
        opened(folder)


def entry(first: int, end: int, shape: object = (1,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "a JSON header"),
        (b"{", "a JSON header"),
        (b"[]", "a JSON header"),
        (b"\xff", "a JSON header"),
        (b'{"a":' + b"[" * 50_000, "a JSON header"),
        ({"a": 1}, "a JSON header"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "a JSON header"),
        ({"a": entry(0, 4, dtype=4)}, "a JSON header"),
        ({"a": entry(0, 4, shape=["x"])}, "a JSON header"),
        ({"a": entry(0, 4, shape=[1 << 70])}, "a with 4722366482869645213696 bytes"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, "b from byte 4 of 8 on"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, "b from byte 4 of 8 on"),
        ({"a": entry(0, 4), "b": entry(5, 8)}, "b from byte 4 of 8 on"),
        ({"a": entry(4, 8)}, "a from byte 0 of 8 on"),
        ({"a": entry(0, 12, shape=[3])}, "a from byte 0 of 8 on"),
        ({"a": entry(0, -4)}, "a from byte 0 of 8 on"),
        ({"a": entry(-4, 0)}, "a from byte 0 of 8 on"),
        ({"a": entry(0, 1 << 62)}, "a from byte 0 of 8 on"),
        ({"a": entry(0, 4)}, "8 bytes of tensors"),
        ({"a": entry(0, 8, shape=[1])}, "a with 4 bytes, found 8"),
        ({"a": entry(0, 8, shape=[-1, -2])}, "a with a shape of natural numbers"),
        ({"a": entry(0, 8, shape=[2**40, 2**40])}, "a with 4835703278458516698824704 bytes"),
    ],
)
def test_a_malformed_header_is_refused(header: Any, message: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config_table("llama"))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ModelError, match=rf"model.safetensors: expected {message}"):
        opened(folder)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "a safetensors file, found 0 bytes"),
        (b"1234567", "a safetensors file, found 7 bytes"),
        ((9).to_bytes(8, "little"), "a header of at most 0 bytes, found 9"),
        (b"\xff" * 64, "a header of at most 56 bytes, found 18446744073709551615"),
    ],
)
def test_a_length_beyond_the_file_is_refused(content: bytes, expected: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config_table("llama"))
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=rf"model.safetensors: expected {expected}"):
        opened(folder)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config_table("llama"))
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in (8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model.safetensors: expected"):
            opened(folder)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config_table("llama"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model.safetensors: expected a readable"):
        opened(folder)
    (folder / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"model.safetensors: expected a"):
        opened(folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lm_head.weight": "../model.safetensors"}, "names of .safetensors files beside it"),
        ({"lm_head.weight": "/etc/passwd"}, "names of .safetensors files beside it"),
        ({"lm_head.weight": "..\\a.safetensors"}, "names of .safetensors files beside it"),
        ({"lm_head.weight": "a\0.safetensors"}, "names of .safetensors files beside it"),
        ({"lm_head.weight": "config.json"}, "names of .safetensors files beside it"),
        ({"lm_head.weight": "gone.safetensors"}, "the tensors that|a readable"),
        ({"lm_head.weight": 4}, "weight_map.lm_head.weight: expected a string"),
        ({"lm_head.weight": "model-00002-of-00003.safetensors"}, "the tensors that|tensor lm_h"),
        ({"more": SHARD}, f"{SHARD}: expected tensor more, as"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, config_table("llama"), shards=3)
    index = json.loads((folder / INDEX).read_text())
    assert index["weight_map"]["lm_head.weight"] == SHARD
    index["weight_map"] |= changed
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        opened(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": 4}'])
def test_an_index_without_a_map_is_refused(content: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config_table("llama"), shards=3)
    (folder / INDEX).write_text(content)
    with pytest.raises(ModelError, match="expected"):
        opened(folder)


def test_random_weights_depend_on_the_seed_only() -> None:
    config = builtin_config(256)
    name = "model.layers.0.mlp.up_proj.weight"
    first, again, other = (random_weights(config, seed) for seed in (1, 1, -1))
    assert first.digest == again.digest != other.digest
    assert np.array_equal(first.array(name), again.array(name))
    assert first.raw(name)[1] == "F32"
    bits = hashlib.blake2b(first.array(name).tobytes(), digest_size=4).hexdigest()
    assert bits == "82adbbbc"


def test_random_projections_keep_their_spread_whatever_the_width() -> None:
    weights = random_weights(builtin_config(1000), 1)
    for name, width in (("mlp.down_proj", 512), ("self_attn.q_proj", 192)):
        array = weights.array(f"model.layers.2.{name}.weight")
        assert array.std() * width**0.5 == pytest.approx(2.0, rel=0.02)
        assert abs(array.mean()) < 0.01
    norm = weights.array("model.norm.weight")
    assert norm.mean() == pytest.approx(1.0, abs=0.05)
    assert 0.05 < norm.std() < 0.2


def test_the_builtin_model_suppresses_bytes_that_are_no_text() -> None:
    config = builtin_config(256)
    allowed = set(range(256)) - set(config.suppressed_token_ids)
    assert allowed == {10, *range(32, 127)}
    words = builtin_config(5000, eos_token_ids=(7,))
    assert isinstance(words, ModelConfig)
    assert (words.suppressed_token_ids, words.eos_token_ids) == ((), (7,))
