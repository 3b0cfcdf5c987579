from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.compute.model import ModelConfig, ModelError, read_model_config
from sidecar.compute.rope import RopeConfig, rope_rows
from support.checkpoint import ROPES, config_table

if TYPE_CHECKING:
    from pathlib import Path


def read(folder: Path, table: object, generation: object = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(table), encoding="utf-8")
    if generation is not None:
        text = json.dumps(generation)
        (folder / "generation_config.json").write_text(text, encoding="utf-8")
    return read_model_config(folder)


def test_a_config_gives_every_dimension(tmp_path: Path) -> None:
    config = read(tmp_path, config_table("llama", torch_dtype="bfloat16"))
    assert config == ModelConfig(
        family="llama",
        vocabulary_size=97,
        hidden_width=48,
        intermediate_width=80,
        layers=2,
        heads=6,
        kv_heads=2,
        head_width=8,
        norm_epsilon=1e-5,
        rope=RopeConfig(),
        max_position_tokens=256,
        eos_token_ids=(2,),
        torch_dtype="bfloat16",
    )


def test_the_families_differ_in_biases_and_norms(tmp_path: Path) -> None:
    def switches(family: str, **changed: Any) -> tuple[bool, ...]:
        config = read(tmp_path, config_table(family, **changed))
        return (
            config.has_attention_bias,
            config.has_output_bias,
            config.has_mlp_bias,
            config.has_head_norms,
        )

    assert switches("llama") == (False, False, False, False)
    assert switches("llama", attention_bias=True) == (True, True, False, False)
    assert switches("llama", mlp_bias=True) == (False, False, True, False)
    assert switches("qwen2") == (True, False, False, False)
    assert switches("qwen2", attention_bias=False) == (True, False, False, False)
    assert switches("qwen3") == (False, False, False, True)
    assert switches("qwen3", attention_bias=True) == (True, True, False, True)


def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    absent: dict[str, Any] = {
        "num_key_value_heads": None,
        "rms_norm_eps": None,
        "torch_dtype": None,
    }
    config = read(tmp_path, config_table("llama", **absent))
    assert (config.kv_heads, config.norm_epsilon, config.torch_dtype) == (6, 1e-6, "float32")
    assert read(tmp_path, config_table("qwen3", head_dim=None)).head_width == 128
    assert read(tmp_path, config_table("llama", head_dim=10)).head_width == 10


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_both_names_of_the_dtype_are_read(field: str, tmp_path: Path) -> None:
    table = config_table("llama", torch_dtype=None) | {field: "float16"}
    assert read(tmp_path, table).torch_dtype == "float16"


def test_the_model_type_stands_in_for_the_architecture(tmp_path: Path) -> None:
    assert read(tmp_path, config_table("qwen2", architectures=None)).family == "qwen2"


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "expected"),
    [
        (5, None, (5,)),
        ([7, 5], None, (5, 7)),
        (5, 5, (5,)),
        (5, [9, 3], (3, 5, 9)),
        (None, [9, 3], (3, 9)),
        (None, None, ()),
    ],
)
def test_end_tokens_of_both_files_count(
    config_ids: object, generation_ids: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    table = config_table("llama", eos_token_id=config_ids)
    config = read(tmp_path, table, {"eos_token_id": generation_ids})
    assert config.eos_token_ids == expected


def test_suppressed_tokens_are_read(tmp_path: Path) -> None:
    config = read(tmp_path, config_table("llama"), {"suppress_tokens": [9, 3, 9]})
    assert config.suppressed_token_ids == (3, 9)


@pytest.mark.parametrize(
    ("rope", "expected", "max_position_tokens"),
    [
        ("theta", RopeConfig(theta=500.0), 256),
        ("theta_new", RopeConfig(theta=500.0), 256),
        ("linear", RopeConfig(kind="linear", factor=3.0), 768),
        ("linear_new", RopeConfig(kind="linear", factor=3.0, theta=2000.0), 768),
        (
            "dynamic",
            RopeConfig(kind="dynamic", factor=2.0, original_tokens=256, context_tokens=256),
            256,
        ),
        ("llama3", RopeConfig(kind="llama3", factor=8.0, original_tokens=64), 256),
        ("yarn", RopeConfig(kind="yarn", factor=4.0, original_tokens=64), 256),
        (
            "yarn_new",
            RopeConfig(
                kind="yarn",
                theta=3000.0,
                factor=4.0,
                original_tokens=64,
                mscale=1.2,
                mscale_all_dimensions=0.7,
                beta_fast=8.0,
                beta_slow=0.25,
                is_ramp_truncated=False,
            ),
            256,
        ),
    ],
)
def test_positions_are_read_in_the_old_form_and_the_new(
    rope: str, expected: RopeConfig, max_position_tokens: int, tmp_path: Path
) -> None:
    config = read(tmp_path, config_table("llama", rope))
    assert config.rope == expected
    assert config.max_position_tokens == max_position_tokens


def test_yarn_extends_a_context_that_the_config_names_unscaled(tmp_path: Path) -> None:
    table = config_table("qwen2", "yarn", max_position_embeddings=64)
    assert read(tmp_path, table).max_position_tokens == 256


def test_the_trained_context_may_stand_outside_of_the_scaling(tmp_path: Path) -> None:
    table = config_table("llama", "llama3", original_max_position_embeddings=32)
    assert read(tmp_path, table).rope.original_tokens == 32


def test_a_window_that_no_layer_has_is_no_window(tmp_path: Path) -> None:
    window: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 2,
    }
    read(tmp_path, config_table("qwen2", **window))
    read(tmp_path, config_table("qwen2", use_sliding_window=False, sliding_window=64))
    read(tmp_path, config_table("qwen3", layer_types=["full_attention"] * 2))


