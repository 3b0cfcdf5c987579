"""A runner without a model whose every token depends on every byte of KV that it reads.

A token's KV is 8 bytes: a hash of the KV before it and of the token. What follows a prompt is drawn
from the KV of its last token. So a page that is wrong anywhere changes every token after it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import xxhash

from sidecar.runner import Outcome, Sampled
from state.prefix import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.pool import PageId
    from sidecar.runner import Batch, Slot

CELL_BYTES = 8
FIRST_LETTER = ord("a")
LETTERS = 26


class CopyRunner:
    """Copies real bytes. ``before_step`` is called with the step's number, from 1 on; may raise.

    A step that raises has scribbled over all that it should have written.
    """

    kv_parameters = "copy"

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.memory = [bytearray(page_tokens * CELL_BYTES) for _ in range(pages)]
        self.steps = 0
        self.computed_tokens = 0
        self.saved_pages = 0
        self.loaded_pages = 0
        self.before_step: Callable[[int], None] | None = None
        self.gate: asyncio.Event | None = None
        """Where set, steps wait for it."""

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * CELL_BYTES

    @property
    def content_bytes(self) -> int:
        return self.page_bytes

    async def run(self, batch: Batch) -> Outcome:
        self.steps += 1
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        try:
            if self.before_step is not None:
                self.before_step(self.steps)
        except Exception:
            self._scribble(batch)
            raise
        for save in batch.saves:
            save.target[:] = self.memory[save.page]
        for load in batch.loads:
            self.memory[load.page][:] = load.content
        for source, target in batch.copies:
            self.memory[target][:] = self.memory[source]
        self.saved_pages += len(batch.saves)
        self.loaded_pages += len(batch.loads)
        samples = tuple(self._compute(slot) for slot in batch.slots)
        return Outcome(samples=samples, save_s=1e-6, load_s=1e-6, compute_s=1e-6)

    async def read(self, pages: tuple[PageId, ...]) -> list[bytes]:
        await asyncio.sleep(0)
        return [bytes(self.memory[page]) for page in pages]

    def close(self) -> None:
        pass

    def _compute(self, slot: Slot) -> tuple[Sampled, ...]:
        position = slot.context_tokens
        for start in range(0, len(slot.packed_tokens), TOKEN_BYTES):
            token = slot.packed_tokens[start : start + TOKEN_BYTES]
            before = self._whole_context(slot, position)
            self._set(slot, position, xxhash.xxh3_64_digest(before + token))
            position += 1
            self.computed_tokens += 1
        last = self._cell(slot, position - 1)
        return tuple(
            Sampled(FIRST_LETTER + xxhash.xxh3_64_intdigest(last, draw.sample) % LETTERS)
            for draw in slot.draws
        )

    def _whole_context(self, slot: Slot, position: int) -> bytes:
        """Return all KV before ``position``: a wrong page anywhere shows at once."""
        return b"".join(self._cell(slot, index) for index in range(position))

    def _cell(self, slot: Slot, position: int) -> bytes:
        page, offset = divmod(position, self.page_tokens)
        start = offset * CELL_BYTES
        return bytes(self.memory[slot.pages[page]][start : start + CELL_BYTES])

    def _set(self, slot: Slot, position: int, cell: bytes) -> None:
        page, offset = divmod(position, self.page_tokens)
        start = offset * CELL_BYTES
        self.memory[slot.pages[page]][start : start + CELL_BYTES] = cell

    def _scribble(self, batch: Batch) -> None:
        for save in batch.saves:
            save.target[:] = b"\xee" * len(save.target)
        for load in batch.loads:
            self.memory[load.page][:] = b"\xee" * self.page_bytes
        for _, target in batch.copies:
            self.memory[target][:] = b"\xee" * self.page_bytes
        for slot in batch.slots:
            end = slot.context_tokens + len(slot.packed_tokens) // TOKEN_BYTES
            for position in range(slot.context_tokens, end):
                self._set(slot, position, b"\xee" * CELL_BYTES)
