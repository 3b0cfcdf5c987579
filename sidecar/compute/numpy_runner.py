"""Runs steps of a real model in NumPy: the reference runner, for a processor.

One thread does everything in the order it was asked; two steps never overlap, even when whoever
awaited the first has gone.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec
import numpy as np

from sidecar.compute.numpy_forward import Forward, KvCache, Segment
from sidecar.compute.sampler import sample
from sidecar.runner import Outcome, RunnerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from sidecar.compute.model import ModelConfig
    from sidecar.compute.weights import Weights
    from sidecar.pool import PageId
    from sidecar.runner import Batch, Sampled, Slot

Result = TypeVar("Result")


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
        for name, count in (
            ("pages", pages),
            ("page_tokens", page_tokens),
            ("max_tokens", max_tokens),
        ):
            if count < 1:
                message = f"{name}: expected at least 1, got {count}"
                raise ValueError(message)
        if threads is not None:
            limit_blas_threads(threads)
        self._config = config
        self._max_tokens = max_tokens
        self._forward = Forward(config, weights, max_tokens)
        self._cache = KvCache(config, pages, page_tokens)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="numpy-runner")
        self._is_closed = False

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
        return await self._in_thread(lambda: self._run(batch))

    async def read(self, pages: tuple[PageId, ...]) -> list[bytes]:
        """See ``Runner``."""
        self._check_pages(pages)
        return await self._in_thread(lambda: [self._bytes(page).tobytes() for page in pages])

    def close(self) -> None:
        """See ``Runner``. Waits for the step under way."""
        self._is_closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        if self._is_closed:
            message = "the runner is closed"
            raise RunnerError(message)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

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
        logits = iter(self._forward.logits(rows[ends[drawing] - 1]))
        return tuple(self._sampled(slot, next(logits)) if slot.draws else () for slot in slots)

    def _sampled(self, slot: Slot, logits: NDArray[np.float32]) -> tuple[Sampled, ...]:
        end_ids, suppressed = self._config.eos_token_ids, self._config.suppressed_token_ids
        return tuple(
            sample(logits, draw, end_ids=end_ids, suppressed=suppressed) for draw in slot.draws
        )

    def _bytes(self, page: PageId) -> NDArray[np.uint8]:
        content: NDArray[np.uint8] = self._cache.content[page].reshape(-1).view(np.uint8)
        return content

    def _segment(self, slot: Slot) -> Segment:
        """Return the slot's tokens, checked; raises RunnerError."""
        if not slot.packed_tokens or len(slot.packed_tokens) % 4:
            _refuse(f"packed_tokens: expected whole tokens, got {len(slot.packed_tokens)} bytes")
        tokens = np.frombuffer(slot.packed_tokens, dtype="<u4").astype(np.int64)
        if tokens.max() >= self._config.vocabulary_size:
            expected = f"ids below {self._config.vocabulary_size}"
            _refuse(f"packed_tokens: expected {expected}, got {tokens.max()}")
        positions_count = slot.context_tokens + len(tokens)
        if slot.context_tokens < 0 or positions_count > self._config.max_position_tokens:
            expected = f"at most {self._config.max_position_tokens} positions"
            _refuse(f"context_tokens: expected {expected}, got {positions_count}")
        if len(slot.pages) * self._cache.page_tokens < positions_count:
            _refuse(f"pages: expected room for {positions_count} tokens, got {len(slot.pages)}")
        self._check_pages(slot.pages)
        return Segment(tokens, slot.context_tokens, np.array(slot.pages, dtype=np.int64))

    def _check(self, batch: Batch) -> None:
        tokens = sum(len(slot.packed_tokens) // 4 for slot in batch.slots)
        if tokens > self._max_tokens:
            _refuse(f"slots: expected at most {self._max_tokens} tokens, got {tokens}")
        self._check_pages([save.page for save in batch.saves])
        self._check_pages([load.page for load in batch.loads])
        self._check_pages([page for copy in batch.copies for page in copy])
        buffers = [save.target for save in batch.saves]
        for buffer in (*buffers, *(memoryview(load.content) for load in batch.loads)):
            if buffer.nbytes != self.content_bytes:
                _refuse(f"content: expected {self.content_bytes} bytes, got {buffer.nbytes}")

    def _check_pages(self, pages: Sequence[PageId]) -> None:
        total = len(self._cache.content)
        for page in pages:
            if not 0 <= page < total:
                _refuse(f"page: expected one of {total}, got {page}")


def limit_blas_threads(threads: int) -> bool:
    """Let NumPy's own OpenBLAS use ``threads`` threads; returns whether there is one to be told."""
    libraries = Path(np.__file__).parents[1].glob("numpy.libs/*openblas*")
    setters = [
        getattr(ctypes.CDLL(str(path)), "scipy_openblas_set_num_threads64_", None)
        for path in libraries
    ]
    told = [setter(ctypes.c_int(threads)) for setter in setters if setter is not None]
    return bool(told)


def _refuse(message: str) -> NoReturn:
    raise RunnerError(message)
