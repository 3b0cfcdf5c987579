"""What a model is: its dimensions and switches, read from ``config.json``.

Dense decoders of three families that differ in switches only: biases on projections, norms on
heads, tied embeddings, positions. Everything else is refused with the field that says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, get_args

from msgspec import Struct

from sidecar.compute.field import Fields, ModelError, read_table
from sidecar.compute.rope import RopeConfig, RopeKind

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ModelConfig", "ModelError", "read_model_config"]

Family = Literal["llama", "qwen2", "qwen3"]

ARCHITECTURES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
STORED_DTYPES: Final = ("float32", "float16", "bfloat16")
POSITION_MAX_TOKENS: Final = 1 << 24
"""Positions are turned in float32, which tells integers apart up to here."""
DEFAULT_THETA: Final = 10_000.0
DEFAULT_NORM_EPSILON: Final = 1e-6
QWEN3_HEAD_WIDTH: Final = 128
"""Where the config does not say; the other families divide the hidden width."""
LAYER_MAX_COUNT: Final = 4096
DYNAMIC_LEAST_HEAD_WIDTH: Final = 4


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Everything that decides what a model computes, except its weights.

    A model ends its answer with one of ``eos_token_ids``; ``suppressed_token_ids`` are never
    sampled. ``torch_dtype`` is the type that the config says the weights are stored in.
    """

    family: Family
    vocabulary_size: int
    hidden_width: int
    intermediate_width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    norm_epsilon: float
    rope: RopeConfig
    has_tied_embeddings: bool = False
    has_attention_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_head_norms: bool = False
    max_position_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    suppressed_token_ids: tuple[int, ...] = ()
    torch_dtype: str = "float32"


def read_model_config(directory: Path) -> ModelConfig:
    """Return the model in ``directory``: of ``config.json`` and ``generation_config.json``.

    Raises ModelError, whatever the files hold.
    """
    fields = read_table(directory / "config.json")
    family = _family(fields)
    _refuse_other_arithmetic(fields)
    layers = fields.count("num_hidden_layers", most=LAYER_MAX_COUNT)
    _refuse_sliding_window(fields, family, layers)
    heads, kv_heads, head_width = _heads(fields, family)
    rope = _rope(fields, head_width)
    has_bias = family != "qwen2" and fields.flag("attention_bias", default=False)
    vocabulary_size = fields.count("vocab_size")
    eos, suppressed = _special_tokens(fields, directory, vocabulary_size)
    return ModelConfig(
        family=family,
        vocabulary_size=vocabulary_size,
        hidden_width=fields.count("hidden_size"),
        intermediate_width=fields.count("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        norm_epsilon=fields.number("rms_norm_eps", DEFAULT_NORM_EPSILON),
        rope=rope,
        has_tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        has_attention_bias=has_bias or family == "qwen2",
        has_output_bias=has_bias,
        has_mlp_bias=family == "llama" and fields.flag("mlp_bias", default=False),
        has_head_norms=family == "qwen3",
        max_position_tokens=_max_position_tokens(fields, rope),
        eos_token_ids=eos,
        suppressed_token_ids=suppressed,
        torch_dtype=_dtype(fields),
    )


def _family(fields: Fields) -> Family:
    expected = ", ".join(ARCHITECTURES)
    architectures = fields.texts("architectures")
    model_type = fields.text("model_type")
    if architectures:
        family = ARCHITECTURES.get(architectures[0])
        if family is None or len(architectures) > 1:
            fields.refuse("architectures", f"one of {expected}", ", ".join(architectures))
        if model_type not in (None, family):
            fields.refuse("model_type", f"{family} as in architectures", model_type)
        return family
    named = next((known for known in ARCHITECTURES.values() if known == model_type), None)
    if named is None:
        fields.refuse("architectures", f"one of {expected}", model_type or "nothing")
    return named


def _refuse_other_arithmetic(fields: Fields) -> None:
    """Refuse what would compute something else than the plain families do."""
    for name in ("quantization_config", "compression_config"):
        if name in fields:
            fields.refuse(name, "no quantized weights", fields.value(name))
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if fields.count(name, 0, least=0) > 0:
            fields.refuse(name, "no experts: a dense model", fields.value(name))
    activation = fields.text("hidden_act")
    if activation not in (None, "silu"):
        fields.refuse("hidden_act", "silu", activation)
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        fields.refuse("partial_rotary_factor", "1", fields.value("partial_rotary_factor"))


def _refuse_sliding_window(fields: Fields, family: Family, layers: int) -> None:
    layer_types = fields.texts("layer_types")
    if layer_types is not None:
        if len(layer_types) != layers:
            fields.refuse("layer_types", f"{layers} entries", len(layer_types))
        other = next((kind for kind in layer_types if kind != "full_attention"), None)
        if other is not None:
            fields.refuse("layer_types", "full_attention in every layer", other)
        return
    if family == "llama" or not fields.flag("use_sliding_window", default=False):
        return
    full_layers = fields.count("max_window_layers", 0, least=0)
    if "sliding_window" in fields and full_layers < layers:
        fields.refuse("use_sliding_window", "false: every layer sees the whole text", "true")


def _heads(fields: Fields, family: Family) -> tuple[int, int, int]:
    """Return heads, KV heads and their width."""
    hidden_width = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        expected = f"a divisor of num_attention_heads ({heads})"
        fields.refuse("num_key_value_heads", expected, kv_heads)
    if "head_dim" not in fields and family != "qwen3" and hidden_width % heads:
        expected = f"a multiple of num_attention_heads ({heads})"
        fields.refuse("hidden_size", expected, hidden_width)
    derived = QWEN3_HEAD_WIDTH if family == "qwen3" else hidden_width // heads
    head_width = fields.count("head_dim", derived)
    if head_width % 2:
        fields.refuse("head_dim", "an even number", head_width)
    return heads, kv_heads, head_width


def _rope(fields: Fields, head_width: int) -> RopeConfig:
    """Return the position settings of the old form (rope_scaling) or the new (rope_parameters)."""
    old, new = fields.inner("rope_scaling"), fields.inner("rope_parameters")
    scaling = old or new or Fields({})
    kind = scaling.text("rope_type") or scaling.text("type") or "default"
    if kind not in get_args(RopeKind):
        expected = f"one of {', '.join(get_args(RopeKind))}"
        scaling.refuse("rope_type", expected, kind)
    for name in ("mrope_section", "alpha", "full_attention", "sliding_attention"):
        if name in scaling:
            scaling.refuse(name, "no such field", scaling.value(name))
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        scaling.refuse("partial_rotary_factor", "1")
    theta = (new or scaling).optional_number("rope_theta", above=1.0)
    theta = theta or scaling.optional_number("rope_theta", above=1.0)
    theta = theta or fields.number("rope_theta", DEFAULT_THETA, above=1.0)
    rope = RopeConfig(kind="default", theta=theta)
    return rope if kind == "default" else _scaled_rope(fields, scaling, kind, theta, head_width)


def _scaled_rope(
    fields: Fields, scaling: Fields, kind: str, theta: float, head_width: int
) -> RopeConfig:
    context_tokens = fields.count("max_position_embeddings", most=POSITION_MAX_TOKENS)
    if kind == "dynamic":
        if head_width < DYNAMIC_LEAST_HEAD_WIDTH:
            expected = f"at least {DYNAMIC_LEAST_HEAD_WIDTH} with dynamic positions"
            fields.refuse("head_dim", expected, head_width)
        return _dynamic_rope(scaling, theta, context_tokens)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=_factor(scaling))
    name = "original_max_position_embeddings"
    holder = fields if name in fields else scaling
    original_tokens = holder.count(name, context_tokens)
    if kind == "yarn":
        factor = _factor(scaling, context_tokens / original_tokens)
        return _yarn_rope(scaling, theta, factor, original_tokens)
    low = scaling.number("low_freq_factor")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=_factor(scaling),
        original_tokens=original_tokens,
        low_frequency_factor=low,
        high_frequency_factor=scaling.number("high_freq_factor", above=low),
    )


