"""The bundled worker's settings and its address."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

from sidecar.clock import PresetName
from sidecar.publisher import EventEncoding, HashForm

DEFAULT_MODEL: Final = "warmroute-synthetic"
DEFAULT_CONTEXT_TOKENS: Final = 131_072
ANY_LOCAL_PORT: Final = "tcp://127.0.0.1:*"

_Count = Annotated[int, Meta(ge=1)]


class WorkerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker. Port 0, and ``*`` in an endpoint, choose a free port.

    ``tokenizer`` is a directory with ``tokenizer.json``; without one, tokens are UTF-8 bytes.
    ``pages`` is the KV pool. ``max_model_len`` is by default what the pool holds, 131,072 tokens at
    most. ``speed_up`` divides every step's duration. ``shutdown_grace_s`` is how long open requests
    may go on once the worker is told to stop.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    model: Annotated[str, Meta(min_length=1)] = DEFAULT_MODEL
    tokenizer: str | None = None
    pages: _Count = 8192
    page_tokens: _Count = 16
    preset: PresetName = "llama-8b-h100"
    speed_up: Annotated[float, Meta(gt=0)] = 1.0
    max_num_seqs: _Count = 256
    max_num_batched_tokens: _Count = 8192
    max_model_len: _Count | None = None
    events_endpoint: str = ANY_LOCAL_PORT
    replay_endpoint: str = ANY_LOCAL_PORT
    event_hashes: HashForm = "int"
    event_encoding: EventEncoding = "map"
    seed: int = 0
    shutdown_grace_s: Annotated[float, Meta(ge=0)] = 10.0

    @property
    def context_tokens(self) -> int:
        """The longest prompt and output together."""
        pool_tokens = self.pages * self.page_tokens
        return self.max_model_len or min(pool_tokens, DEFAULT_CONTEXT_TOKENS)


class WorkerAddress(Struct, frozen=True):
    """Where a worker listens: ``http://host:port`` and two ZMQ endpoints."""

    http: str
    events: str
    replay: str
