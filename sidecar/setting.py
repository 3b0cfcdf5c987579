"""The bundled worker's settings and its address."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from sidecar.clock import PresetName
from sidecar.eviction import EvictionName
from sidecar.publisher import EventEncoding, HashForm
from sidecar.tiers import DemoteRule, FetchRule
from sidecar.transfer import origin_of

SYNTHETIC_MODEL: Final = "warmroute-synthetic"
BUILTIN_MODEL: Final = "warmroute-tiny"
DEFAULT_CONTEXT_TOKENS: Final = 131_072
DEFAULT_PAGES: Final = 8192
DEFAULT_POOL_BYTES: Final = 2**30
"""How much KV a pool of default size takes at most; a model with large pages gets fewer."""
ANY_LOCAL_PORT: Final = "tcp://127.0.0.1:*"
_STEP_TOKENS: Final = {"synthetic": 8192, "numpy": 512, "torch": 2048}

ComputeName = Literal["numpy", "torch", "synthetic"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

_Count = Annotated[int, Meta(ge=1)]
_Amount = Annotated[int, Meta(ge=0)]


class SettingError(ValueError):
    """Settings that exclude each other, or name what cannot be read; the text begins with which."""


class WorkerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker. Port 0, and ``*`` in an endpoint, choose a free port.

    ``model`` is a directory (config.json, safetensors, tokenizer) or the name under which a small
    built-in model with random weights is served. ``tokenizer`` is a directory with
    ``tokenizer.json``, by default the model's; without one, tokens are UTF-8 bytes. ``preset`` and
    ``speed_up`` are the clock of synthetic compute. ``pages`` is the KV pool; ``max_model_len`` is
    by default what it holds and the model can. ``host_mib`` and ``disk_mib`` size the tiers below.
    ``tenant_quotas`` is ``TENANT=PAGES,...``. ``transfer_peers`` lists ``http://host:port,...``.
    ``shutdown_grace_s`` is how long open requests may go on once the worker is told to stop.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    compute: ComputeName = "numpy"
    model: str | None = None
    served_model_name: str | None = None
    tokenizer: str | None = None
    dtype: DtypeName = "auto"
    device: str = "auto"
    threads: _Count | None = None
    preset: PresetName = "llama-8b-h100"
    speed_up: Annotated[float, Meta(gt=0)] = 1.0
    pages: _Count | None = None
    page_tokens: _Count = 16
    max_num_seqs: _Count = 256
    max_num_batched_tokens: _Count | None = None
    max_model_len: _Count | None = None
    eviction: EvictionName = "lru"
    tenant_quotas: str = ""
    public_prefixes: str | None = None
    host_mib: _Amount = 0
    disk_dir: str | None = None
    disk_mib: _Amount = 1024
    fetch: FetchRule = "cheaper"
    demote: DemoteRule = "all"
    transfer_port: Annotated[int, Meta(ge=0, le=65_535)] | None = None
    transfer_peers: str = ""
    audit: str | None = None
    audit_mib: _Count = 64
    audit_files: _Amount = 4
    events_endpoint: str = ANY_LOCAL_PORT
    replay_endpoint: str = ANY_LOCAL_PORT
    event_hashes: HashForm = "int"
    event_encoding: EventEncoding = "map"
    seed: int = 0
    request_timeout_s: Annotated[float, Meta(gt=0)] | None = None
    shutdown_grace_s: Annotated[float, Meta(ge=0)] = 0.5

    @property
    def served_name(self) -> str:
        """The model name that clients use."""
        default = SYNTHETIC_MODEL if self.compute == "synthetic" else BUILTIN_MODEL
        return self.served_model_name or self.model or default

    @property
    def model_directory(self) -> Path | None:
        """Where the model is; None for the built-in one. Raises SettingError for a wrong path.

        What looks like a path must be one: a mistyped directory, or the name of a repository, never
        serves random weights.
        """
        if self.model is None or self.compute == "synthetic":
            return None
        with contextlib.suppress(RuntimeError):  # "~name" of nobody here
            path = Path(self.model).expanduser()
            if path.is_dir():
                return path
        if "/" in self.model or self.model.startswith("~"):
            message = f"model: {self.model} is no directory"
            raise SettingError(message)
        return None

    @property
    def root(self) -> str:
        """Where the model is from, as engines tell: the directory of its tokenizer, or its name.

        Raises SettingError for a wrong path.
        """
        directory = Path(self.tokenizer) if self.tokenizer else self.model_directory
        return self.served_name if directory is None else str(directory.absolute())

    @property
    def context_tokens(self) -> int:
        """The longest prompt and output together."""
        pool_tokens = (self.pages or DEFAULT_PAGES) * self.page_tokens
        return self.max_model_len or min(pool_tokens, DEFAULT_CONTEXT_TOKENS)

    @property
    def step_tokens(self) -> int:
        """Tokens of one step at most."""
        return self.max_num_batched_tokens or _STEP_TOKENS[self.compute]

    @property
    def quotas_pages(self) -> dict[str, int]:
        """Guaranteed pages by tenant; raises SettingError."""
        quotas = {}
        for each in filter(None, self.tenant_quotas.split(",")):
            tenant, _, pages = each.strip().partition("=")
            if not tenant or not pages.isdecimal():
                message = f"tenant_quotas: expected TENANT=PAGES, got {each!r}"
                raise SettingError(message)
            if tenant in quotas:
                message = f"tenant_quotas: {tenant} has two"
                raise SettingError(message)
            quotas[tenant] = int(pages)
        return quotas

    @property
    def peers(self) -> frozenset[str]:
        """The workers from which pages may be fetched; raises SettingError."""
        peers = frozenset(filter(None, (each.strip() for each in self.transfer_peers.split(","))))
        for each in sorted(peers):
            if origin_of(each) is None:
                message = f"transfer_peers: expected http://host:port,..., got {each!r}"
                raise SettingError(message)
        return peers


class WorkerAddress(Struct, frozen=True):
    """Where a worker listens: ``http://host:port`` and two ZMQ endpoints."""

    http: str
    events: str
    replay: str
