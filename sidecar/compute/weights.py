"""A model's weights by their Hugging Face names: of safetensors files, or made from a seed.

The file format is read here because NumPy has no bfloat16: a little-endian u64 length, a JSON
header (name to dtype, shape and byte range), then the data, which stays memory-mapped. Format:
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from sidecar.compute.field import ModelError, read_table
from sidecar.compute.model import ModelConfig
from sidecar.compute.rope import RopeConfig

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
HEADER_MAX_BYTES: Final = 100_000_000
"""The format's own bound."""
LENGTH_BYTES: Final = 8
STORED: Final[dict[str, np.dtype[np.generic]]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
"""How the data of each dtype is mapped; bfloat16 as its bits."""
DIGEST_HEX: Final = 16
SAMPLE_WINDOWS: Final = 16
SAMPLE_BYTES: Final = 4096
Shape = tuple[int, ...]


class Weights(Protocol):
    """The tensors of one model."""

    @property
    def digest(self) -> str:
        """Return 16 hex characters that two models share only if they compute the same."""

    def array(self, name: str) -> NDArray[np.float32]:
        """Return a tensor in float32, exactly the stored values; a new array."""

    def raw(self, name: str) -> tuple[NDArray[np.generic], str]:
        """Return a tensor as stored and its dtype: F32, F16 or BF16, the last as u16 bits.

        The array may be read-only and need not be aligned.
        """


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the name and shape of every tensor that ``config`` computes with."""
    hidden, inner = config.hidden_width, config.intermediate_width
    query, kv = config.heads * config.head_width, config.kv_heads * config.head_width
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocabulary_size, hidden)}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
        has_bias = config.has_attention_bias
        attention = f"{prefix}self_attn."
        shapes |= _projection(f"{attention}q_proj", query, hidden, has_bias=has_bias)
        shapes |= _projection(f"{attention}k_proj", kv, hidden, has_bias=has_bias)
        shapes |= _projection(f"{attention}v_proj", kv, hidden, has_bias=has_bias)
        shapes |= _projection(f"{attention}o_proj", hidden, query, has_bias=config.has_output_bias)
        if config.has_head_norms:
            for name in ("q_norm", "k_norm"):
                shapes[f"{attention}{name}.weight"] = (config.head_width,)
        mlp = f"{prefix}mlp."
        shapes |= _projection(f"{mlp}gate_proj", inner, hidden, has_bias=config.has_mlp_bias)
        shapes |= _projection(f"{mlp}up_proj", inner, hidden, has_bias=config.has_mlp_bias)
        shapes |= _projection(f"{mlp}down_proj", hidden, inner, has_bias=config.has_mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.has_tied_embeddings:
        shapes["lm_head.weight"] = (config.vocabulary_size, hidden)
    return shapes


def _projection(name: str, outputs: int, inputs: int, *, has_bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    if has_bias:
        shapes[f"{name}.bias"] = (outputs,)
    return shapes


def open_weights(directory: Path, config: ModelConfig) -> Weights:
    """Map the weights of ``config`` in ``directory``: one safetensors file or an index.

    Raises ModelError that names the file or tensor, whatever the files hold.
    """
    if (directory / SINGLE_FILE).exists() or not (directory / INDEX_FILE).exists():
        tensors = _read_file(directory / SINGLE_FILE)
    else:
        tensors = _read_shards(directory)
    shapes = tensor_shapes(config)
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelError(name, f"a tensor of shape {list(shape)}", "none")
        if tensors[name].shape != shape:
            raise ModelError(name, f"shape {list(shape)}", list(tensors[name].shape))
        if tensors[name].dtype not in STORED:
            raise ModelError(name, f"one of {', '.join(STORED)}", tensors[name].dtype)
    for name in tensors.keys() - shapes.keys():
        if not _is_redundant(name, config):
            found = f"a tensor of shape {list(tensors[name].shape)}"
            raise ModelError(name, f"no such tensor in this {config.family} config", found)
    return StoredWeights(config, {name: tensors[name] for name in shapes})


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Return whether a checkpoint may hold a tensor that follows from others."""
    is_tied_head = config.has_tied_embeddings and name == "lm_head.weight"
    return is_tied_head or name.endswith(".rotary_emb.inv_freq")


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in a file's header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Tensor(msgspec.Struct, frozen=True):
    """A mapped tensor: its bytes in the file."""

    dtype: str
    shape: Shape
    data: NDArray[np.uint8]


class StoredWeights:
    """Implements ``Weights`` over mapped files."""

    def __init__(self, config: ModelConfig, tensors: dict[str, _Tensor]) -> None:
        self._tensors = tensors
        self.digest = _digest(
            config, ((name, each.dtype, each.shape, each.data) for name, each in tensors.items())
        )

    def array(self, name: str) -> NDArray[np.float32]:
        """See ``Weights``."""
        stored, dtype = self.raw(name)
        if dtype == "BF16":
            return widened_bfloat16(stored)
        return np.array(stored, dtype=np.float32, order="C")

    def raw(self, name: str) -> tuple[NDArray[np.generic], str]:
        """See ``Weights``."""
        tensor = self._tensors[name]
        return tensor.data.view(STORED[tensor.dtype]).reshape(tensor.shape), tensor.dtype


def widened_bfloat16(bits: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return the float32 values whose upper halves are ``bits``, u16 of any shape."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _read_shards(directory: Path) -> dict[str, _Tensor]:
    weight_map = read_table(directory / INDEX_FILE).inner("weight_map")
    if weight_map is None:
        raise ModelError(INDEX_FILE, "a weight_map", "none")
    shard_of = {name: weight_map.required_text(name) for name in weight_map}
    tensors: dict[str, _Tensor] = {}
    for shard in sorted(set(shard_of.values())):
        if "/" in shard or "\\" in shard or "\0" in shard or not shard.endswith(".safetensors"):
            raise ModelError(INDEX_FILE, "names of .safetensors files beside it", shard)
        for name, tensor in _read_file(directory / shard).items():
            if shard_of.get(name) != shard:
                expected = f"the tensors that {INDEX_FILE} places there"
                raise ModelError(shard, expected, name)
            tensors[name] = tensor
    for name, shard in shard_of.items():
        if name not in tensors:
            raise ModelError(shard, f"tensor {name}, as {INDEX_FILE} says", "none")
    return tensors


def _read_file(path: Path) -> dict[str, _Tensor]:
    try:
        file_bytes = path.stat().st_size
        if file_bytes < LENGTH_BYTES:
            raise ModelError(path.name, "a safetensors file", f"{file_bytes} bytes")
        mapped = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        expected = "a readable safetensors file"
        raise ModelError(path.name, expected, error.strerror or error) from error
    header_bytes = int.from_bytes(mapped[:LENGTH_BYTES].tobytes(), "little")
    most = min(len(mapped) - LENGTH_BYTES, HEADER_MAX_BYTES)
    if header_bytes > most:
        raise ModelError(path.name, f"a header of at most {most} bytes", header_bytes)
    data = mapped[LENGTH_BYTES + header_bytes :]
    entries = _entries(path.name, mapped[LENGTH_BYTES : LENGTH_BYTES + header_bytes].tobytes())
    _check_ranges(path.name, entries, len(data))
    return {
        name: _Tensor(entry.dtype, tuple(entry.shape), data[slice(*entry.data_offsets)])
        for name, entry in entries.items()
    }


def _entries(file: str, header: bytes) -> dict[str, _Entry]:
    try:
        table = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        table.pop("__metadata__", None)
        return {name: msgspec.json.decode(raw, type=_Entry) for name, raw in table.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ModelError(file, "a JSON header of tensors", str(error)) from error


def _check_ranges(file: str, entries: dict[str, _Entry], data_bytes: int) -> None:
    """Refuse tensors that overlap, leave gaps, leave the file or do not fill their range."""
    reached_bytes = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        first, end = entry.data_offsets
        if first != reached_bytes or not first <= end <= data_bytes:
            expected = f"{name} from byte {reached_bytes} of {data_bytes} on"
            raise ModelError(file, expected, [first, end])
        reached_bytes = end
        if min(entry.shape, default=0) < 0:
            raise ModelError(file, f"{name} with a shape of natural numbers", entry.shape)
        stored = STORED.get(entry.dtype)
        needed_bytes = math.prod(entry.shape) * (stored.itemsize if stored else 0)
        if stored and needed_bytes != end - first:
            raise ModelError(file, f"{name} with {needed_bytes} bytes", end - first)
    if reached_bytes != data_bytes:
        raise ModelError(file, f"{data_bytes} bytes of tensors", reached_bytes)


def _digest(
    config: ModelConfig, tensors: Iterable[tuple[str, str, Shape, NDArray[np.uint8]]]
) -> str:
    """Return a digest of ``config``, all names, dtypes and shapes, and a sample of the content.

    The sample is 16 windows of 4 KiB spread evenly over each tensor, all of it if it is smaller.
    """
    state = hashlib.blake2b(msgspec.json.encode(config), digest_size=DIGEST_HEX // 2)
    for name, dtype, shape, data in tensors:
        state.update(msgspec.json.encode((name, dtype, shape)))
        last = len(data) - SAMPLE_BYTES
        if last <= (SAMPLE_WINDOWS - 1) * SAMPLE_BYTES:
            state.update(data.tobytes())
            continue
        for window in range(SAMPLE_WINDOWS):
            first = last * window // (SAMPLE_WINDOWS - 1)
            state.update(data[first : first + SAMPLE_BYTES].tobytes())
    return state.hexdigest()


MATRIX_GAIN: Final = 2.0
"""How much a random projection enlarges what it is given: so that attention chooses, and the next
token depends on the whole text and is no near-tie."""
NORM_SPREAD: Final = 0.1
BIAS_SPREAD: Final = 0.1


class RandomWeights:
    """Implements ``Weights``: uniform values that the seed and each tensor's place decide.

    Projections have a spread of ``MATRIX_GAIN / sqrt(inputs)``, embeddings of 1, norms lie around
    1. The same on every machine: raw bits of Philox, scaled by exact operations.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._arrays = {
            name: _random_tensor(name, shape, seed, place)
            for place, (name, shape) in enumerate(tensor_shapes(config).items())
        }
        self.digest = _digest(
            config,
            (
                (name, "F32", array.shape, array.reshape(-1).view(np.uint8))
                for name, array in self._arrays.items()
            ),
        )

    def array(self, name: str) -> NDArray[np.float32]:
        """See ``Weights``."""
        return self._arrays[name].copy()

    def raw(self, name: str) -> tuple[NDArray[np.generic], str]:
        """See ``Weights``."""
        return self._arrays[name], "F32"


def random_weights(config: ModelConfig, seed: int) -> Weights:
    """Return random weights for ``config``; ``seed`` is any integer."""
    return RandomWeights(config, seed)


def _random_tensor(name: str, shape: Shape, seed: int, place: int) -> NDArray[np.float32]:
    key = np.array([seed & ((1 << 64) - 1), place], dtype=np.uint64)
    bits = np.random.Philox(key=key).random_raw(math.prod(shape))
    centred = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)
    spread, middle = _spread(name, shape)
    scaled = centred * np.float32(spread * math.sqrt(12)) + np.float32(middle)
    return scaled.reshape(shape)


def _spread(name: str, shape: Shape) -> tuple[float, float]:
    """Return standard deviation and mean of a random tensor."""
    if name.endswith(".bias"):
        return BIAS_SPREAD, 0.0
    if name.endswith("norm.weight"):
        return NORM_SPREAD, 1.0
    if name == "model.embed_tokens.weight":
        return 1.0, 0.0
    return MATRIX_GAIN / math.sqrt(shape[-1]), 0.0


PRINTABLE: Final = frozenset(range(0x20, 0x7F)) | {0x0A}
BYTE_VOCABULARY_SIZE: Final = 256


def builtin_config(
    vocabulary_size: int, *, eos_token_ids: tuple[int, ...] = (), max_position_tokens: int = 32_768
) -> ModelConfig:
    """Return the small model that a worker serves when it is given none; its weights are random.

    A vocabulary of 256 is one of bytes: only printable ASCII and line feeds are sampled, so that
    what is generated is text and gives the same tokens when it comes back in a prompt.
    """
    is_bytes = vocabulary_size == BYTE_VOCABULARY_SIZE
    suppressed = sorted(set(range(vocabulary_size)) - PRINTABLE) if is_bytes else ()
    return ModelConfig(
        family="llama",
        vocabulary_size=vocabulary_size,
        hidden_width=192,
        intermediate_width=512,
        layers=4,
        heads=6,
        kv_heads=3,
        head_width=32,
        norm_epsilon=1e-5,
        rope=RopeConfig(theta=10_000.0),
        max_position_tokens=max_position_tokens,
        eos_token_ids=eos_token_ids,
        suppressed_token_ids=tuple(suppressed),
    )
