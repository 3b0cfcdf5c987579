"""A decoder's forward pass in torch over a paged KV cache, on a processor or with CUDA.

Pre-norm blocks of grouped-query attention and a gated SiLU (Touvron et al., LLaMA, arXiv
2302.13971; Ainslie et al., GQA, arXiv 2305.13245). Projections of the same input are one product.

With float32 on a processor a token's keys, values and logits have the same bits however its text is
cut into steps and whatever else a step computes: products are of proven shapes, attention sums in
a fixed order, and all else works on single elements or rows, with functions that do not care
whether a vector register is full (``torch.silu`` does). bfloat16 and float16 go the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from sidecar.compute.torch_attention import attend
from sidecar.compute.torch_linear import CANONICAL_ROWS, Linear
from sidecar.compute.torch_package import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from sidecar.compute.model import ModelConfig
    from sidecar.compute.plan import StepPlan
    from sidecar.compute.torch_attention import KvCache
    from sidecar.compute.weights import Weights

Tensor = Any


class DeviceGroup(Struct, frozen=True):
    """An ``AttentionGroup`` as tensors."""

    queries: Tensor
    answers: Tensor
    limits: Tensor
    pages: Tensor


class DeviceStep(Struct, frozen=True):
    """A ``StepPlan`` as tensors, with cosine and sine of its positions, (R, 1, head_width / 2)."""

    tokens: Tensor
    cosine: Tensor
    sine: Tensor
    kv_rows: Tensor
    outputs: Tensor
    groups: tuple[DeviceGroup, ...]

    def tensors(self) -> Iterator[Tensor]:
        """Yield all of them, always in the same order."""
        yield from (self.tokens, self.cosine, self.sine, self.kv_rows, self.outputs)
        for group in self.groups:
            yield from (group.queries, group.answers, group.limits, group.pages)


def device_step(
    plan: StepPlan, cosine: NDArray[Any], sine: NDArray[Any], device: Any
) -> DeviceStep:
    """Return ``plan`` on ``device``; the copies may still be under way there."""

    def on_device(array: NDArray[Any]) -> Tensor:
        held = torch.from_numpy(array)
        return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held

    return DeviceStep(
        tokens=on_device(plan.tokens),
        cosine=on_device(cosine),
        sine=on_device(sine),
        kv_rows=on_device(plan.kv_rows),
        outputs=on_device(plan.outputs),
        groups=tuple(
            DeviceGroup(*map(on_device, (group.queries, group.answers, group.limits, group.pages)))
            for group in plan.groups
        ),
    )


class Layer:
    """One block's weights."""

    def __init__(self, config: ModelConfig, load: Loader, layer: int) -> None:
        prefix = f"model.layers.{layer}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        self.input_norm = load.tensor(f"{prefix}input_layernorm.weight")
        self.qkv = load.linear(
            *(f"{attention}{name}_proj" for name in "qkv"), has_bias=config.has_attention_bias
        )
        self.output = load.linear(f"{attention}o_proj", has_bias=config.has_output_bias)
        self.head_norms = tuple(
            load.tensor(f"{attention}{name}_norm.weight")
            for name in ("q", "k")
            if config.has_head_norms
        )
        self.mlp_norm = load.tensor(f"{prefix}post_attention_layernorm.weight")
        names = (f"{mlp}gate_proj", f"{mlp}up_proj")
        self.gate_up = load.linear(*names, has_bias=config.has_mlp_bias)
        self.down = load.linear(f"{mlp}down_proj", has_bias=config.has_mlp_bias)

    def products(self) -> tuple[Linear, ...]:
        """Return all products with weights."""
        return self.qkv, self.output, self.gate_up, self.down


class Loader:
    """Reads weights as tensors of one dtype on one device."""

    def __init__(self, weights: Weights, dtype: Any, device: Any) -> None:
        self._weights = weights
        self._place = {"dtype": dtype, "device": device}

    def tensor(self, name: str) -> Tensor:
        """Return one tensor."""
        return torch.from_numpy(self._weights.array(name)).to(**self._place)

    def linear(self, *names: str, has_bias: bool = False) -> Linear:
        """Return the projections ``names`` of the same input as one product."""
        weight = torch.cat([self.tensor(f"{name}.weight") for name in names])
        bias = torch.cat([self.tensor(f"{name}.bias") for name in names]) if has_bias else None
        return Linear(weight, bias)


