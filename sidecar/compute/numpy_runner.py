"""Runs steps of a real model in NumPy: the reference runner, for a processor.

One thread does everything in the order it was asked; two steps never overlap, even when whoever
awaited the first has gone.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from sidecar.compute.numpy_forward import Forward, KvCache, Segment
from sidecar.compute.sampler import sample_slots
from sidecar.compute.thread import StepThread, expect_counts, expect_moves, expect_pages, refuse
from sidecar.runner import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from sidecar.compute.model import ModelConfig
    from sidecar.compute.weights import Weights
    from sidecar.pool import PageId
    from sidecar.runner import Batch, Sampled, Slot


class NumpyRunner:
    """Implements ``Runner``. A step has at most ``max_tokens`` new tokens, which bounds memory.

    ``threads`` limits those of the BLAS, for the whole process and where it lets itself be told.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        pages: int,
        page_tokens: int,
        max_tokens: int,
        threads: int | None = None,
    ) -> None:
        expect_counts(pages=pages, page_tokens=page_tokens, max_tokens=max_tokens)
        if threads is not None:
            limit_blas_threads(threads)
        self._config = config
        self._max_tokens = max_tokens
        self._forward = Forward(config, weights, max_tokens)
        self._cache = KvCache(config, pages, page_tokens)
        self._thread = StepThread("numpy-runner")

    @property
    def page_bytes(self) -> int:
        """See ``Runner``."""
        return int(self._cache.content[0].nbytes)

    @property
    def content_bytes(self) -> int:
        """See ``Runner``."""
        return self.page_bytes

    @property
    def kv_parameters(self) -> str:
        """See ``Runner``."""
        return f"numpy float32 {msgspec.json.encode(self._config.rope).decode()}"

    async def run(self, batch: Batch) -> Outcome:
        """See ``Runner``. Raises RunnerError for a batch that names what is not there."""
        return await self._thread.run(lambda: self._run(batch))

    async def read(self, pages: tuple[PageId, ...]) -> list[bytes]:
        """See ``Runner``."""
        expect_pages(pages, len(self._cache.content))
        return await self._thread.run(lambda: [self._bytes(page).tobytes() for page in pages])

    def close(self) -> None:
        """See ``Runner``. Waits for the step under way."""
        self._thread.close()

    def _run(self, batch: Batch) -> Outcome:
        segments = [self._segment(slot) for slot in batch.slots]
        self._check(batch)
        began_s = time.perf_counter()
        for save in batch.saves:
            np.frombuffer(save.target, dtype=np.uint8)[:] = self._bytes(save.page)
        saved_s = time.perf_counter()
        for load in batch.loads:
            self._bytes(load.page)[:] = np.frombuffer(load.content, dtype=np.uint8)
        loaded_s = time.perf_counter()
        for source, target in batch.copies:
            self._cache.content[target] = self._cache.content[source]
        samples = self._computed(batch.slots, segments)
        return Outcome(
            samples=samples,
            save_s=saved_s - began_s,
            load_s=loaded_s - saved_s,
            compute_s=time.perf_counter() - loaded_s,
        )

    def _computed(
        self, slots: Sequence[Slot], segments: list[Segment]
    ) -> tuple[tuple[Sampled, ...], ...]:
        if not segments:
            return ()
        rows = self._forward.hidden(segments, self._cache)
        ends = np.cumsum([len(segment.tokens) for segment in segments])
        drawing = [place for place, slot in enumerate(slots) if slot.draws]
        logits = self._forward.logits(rows[ends[drawing] - 1])
        return sample_slots(slots, logits, self._config)

    def _bytes(self, page: PageId) -> NDArray[np.uint8]:
        content: NDArray[np.uint8] = self._cache.content[page].reshape(-1).view(np.uint8)
        return content

    def _segment(self, slot: Slot) -> Segment:
        """Return the slot's tokens, checked; raises RunnerError."""
        if not slot.packed_tokens or len(slot.packed_tokens) % 4:
            refuse(f"packed_tokens: expected whole tokens, got {len(slot.packed_tokens)} bytes")
        tokens = np.frombuffer(slot.packed_tokens, dtype="<u4").astype(np.int64)
        if tokens.max() >= self._config.vocabulary_size:
            expected = f"ids below {self._config.vocabulary_size}"
            refuse(f"packed_tokens: expected {expected}, got {tokens.max()}")
        positions_count = slot.context_tokens + len(tokens)
        if slot.context_tokens < 0 or positions_count > self._config.max_position_tokens:
            expected = f"at most {self._config.max_position_tokens} positions"
            refuse(f"context_tokens: expected {expected}, got {positions_count}")
        if len(slot.pages) * self._cache.page_tokens < positions_count:
            refuse(f"pages: expected room for {positions_count} tokens, got {len(slot.pages)}")
        expect_pages(slot.pages, len(self._cache.content))
        return Segment(tokens, slot.context_tokens, np.array(slot.pages, dtype=np.int64))

    def _check(self, batch: Batch) -> None:
        tokens = sum(len(slot.packed_tokens) // 4 for slot in batch.slots)
        if tokens > self._max_tokens:
            refuse(f"slots: expected at most {self._max_tokens} tokens, got {tokens}")
        expect_moves(batch, len(self._cache.content), self.content_bytes)


def limit_blas_threads(threads: int) -> bool:
    """Let NumPy's own OpenBLAS use ``threads`` threads; returns whether there is one to be told."""
    libraries = Path(np.__file__).parents[1].glob("numpy.libs/*openblas*")
    setters = [
        getattr(ctypes.CDLL(str(path)), "scipy_openblas_set_num_threads64_", None)
        for path in libraries
    ]
    told = [setter(ctypes.c_int(threads)) for setter in setters if setter is not None]
    return bool(told)
