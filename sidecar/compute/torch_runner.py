"""Runs steps of a real model in torch, on a processor or with CUDA.

One thread does everything in the order it was asked. At the start it finds out which shapes of
products give every row the same bits; with ``is_invariant=False`` it takes them all for granted.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from sidecar.compute.numpy_forward import PositionTable
from sidecar.compute.plan import StepShape, plan_decode, plan_step
from sidecar.compute.sampler import sample_slots
from sidecar.compute.thread import StepThread, expect_counts
from sidecar.compute.torch_attention import KvCache, proven_query_counts
from sidecar.compute.torch_forward import Forward, device_step
from sidecar.compute.torch_graph import CudaRecorder, DecodeGraphs
from sidecar.compute.torch_linear import common_counts
from sidecar.compute.torch_package import torch
from sidecar.compute.torch_page import Pages
from sidecar.runner import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from sidecar.compute.model import ModelConfig
    from sidecar.compute.plan import StepPlan
    from sidecar.compute.torch_graph import Recorder
    from sidecar.compute.weights import Weights
    from sidecar.pool import PageId
    from sidecar.runner import Batch, Slot

Tensor = Any

DTYPES: Final = ("float32", "bfloat16", "float16")


class TorchRunner:
    """Implements ``Runner``. A step has at most ``max_tokens`` new tokens.

    ``dtype`` is one of ``DTYPES``, ``device`` a device of torch or ``auto``: CUDA if there is any.
    ``threads`` are those of torch on the processor, for the whole process. ``recorder`` records
    decoding steps to be replayed; without one CUDA graphs are recorded where CUDA is used.
    """

    def __init__(  # noqa: PLR0913 - a worker's settings, each by its name
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        pages: int,
        page_tokens: int,
        max_tokens: int,
        threads: int | None = None,
        dtype: str = "float32",
        device: str = "auto",
        is_invariant: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        expect_counts(pages=pages, page_tokens=page_tokens, max_tokens=max_tokens, threads=threads)
        if dtype not in DTYPES:
            message = f"dtype: expected one of {', '.join(DTYPES)}, got {dtype}"
            raise ValueError(message)
        self._config = config
        self._dtype = dtype
        self._device = chosen_device(device)
        self._threads = threads
        self.shape = StepShape(
            vocabulary_size=config.vocabulary_size,
            max_positions=config.max_position_tokens,
            heads=config.heads,
            kv_heads=config.kv_heads,
            pages=pages,
            page_tokens=page_tokens,
            max_tokens=max_tokens,
        )
        self._recorder = recorder
        if recorder is None and self._device.type == "cuda":
            self._recorder = CudaRecorder()
        self._positions = PositionTable(config.rope, config.head_width)
        self._thread = StepThread("torch-runner")
        try:
            self._thread.run_now(lambda: self._open(weights, is_invariant=is_invariant))
        except BaseException:
            self.close()
            raise

    def _open(self, weights: Weights, *, is_invariant: bool) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            dtype = getattr(torch, self._dtype)
            cache = KvCache(self._config, self.shape, dtype, self._device)
            self._pages = Pages(cache.content)
            self._forward = Forward(self._config, weights, cache)
            if is_invariant:
                products = self._forward.products()
                self.shape = msgspec.structs.replace(
                    self.shape,
                    row_counts=common_counts(products, self.shape.row_counts),
                    query_counts=proven_query_counts(cache, self.shape.query_counts),
                )
            self._forward.tile_rows = self.shape.row_counts[-1]
            recorder = self._recorder
            self._graphs = DecodeGraphs(self._forward, recorder) if recorder else None

    @property
    def page_bytes(self) -> int:
        """See ``Runner``."""
        return self._pages.content_bytes

    @property
    def content_bytes(self) -> int:
        """See ``Runner``."""
        return self._pages.content_bytes

    @property
    def kv_parameters(self) -> str:
        """See ``Runner``. Another device rounds in another way."""
        rope = msgspec.json.encode(self._config.rope).decode()
        return f"torch {self._device.type} {self._dtype} {rope}"

    async def run(self, batch: Batch) -> Outcome:
        """See ``Runner``. Raises RunnerError for a batch that names what is not there."""
        return await self._thread.run(lambda: self._run(batch))

    async def read(self, pages: tuple[PageId, ...]) -> list[bytes]:
        """See ``Runner``."""
        return await self._thread.run(lambda: self._pages.read(pages))

    def close(self) -> None:
        """See ``Runner``. Waits for the step under way."""
        self._thread.close()

    def _run(self, batch: Batch) -> Outcome:
        with torch.inference_mode():
            planned = self._planned(batch.slots) if batch.slots else None
            self._pages.check(batch)
            began_s = time.perf_counter()
            self._pages.save(batch.saves)
            saved_s = time.perf_counter()
            self._pages.load(batch.loads)
            loaded_s = time.perf_counter()
            self._pages.copy(batch.copies)
            logits = self._logits(*planned) if planned else ()
            samples = sample_slots(batch.slots, logits, self._config)
            return Outcome(
                samples=samples,
                save_s=saved_s - began_s,
                load_s=loaded_s - saved_s,
                compute_s=time.perf_counter() - loaded_s,
            )

    def _planned(self, slots: Sequence[Slot]) -> tuple[StepPlan, bool]:
        """Return the plan and whether it is one of few shapes that are worth recording."""
        decode = plan_decode(slots, self.shape) if self._graphs else None
        return (decode, True) if decode else (plan_step(slots, self.shape), False)

    def _logits(self, plan: StepPlan, is_recorded: bool) -> NDArray[np.float32]:  # noqa: FBT001
        cosine, sine = self._positions.rows(plan.positions)
        step = device_step(plan, cosine, sine, self._device)
        logits = self._graphs.run(step) if self._graphs and is_recorded else self._forward(step)
        rows: NDArray[np.float32] = logits[: plan.output_count].float().cpu().numpy()
        return rows


def chosen_device(name: str) -> Any:
    """Return torch's device ``name``; ``auto`` is CUDA if there is any. Raises ValueError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    expected = "auto, cpu or a CUDA device that is there"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        message = f"device: expected {expected}, got {name}"
        raise ValueError(message) from error
    is_there = device.type == "cuda" and torch.cuda.is_available()
    if device.type != "cpu" and not is_there:
        message = f"device: expected {expected}, got {name}"
        raise ValueError(message)
    return device