class Forward:
    """Computes steps of one model into ``cache``; whoever calls it holds inference mode."""

    def __init__(self, config: ModelConfig, weights: Weights, cache: KvCache) -> None:
        load = Loader(weights, cache.content.dtype, cache.content.device)
        self._config = config
        self._cache = cache
        self._scale = config.head_width**-0.5
        self._embedding = load.tensor("model.embed_tokens.weight")
        self._layers = [Layer(config, load, number) for number in range(config.layers)]
        self._norm = load.tensor("model.norm.weight")
        is_tied = config.has_tied_embeddings
        self._head = Linear(self._embedding, None) if is_tied else load.linear("lm_head")
        self.tile_rows = CANONICAL_ROWS
        """The most rows that a product with weights is given at once."""

    def products(self) -> tuple[Linear, ...]:
        """Return one product with weights of each shape."""
        return (*self._layers[0].products(), self._head)

    def __call__(self, step: DeviceStep) -> Tensor:
        """Write the step's keys and values; return logits of its outputs, (outputs, vocabulary)."""
        visible = [self._cache.visibility(group.limits, group.pages) for group in step.groups]
        rows = self._embedding.index_select(0, step.tokens)
        for number, layer in enumerate(self._layers):
            normed = self._normed(rows, layer.input_norm)
            rows = rows + self._attention(number, normed, step, visible)
            rows = rows + self._mlp(layer, self._normed(rows, layer.mlp_norm))
        wanted = self._normed(rows.index_select(0, step.outputs), self._norm)
        return self._head.in_tiles(wanted, self.tile_rows)

    def _attention(
        self, number: int, rows: Tensor, step: DeviceStep, visible: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        config, layer = self._config, self._layers[number]
        heads, width = config.heads, config.head_width
        qkv = layer.qkv.in_tiles(rows, self.tile_rows).view(len(rows), -1, width)
        if layer.head_norms:
            self._norm_heads(qkv, layer.head_norms)
        turn(qkv[:, : heads + config.kv_heads], step.cosine, step.sine)
        self._cache.write(number, step.kv_rows, qkv[:, heads:])
        mixed = rows.new_zeros(len(rows) * heads + 1, width)
        for group, seen in zip(step.groups, visible, strict=True):
            picked = qkv.view(-1, width).index_select(0, group.queries.view(-1)).mul_(self._scale)
            keys, values = self._cache.gather(number, group.pages)
            answers = attend(picked.view(*group.queries.shape, width), keys, values, seen)
            mixed.index_copy_(0, group.answers.view(-1), answers.view(-1, width).to(mixed.dtype))
        return layer.output.in_tiles(mixed[:-1].view(len(rows), -1), self.tile_rows)

    def _norm_heads(self, qkv: Tensor, norms: tuple[Tensor, ...]) -> None:
        heads, kv_heads = self._config.heads, self._config.kv_heads
        for part, norm in zip(qkv.split((heads, kv_heads, kv_heads), 1), norms, strict=False):
            part.copy_(self._normed(part, norm))

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        epsilon = self._config.norm_epsilon
        return torch.nn.functional.rms_norm(rows, weight.shape, weight, epsilon)

    def _mlp(self, layer: Layer, rows: Tensor) -> Tensor:
        inner = gated(layer.gate_up.in_tiles(rows, self.tile_rows))
        return layer.down.in_tiles(inner, self.tile_rows)


def turn(heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Turn (R, heads, head_width) in place; a pair is (i, i + head_width / 2)."""
    first, second = heads.chunk(2, -1)
    turned = first * cosine - second * sine
    second.copy_(second * cosine + first * sine)
    first.copy_(turned)


def gated(gate_up: Tensor) -> Tensor:
    """Return ``gate * sigmoid(gate) * up`` of (R, 2 x width), the same bits at any place in it."""
    gate, up = gate_up.chunk(2, -1)
    divisor = gate.float().neg().exp_().add_(1.0)  # one new tensor: memory is slower than exp
    return torch.div(gate, divisor, out=divisor).mul_(up).to(gate.dtype)