def _factor(scaling: Fields, default: float | None = None) -> float:
    factor = scaling.number("factor", default)
    if factor < 1.0:
        scaling.refuse("factor", "a number of at least 1", factor)
    return factor


def _dynamic_rope(scaling: Fields, theta: float, context_tokens: int) -> RopeConfig:
    return RopeConfig(
        kind="dynamic",
        theta=theta,
        factor=_factor(scaling),
        original_tokens=scaling.count("max_trained_positions", context_tokens, most=context_tokens),
        context_tokens=context_tokens,
    )


def _yarn_rope(scaling: Fields, theta: float, factor: float, original_tokens: int) -> RopeConfig:
    beta_slow = scaling.number("beta_slow", 1.0)
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_tokens=original_tokens,
        beta_fast=scaling.number("beta_fast", 32.0, above=beta_slow),
        beta_slow=beta_slow,
        attention_factor=scaling.optional_number("attention_factor"),
        mscale=scaling.optional_number("mscale"),
        mscale_all_dimensions=scaling.optional_number("mscale_all_dim"),
        is_ramp_truncated=scaling.flag("truncate", default=True),
    )


def _max_position_tokens(fields: Fields, rope: RopeConfig) -> int:
    """Return the longest text: linear and yarn may extend what the config names, as in vLLM."""
    named = fields.count("max_position_embeddings", most=POSITION_MAX_TOKENS)
    scaled = float(named)
    if rope.kind == "linear":
        scaled = named * rope.factor
    elif rope.kind == "yarn":
        scaled = max(named, rope.original_tokens * rope.factor)
    if scaled > POSITION_MAX_TOKENS:
        expected = f"at most {POSITION_MAX_TOKENS} scaled positions"
        fields.refuse("max_position_embeddings", expected, scaled)
    return int(scaled)


def _special_tokens(
    fields: Fields, directory: Path, vocabulary_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return end tokens and suppressed tokens, of both files."""
    eos = fields.token_ids("eos_token_id", vocabulary_size)
    path = directory / "generation_config.json"
    if not path.exists():
        return tuple(sorted(set(eos))), ()
    generation = read_table(path)
    eos += generation.token_ids("eos_token_id", vocabulary_size)
    suppressed = tuple(sorted(set(generation.token_ids("suppress_tokens", vocabulary_size))))
    if len(suppressed) == vocabulary_size:
        generation.refuse("suppress_tokens", "a token that may be sampled", "none")
    return tuple(sorted(set(eos))), suppressed


def _dtype(fields: Fields) -> str:
    found = fields.text("dtype") or fields.text("torch_dtype") or STORED_DTYPES[0]
    dtype = found.removeprefix("torch.")
    if dtype not in STORED_DTYPES:
        fields.refuse("torch_dtype", f"one of {', '.join(STORED_DTYPES)}", found)
    return dtype
