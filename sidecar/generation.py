"""What is asked of the engine and what it answers: values only."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from sidecar.runner import Sampled
from state.public import PublicMark

FinishReason = Literal["stop", "length"]
HaltReason = Literal["stopping", "timed_out", "failed"]


class Generation(Struct, frozen=True, kw_only=True):
    """What to generate after one prompt.

    ``max_output_tokens`` None means until the model ends, or as many as fit with ``ignore_eos``.
    ``choice`` is the index of the answer within its HTTP request; ``sample`` tells apart several
    answers to one prompt. ``kv_source`` is the HTTP address of a worker that may hold the prefix.
    ``public`` is what of the prompt all may share, in the router's word.
    """

    packed_prompt: bytes
    request_id: str = ""
    max_output_tokens: int | None = None
    ignore_eos: bool = False
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    salt: str | None = None
    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    top_logprobs: int | None = None
    choice: int = 0
    sample: int = 0
    kv_source: str | None = None
    public: PublicMark | None = None


class Delta(Struct, frozen=True):
    """Tokens that one step added to one answer; the last one has a ``finish``.

    ``stopped_by`` is the stop string or token id that ended it. ``sampled`` has the logprobs of
    ``token_ids`` where they are wanted.
    """

    choice: int
    token_ids: list[int]
    text: str
    finish: FinishReason | None = None
    stopped_by: str | int | None = None
    sampled: tuple[Sampled, ...] = ()


class Halted(Struct, frozen=True):
    """The engine ended an answer before it was complete."""

    reason: HaltReason = "stopping"


class EngineHaltedError(Exception):
    """The engine takes no more generations."""
