from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.compute.model import read_model_config
from warmroute.cli import UsageError, main
from warmroute.kv_size import Plan, parse_memory, size_cache

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "num_key_value_heads": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-3.1-70b": {
        **LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 131072,
        "vocab_size": 152064,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    },
}


def folder(tmp_path: Path, name: str) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    return tmp_path


def sized(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["kv", "size", *words, "--json"]) == 0
    size: dict[str, Any] = json.loads(capsys.readouterr().out)
    return size


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 327_680),
        ("qwen2.5-7b", 57_344),
        ("qwen3-0.6b", 114_688),
    ],
)
def test_known_models_take_their_known_bytes_per_token(
    tmp_path: Path, name: str, token_bytes: int
) -> None:
    config = read_model_config(folder(tmp_path, name))
    plan = Plan(context_tokens=100, sequences=1)
    by_dtype = {
        dtype: size_cache(config, dtype, plan).token_bytes
        for dtype in ("float32", "bfloat16", "float16", "fp8")
    }
    assert by_dtype == {
        "float32": 2 * token_bytes,
        "bfloat16": token_bytes,
        "float16": token_bytes,
        "fp8": token_bytes // 2,
    }


def test_every_figure_follows_from_the_bytes_per_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(folder(tmp_path, "llama-3.1-8b")), "--context", "1001", "--sequences", "3"]
    size = sized(capsys, *words, "--memory", "1GiB")
    assert size == {
        "dtype": "bfloat16",
        "page_tokens": 16,
        "context_tokens": 1001,
        "sequences": 3,
        "token_bytes": 131_072,
        "page_bytes": 16 * 131_072,
        "sequence_pages": 63,
        "sequence_bytes": 63 * 16 * 131_072,
        "waste_tokens": 7,
        "waste_bytes": 7 * 131_072,
        "total_pages": 189,
        "total_bytes": 189 * 16 * 131_072,
        "fit": {"memory_bytes": 1 << 30, "pages": 512, "tokens": 8192, "sequences": 8},
    }


@pytest.mark.parametrize("context_tokens", [1, 15, 16, 17, 160])
@pytest.mark.parametrize("page_tokens", [1, 16])
def test_a_sequence_wastes_less_than_a_page(
    tmp_path: Path, context_tokens: int, page_tokens: int
) -> None:
    config = read_model_config(folder(tmp_path, "qwen2.5-7b"))
    plan = Plan(context_tokens=context_tokens, sequences=2, page_tokens=page_tokens)
    size = size_cache(config, "float16", plan)
    assert 0 <= size.waste_tokens < page_tokens
    assert size.sequence_pages * page_tokens == context_tokens + size.waste_tokens
    assert size.sequence_bytes == (context_tokens + size.waste_tokens) * size.token_bytes
    assert size.fit is None


def test_the_text_says_what_fits_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["kv", "size", str(folder(tmp_path, "llama-3.1-8b")), "--sequences", "9"]
    assert main([*words, "--context", "1024", "--memory", "1GiB"]) == 0
    said = capsys.readouterr().out
    assert "llama, 32 layers x 8 KV heads x 128, bfloat16, pages of 16 tokens" in said
    assert "per token      131,072 bytes (128.00 KiB)" in said
    assert "per sequence   134,217,728 bytes (128.00 MiB): 1024 tokens in 64 pages" in said
    assert "of it empty  0 bytes: 0 tokens" in said
    assert "room for 8 sequences (8192 tokens, 512 pages)" in said
    assert "not enough for 9: 134,217,728 bytes (128.00 MiB) are missing" in said


@pytest.mark.parametrize(
    ("text", "memory_bytes"),
    [
        ("24GiB", 24 << 30),
        ("24gib", 24 << 30),
        ("1.5 TiB", 3 << 39),
        ("80GB", 80 * 10**9),
        ("512", 512),
        ("512B", 512),
        ("0", 0),
        ("0.1KiB", 102),
    ],
)
def test_memory_is_given_in_binary_or_decimal_units(text: str, memory_bytes: int) -> None:
    assert parse_memory(text) == memory_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "24G iB", "-1GiB", "24XB", "1e9", "24i", "٢GiB", "1..5"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--memory: expected a size such as 24GiB"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--context", "0"], "--context: expected a whole number of at least 1, got '0'"),
        (["--context", "1.5"], "--context: expected a whole number"),
        (["--context", "131073"], "--context: expected at most 131072 tokens"),
        (["--context", "9" * 5000], "--context: expected a whole number"),
        (["--sequences", "-3"], "--sequences: expected a whole number"),
        (["--page-tokens", "x"], "--page-tokens: expected a whole number"),
        (["--memory", "much"], "--memory: expected a size"),
    ],
)
def test_a_wrong_size_names_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    given = ["--context", "16", "--sequences", "1", *words]
    assert main(["kv", "size", str(folder(tmp_path, "llama-3.1-8b")), *given]) == 2
    said = capsys.readouterr()
    assert expected in said.err
    assert said.out == ""


def test_a_model_that_cannot_be_read_is_named_with_its_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["kv", "size", str(tmp_path), "--context", "16", "--sequences", "1"]
    assert main(words) == 2
    assert "config.json: expected a readable file" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(
        json.dumps({**MODELS["llama-3.1-8b"], "num_key_value_heads": 5})
    )
    assert main(words) == 2
    assert "num_key_value_heads: expected a divisor" in capsys.readouterr().err