SCALING = ROPES["llama3"]["rope_scaling"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures: expected one of Llama"),
        ({"architectures": "LlamaForCausalLM"}, "architectures: expected a list of strings"),
        ({"architectures": None, "model_type": None}, "architectures: .* found nothing"),
        ({"architectures": [], "model_type": "gpt2"}, "architectures: .* found gpt2"),
        ({"model_type": "qwen3"}, "model_type: expected llama as in architectures"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: expected no quantized"),
        ({"num_experts": 8}, "num_experts: expected no experts"),
        ({"hidden_act": "gelu"}, "hidden_act: expected silu, found gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected 2 entries, found 1"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types: expected full_attention in every layer, found sliding",
        ),
        ({"vocab_size": None}, "vocab_size: expected an integer .* found nothing"),
        ({"vocab_size": "97"}, "vocab_size: expected an integer"),
        ({"hidden_size": 0}, "hidden_size: expected an integer from 1"),
        ({"hidden_size": True}, "hidden_size: expected an integer from 1"),
        ({"hidden_size": 50}, r"hidden_size: expected a multiple of num_attention_heads \(6\)"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads: expected a divisor"),
        ({"head_dim": 7}, "head_dim: expected an even number, found 7"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected an integer from 1 to 4096"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings: expected an integer"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: expected a number greater than 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a number"),
        ({"rope_theta": 1}, "rope_theta: expected a number greater than 1"),
        ({"rope_theta": 10**400}, "rope_theta: expected a number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false"),
        ({"eos_token_id": 97}, "eos_token_id: expected token ids below 97, found 97"),
        ({"eos_token_id": ["end"]}, "eos_token_id: expected token ids"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype: expected one of float32"),
        ({"rope_scaling": []}, "rope_scaling: expected a JSON object"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.rope_type: expected one of"),
        ({"rope_scaling": {"type": 4}}, "rope_scaling.type: expected a string"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: expected a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor: expected .* at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": 1e9}}, "max_position_embeddings"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2, "max_trained_positions": 300}},
            "rope_scaling.max_trained_positions: expected an integer from 1 to 256",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}, "head_dim": 2},
            "head_dim: expected at least 4 with dynamic",
        ),
        ({"rope_scaling": SCALING | {"high_freq_factor": 1.0}}, "high_freq_factor: .* than 1"),
        ({"rope_scaling": SCALING | {"mrope_section": [1]}}, "mrope_section: expected no such"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 2}},
            "rope_scaling.beta_fast: expected a number greater than 2",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
            "rope_parameters.full_attention: expected no such field",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_its_field(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read(tmp_path, config_table("llama") | changed)


def test_a_sliding_window_is_refused(tmp_path: Path) -> None:
    window: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 1,
    }
    with pytest.raises(ModelError, match="use_sliding_window: expected false"):
        read(tmp_path, config_table("qwen2", **window))


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"vocab_size": NaN}', b"null"]
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_json_object_is_named(file: str, content: bytes, tmp_path: Path) -> None:
    read(tmp_path, config_table("llama"))
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match=f"^{file}: expected"):
        read_model_config(tmp_path)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json: expected a readable file"):
        read_model_config(tmp_path)


def test_a_model_that_may_say_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="suppress_tokens"):
        read(tmp_path, config_table("llama"), {"suppress_tokens": list(range(97))})


FIELDS = sorted(
    {*config_table("llama", "llama3"), *SCALING, "factor", "rope_parameters", "head_dim"}
    | {"layer_types", "use_sliding_window", "attention_bias", "mlp_bias", "type", "dtype"}
    | {"attention_factor", "mscale", "truncate", "beta_fast", "max_trained_positions"}
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-1, 64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3)
    | st.sampled_from(["linear", "dynamic", "llama3", "yarn", "silu", "float32"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5)
    ),
    max_leaves=8,
)


@given(
    changed=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
    rope=st.sampled_from(sorted(ROPES)),
)
def test_no_config_raises_anything_but_a_model_error(
    tmp_path_factory: pytest.TempPathFactory, changed: dict[str, Any], rope: str
) -> None:
    folder = tmp_path_factory.getbasetemp()
    table = config_table("llama", rope) | changed
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(table.get(name), dict):
            inner = {key: value for key, value in changed.items() if key in SCALING}
            table[name] = table[name] | inner
    with contextlib.suppress(ModelError):
        config = read(folder, table)
        assert config.heads % config.kv_heads == 0
        cosine, sine = rope_rows(config.rope, min(config.head_width, 64), np.arange(3))
        assert np.isfinite(cosine).all()
        assert np.isfinite(sine).all()
