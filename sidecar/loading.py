"""The model behind real compute: a directory's, or a small one with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from prompt.codec import Codec, load_codec
from sidecar.compute.model import ModelConfig, read_model_config
from sidecar.compute.numpy_runner import NumpyRunner
from sidecar.compute.weights import (
    Weights,
    builtin_config,
    open_weights,
    random_weights,
    tensor_shapes,
)
from sidecar.setting import SettingError

if TYPE_CHECKING:
    from sidecar.runner import Runner
    from sidecar.setting import WorkerSettings

_ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


class LoadedModel(Struct, frozen=True):
    """Configuration, weights (still on disk, or a seed) and tokenizer."""

    config: ModelConfig
    weights: Weights
    codec: Codec
    compute: str

    @property
    def parameters(self) -> int:
        """How many weights there are."""
        total = 0
        for shape in tensor_shapes(self.config).values():
            size = 1
            for extent in shape:
                size *= extent
            total += size
        return total

    def dtype(self, wanted: str) -> str:
        """Return the name of the number format to compute in."""
        if self.compute == "numpy":
            return "float32"
        return self.config.torch_dtype if wanted == "auto" else wanted

    def token_bytes(self, wanted: str) -> int:
        """Return the KV bytes of one token."""
        config = self.config
        element_bytes = _ELEMENT_BYTES.get(self.dtype(wanted), 4)
        return 2 * config.layers * config.kv_heads * config.head_width * element_bytes


def load_model(settings: WorkerSettings) -> LoadedModel:
    """Read what ``settings`` name; raises SettingError, ModelError or CodecLoadError."""
    directory = settings.model_directory
    if settings.compute == "numpy" and settings.dtype not in ("auto", "float32"):
        message = f"dtype: NumPy computes in float32, got {settings.dtype}"
        raise SettingError(message)
    tokenizer = settings.tokenizer
    if tokenizer is None and directory is not None:
        tokenizer = str(directory)
    tokenizer_directory = None if tokenizer is None else Path(tokenizer)
    codec = load_codec(tokenizer_directory, learns_words=False)
    if directory is None:
        config = builtin_config(codec.vocabulary_size)
        return LoadedModel(config, random_weights(config, settings.seed), codec, settings.compute)
    config = read_model_config(directory)
    if codec.vocabulary_size > config.vocabulary_size:
        message = (
            f"tokenizer: it has {codec.vocabulary_size} tokens, the model {config.vocabulary_size}"
        )
        raise SettingError(message)
    return LoadedModel(config, open_weights(directory, config), codec, settings.compute)


def build_runner(settings: WorkerSettings, loaded: LoadedModel) -> Runner:
    """Return the runner of ``settings.compute``; blocking. Raises SettingError without torch."""
    pages, max_tokens = settings.pages or 1, settings.step_tokens
    # Threads that wait for each other cost a small model more than they compute.
    threads = settings.threads or (1 if settings.model_directory is None else None)
    if settings.compute == "numpy":
        return NumpyRunner(
            loaded.config,
            loaded.weights,
            pages=pages,
            page_tokens=settings.page_tokens,
            max_tokens=max_tokens,
            threads=threads,
        )
    try:
        from sidecar.compute.torch_runner import TorchRunner  # noqa: PLC0415 - torch is an extra
    except ImportError:
        message = "compute: torch is not installed; install warmroute[engine]"
        raise SettingError(message) from None
    return TorchRunner(
        loaded.config,
        loaded.weights,
        pages=pages,
        page_tokens=settings.page_tokens,
        max_tokens=max_tokens,
        threads=settings.threads,
        dtype=loaded.dtype(settings.dtype),
        device=settings.device,
    )
