"""What runs a step: the seam between scheduling and arithmetic.

A batch names tokens, positions and pages; the runner computes their KV into these pages and
samples where it is asked to. Runners: ``sidecar.synthetic`` (a clock),
``sidecar.compute.numpy_runner`` (the reference) and ``sidecar.compute.torch_runner``.
"""

from __future__ import annotations

from typing import Final, Protocol

import xxhash
from msgspec import Struct

from sidecar.clock import StepLoad
from sidecar.pool import PageId

_KEY_BYTES: Final = 4096


class RunnerError(Exception):
    """A step failed: what it should have written is worthless."""


def prompt_key(packed_prompt: bytes) -> int:
    """Return the digest of a prompt's last tokens."""
    return xxhash.xxh3_64_intdigest(packed_prompt[-_KEY_BYTES:])


class Draw(Struct, frozen=True, kw_only=True):
    """How to sample one token.

    ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 leave the distribution whole. The draw
    depends on ``seed``, ``sample`` (which of n answers) and ``index`` (the token's place in the
    output) only, never on what else is in the batch. ``top_logprobs`` None: no logprobs wanted.
    ``prompt_key`` digests the end of the prompt; a synthetic voice starts from it, and goes on to
    the client's limit where ``is_limited``.
    """

    seed: int
    index: int
    sample: int = 0
    prompt_key: int = 0
    is_limited: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    top_logprobs: int | None = None


class Slot(Struct, frozen=True):
    """One sequence's share of a step.

    ``packed_tokens`` are the new tokens (u32 little-endian) after ``context_tokens`` computed ones;
    ``pages`` is the block table of both. ``draws`` all sample what follows the last new token; it
    is empty in the middle of a prompt.
    """

    packed_tokens: bytes
    context_tokens: int
    pages: tuple[PageId, ...]
    draws: tuple[Draw, ...] = ()


class Save(Struct, frozen=True):
    """Copy the content of ``page`` to ``target``, a writable buffer of ``content_bytes``."""

    page: PageId
    target: memoryview


class Load(Struct, frozen=True):
    """Copy ``content`` (``content_bytes``) into ``page``."""

    page: PageId
    content: memoryview | bytes


class Batch(Struct, frozen=True, kw_only=True):
    """One step. Runs in this order: saves, loads, copies (source, target), then the slots.

    ``is_after_idle``: the engine had nothing to do before it.
    """

    load: StepLoad
    slots: tuple[Slot, ...] = ()
    saves: tuple[Save, ...] = ()
    loads: tuple[Load, ...] = ()
    copies: tuple[tuple[PageId, PageId], ...] = ()
    is_after_idle: bool = False


class Sampled(Struct, frozen=True):
    """One sampled token. ``is_end``: the model ends its answer with this token.

    ``logprob`` is the natural logarithm under the unmodified softmax of the logits; ``top`` has the
    most probable tokens with theirs, best first.
    """

    token: int
    is_end: bool = False
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Outcome(Struct, frozen=True, kw_only=True):
    """What a step did: for each slot one token for each of its draws, and the time it took."""

    samples: tuple[tuple[Sampled, ...], ...]
    save_s: float = 0.0
    load_s: float = 0.0
    compute_s: float = 0.0


class Runner(Protocol):
    """Runs one batch at a time. ``run`` raises RunnerError or whatever its arithmetic raises."""

    @property
    def page_bytes(self) -> int:
        """KV bytes of a page, as the model needs them."""

    @property
    def content_bytes(self) -> int:
        """Bytes that a save writes and a load reads; 0 where pages hold no content."""

    @property
    def kv_parameters(self) -> str:
        """What decides, besides weights and tokens, which KV comes out: dtype, position scaling."""

    async def run(self, batch: Batch) -> Outcome:
        """Run ``batch`` without holding the event loop."""

    async def read(self, pages: tuple[PageId, ...]) -> list[bytes]:
        """Return the content of ``pages``, between two steps."""

    def close(self) -> None:
        """Give everything back."""
