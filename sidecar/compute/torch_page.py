"""Moves whole pages between a KV cache in torch and buffers of the host.

A page's content is (layers, 2, kv_heads, page_tokens, head_width), contiguous. On a processor it is
copied straight; with CUDA all pages of a call go through one pinned buffer in one copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sidecar.compute.thread import expect_moves, expect_pages
from sidecar.compute.torch_package import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from sidecar.pool import PageId
    from sidecar.runner import Batch, Load, Save

Tensor = Any


class Pages:
    """The pages of a cache ``content`` (layers, 2, pages + 1, ...); the last is not for them."""

    def __init__(self, content: Tensor) -> None:
        layers, kinds, pages = content.shape[:3]
        self._pages = pages - 1
        self._content = content
        self._is_remote = content.device.type != "cpu"
        as_bytes = content.view(layers, kinds, pages, -1).view(torch.uint8)
        self._parts = (layers, kinds, as_bytes.shape[3])
        self.content_bytes: int = layers * kinds * as_bytes.shape[3]
        self._bytes = as_bytes

    def check(self, batch: Batch) -> None:
        """Raise RunnerError if ``batch`` names a page that is not there or a wrong buffer."""
        expect_moves(batch, self._pages, self.content_bytes)

    def read(self, pages: Sequence[PageId]) -> list[bytes]:
        """Return the content of ``pages``; raises RunnerError."""
        expect_pages(pages, self._pages)
        return [content.tobytes() for content in self._host_copies(pages)]

    def save(self, saves: Sequence[Save]) -> None:
        """Copy pages to their targets."""
        contents = self._host_copies([save.page for save in saves])
        for save, content in zip(saves, contents, strict=True):
            np.frombuffer(save.target, dtype=np.uint8).reshape(self._parts)[:] = content

    def load(self, loads: Sequence[Load]) -> None:
        """Copy contents into their pages."""
        if not loads:
            return
        if not self._is_remote:
            for load in loads:
                content = np.frombuffer(load.content, dtype=np.uint8).reshape(self._parts)
                self._bytes[:, :, load.page].numpy()[:] = content
            return
        staged = self._staging(len(loads))
        for row, load in zip(staged.numpy(), loads, strict=True):
            row[:] = np.frombuffer(load.content, dtype=np.uint8).reshape(self._parts)
        pages = self._index([load.page for load in loads])
        arrived = staged.to(self._content.device, non_blocking=True)
        self._bytes.index_copy_(2, pages, arrived.movedim(0, 2))

    def copy(self, copies: Sequence[tuple[PageId, PageId]]) -> None:
        """Copy each source to its target, one after the other: a target may be a later source."""
        for source, target in copies:
            self._bytes[:, :, target] = self._bytes[:, :, source]

    def _host_copies(self, pages: Sequence[PageId]) -> Sequence[NDArray[np.uint8]]:
        """Return each page's bytes (layers, 2, rest); views where the cache is on the host."""
        if not self._is_remote:
            return [self._bytes[:, :, page].numpy() for page in pages]
        if not pages:
            return []
        staged = self._staging(len(pages))
        gathered = self._bytes.index_select(2, self._index(pages)).movedim(2, 0)
        staged.copy_(gathered, non_blocking=True)
        torch.cuda.synchronize(self._content.device)
        return list(staged.numpy())

    def _staging(self, pages: int) -> Tensor:
        is_cuda = self._content.device.type == "cuda"
        return torch.empty((pages, *self._parts), dtype=torch.uint8, pin_memory=is_cuda)

    def _index(self, pages: Sequence[PageId]) -> Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=self._content.device)
