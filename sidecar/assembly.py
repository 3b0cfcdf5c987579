"""Builds a worker's engine from its settings: model, runner, pool, tiers, audit."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from prompt.codec import Codec, load_codec
from prompt.model import UnroutablePromptError
from prompt.public import PublicText, common_tokens
from sidecar.audit_log import AuditLog
from sidecar.cache import PagedCache
from sidecar.capacity import expect_room
from sidecar.clock import StepCost, preset_cost, preset_page_bytes
from sidecar.cost import MeasuredCosts
from sidecar.engine import Engine, EngineParts
from sidecar.eviction import ByteBenefit, LeastRecentlyUsed, TenantQuota
from sidecar.ledger import PageLedger
from sidecar.loading import LoadedModel, build_runner, load_model
from sidecar.mover import Mover
from sidecar.peer import LocalPages, Peers
from sidecar.runner import Runner
from sidecar.scheduler import Scheduler
from sidecar.scope import Scopes
from sidecar.setting import DEFAULT_PAGES, DEFAULT_POOL_BYTES, SettingError, WorkerSettings
from sidecar.step import SchedulerLimits
from sidecar.store import DiskStore, HostMemory
from sidecar.synthetic import Lexicon, SyntheticOptions, SyntheticRunner
from sidecar.tier import LowerTier
from sidecar.tiers import Tiers
from sidecar.transfer_client import TransferClient
from sidecar.transfer_server import TransferServer
from state.model import ModelIdentity

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.eviction import Eviction
    from sidecar.pagechange import PageChange

LINK_BYTES_PER_S: Final = 20e9
"""What a synthetic page move takes: about the rate of a PCIe 4.0 x16 link."""
_ASSUMED_FLOPS_PER_S: Final = 2e10
_ASSUMED_STEP_MS: Final = 1.0
_MIB: Final = 2**20


class Assembly(Struct, frozen=True):
    """A worker's parts. ``settings`` has no open questions left: sizes are what they are."""

    settings: WorkerSettings
    codec: Codec
    engine: Engine
    runner: Runner
    mover: Mover | None
    ledger: PageLedger
    disk: DiskStore | None
    transfer: TransferServer | None
    namespace: bytes


def assemble(settings: WorkerSettings, publish: Callable[[list[PageChange]], None]) -> Assembly:
    """Load and build everything; blocking.

    Raises SettingError, CodecLoadError, ModelError or StoreError, whose text says what is wrong.
    """
    loaded = None if settings.compute == "synthetic" else load_model(settings)
    codec = loaded.codec if loaded is not None else _own_codec(settings)
    settings = _resolved(settings, loaded)
    token_bytes = 0 if loaded is None else loaded.token_bytes(settings.dtype)
    expect_room(settings, token_bytes * settings.page_tokens)
    runner = _runner(settings, loaded, codec)
    identity = ModelIdentity(
        model=settings.served_name,
        weights_revision="" if loaded is None else loaded.weights.digest,
        tokenizer=codec.digest,
        kv_parameters=runner.kv_parameters,
        block_tokens=settings.page_tokens,
    )
    seed = settings.seed % 2**64
    namespace = _namespace(identity, runner, seed)
    costs = MeasuredCosts(_prior_cost(settings, loaded), runner.page_bytes)
    ledger = PageLedger()
    journal = None if settings.audit is None else ledger.note
    disk = _disk(settings, runner, namespace)
    tiers = _tiers(settings, runner, costs, disk, journal)
    eviction = _eviction(settings)
    cache = PagedCache(
        settings.pages or DEFAULT_PAGES,
        settings.page_tokens,
        seed,
        eviction=eviction,
        costs=costs,
        tiers=tiers,
        journal=journal,
    )
    scopes = Scopes(identity, seed)
    scopes.allow(_public_prefixes(settings, codec))
    mover = _mover(settings, runner, cache, costs, disk, namespace)
    parts = EngineParts(
        scheduler=Scheduler(cache, _limits(settings)),
        runner=runner,
        scopes=scopes,
        codec=codec,
        costs=costs,
        publish=publish,
        time_s=time.monotonic,
        mover=mover,
        ledger=ledger,
        request_timeout_s=settings.request_timeout_s,
    )
    engine = Engine(parts)
    _open_audit(settings, ledger, cache)
    transfer = None
    if settings.transfer_port is not None:
        if not runner.content_bytes:
            message = "transfer_port: synthetic compute has no content to serve"
            raise SettingError(message)
        transfer = TransferServer(LocalPages(cache, runner, mover, journal), namespace)
    return Assembly(settings, codec, engine, runner, mover, ledger, disk, transfer, namespace)


def _own_codec(settings: WorkerSettings) -> Codec:
    """Return the codec. All tenants share it: no text is faster for the words that others had."""
    return load_codec(_path(settings.tokenizer), learns_words=False)


def _path(path: str | None) -> Path | None:
    return None if path is None else Path(path)


def _resolved(settings: WorkerSettings, loaded: LoadedModel | None) -> WorkerSettings:
    """Return ``settings`` with sizes for the model where none were given."""
    pages, context_tokens = settings.pages, settings.max_model_len
    if loaded is not None:
        page_bytes = loaded.token_bytes(settings.dtype) * settings.page_tokens
        pages = pages or max(1, min(DEFAULT_PAGES, DEFAULT_POOL_BYTES // page_bytes))
        most_tokens = loaded.config.max_position_tokens
        if context_tokens is not None and context_tokens > most_tokens:
            message = f"max_model_len: the model has {most_tokens} positions, got {context_tokens}"
            raise SettingError(message)
        pool_tokens = pages * settings.page_tokens
        context_tokens = context_tokens or min(pool_tokens, most_tokens)
    return msgspec.structs.replace(
        settings, pages=pages or DEFAULT_PAGES, max_model_len=context_tokens
    )


def _runner(settings: WorkerSettings, loaded: LoadedModel | None, codec: Codec) -> Runner:
    if loaded is not None:
        return build_runner(settings, loaded)
    options = SyntheticOptions(
        cost=preset_cost(settings.preset),
        page_bytes=preset_page_bytes(settings.preset, settings.page_tokens),
        link_bytes_per_s=LINK_BYTES_PER_S,
        speed_up=settings.speed_up,
        seed=settings.seed,
    )
    return SyntheticRunner(Lexicon(codec), options, time.monotonic)


def _namespace(identity: ModelIdentity, runner: Runner, seed: int) -> bytes:
    """Return 32 bytes that are equal where pages mean the same and are laid out alike."""
    told = msgspec.json.encode([identity, runner.page_bytes, seed])
    return hashlib.blake2b(told, digest_size=32, person=b"warmroute-kv").digest()


def _prior_cost(settings: WorkerSettings, loaded: LoadedModel | None) -> StepCost:
    if loaded is None:
        cost = preset_cost(settings.preset)
        return StepCost(
            **{
                field: max(value / settings.speed_up, 1e-9)
                for field, value in msgspec.structs.asdict(cost).items()
            }
        )
    token_ms = 2e3 * loaded.parameters / _ASSUMED_FLOPS_PER_S
    return StepCost(
        step_ms=_ASSUMED_STEP_MS,
        prefill_token_ms=token_ms,
        attention_pair_ms=token_ms * 1e-4,
        decode_sequence_ms=token_ms,
        kv_token_read_ms=token_ms * 1e-4,
    )


def _limits(settings: WorkerSettings) -> SchedulerLimits:
    return SchedulerLimits(
        max_sequences=settings.max_num_seqs,
        max_step_tokens=settings.step_tokens,
        max_sequence_tokens=settings.context_tokens,
    )


def _eviction(settings: WorkerSettings) -> Eviction:
    quotas = settings.quotas_pages
    if quotas and settings.eviction != "quota":
        message = "tenant_quotas: they need eviction quota"
        raise SettingError(message)
    match settings.eviction:
        case "lru":
            return LeastRecentlyUsed()
        case "benefit":
            return ByteBenefit()
        case "quota":
            reserved = sum(quotas.values())
            if reserved > (settings.pages or DEFAULT_PAGES):
                message = f"tenant_quotas: {reserved} pages of {settings.pages} are guaranteed"
                raise SettingError(message)
            return TenantQuota(quotas)


def _disk(settings: WorkerSettings, runner: Runner, namespace: bytes) -> DiskStore | None:
    if settings.disk_dir is None:
        return None
    if not settings.host_mib:
        message = "disk_dir: pages reach the disk through host memory; set host_mib, too"
        raise SettingError(message)
    if not runner.content_bytes:
        message = "disk_dir: synthetic compute has no content to keep"
        raise SettingError(message)
    return DiskStore(
        Path(settings.disk_dir), namespace.hex(), runner.content_bytes, settings.disk_mib * _MIB
    )


def _tiers(
    settings: WorkerSettings,
    runner: Runner,
    costs: MeasuredCosts,
    disk: DiskStore | None,
    journal: Any,
) -> Tiers | None:
    if not settings.host_mib and not settings.peers:
        return None
    host = None
    if settings.host_mib:
        host = LowerTier("host", max(1, settings.host_mib * _MIB // runner.page_bytes), journal)
    below = None
    if disk is not None:
        slots = settings.disk_mib * _MIB // disk.file_bytes
        if slots < 1:
            message = f"disk_mib: a page takes {disk.file_bytes} bytes"
            raise SettingError(message)
        below = LowerTier("disk", slots, journal)
    return Tiers(
        costs,
        settings.page_tokens,
        host=host,
        disk=below,
        fetch=settings.fetch,
        demote=settings.demote,
    )


def _mover(
    settings: WorkerSettings,
    runner: Runner,
    cache: PagedCache,
    costs: MeasuredCosts,
    disk: DiskStore | None,
    namespace: bytes,
) -> Mover | None:
    if cache.exchange is None:
        return None
    tiers = cache.exchange.tiers
    memory = None
    if tiers.host is not None:
        memory = HostMemory(tiers.host.pool.total_pages, runner.content_bytes)
    if disk is not None and tiers.disk is not None:
        tiers.disk.restore(disk.open(), disk.remove)
    peers = None
    if settings.peers:
        if not runner.content_bytes:
            message = "transfer_peers: synthetic compute has no content to fetch"
            raise SettingError(message)
        client = TransferClient(namespace, runner.content_bytes)
        peers = Peers(client, namespace, settings.peers)
    return Mover(cache.exchange, costs, memory, disk, peers)


def _open_audit(settings: WorkerSettings, ledger: PageLedger, cache: PagedCache) -> None:
    if settings.audit is None:
        return
    tiers = None if cache.exchange is None else cache.exchange.tiers
    lower = () if tiers is None else (tiers.host, tiers.disk)
    pools = [cache.pool, *(tier.pool for tier in lower if tier is not None)]
    log = AuditLog(
        Path(settings.audit), settings.audit_mib * _MIB, settings.audit_files, ledger.snapshot
    )
    try:
        ledger.watch(pools, log)
    except OSError as error:
        message = f"audit: {settings.audit}: {error.strerror or error}"
        raise SettingError(message) from None


def _public_prefixes(settings: WorkerSettings, codec: Codec) -> list[bytes]:
    if settings.public_prefixes is None:
        return []
    path = Path(settings.public_prefixes)
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[PublicText])
        return [common_tokens(entry, codec) for entry in entries]
    except OSError as error:
        message = f"public_prefixes: {path}: {error.strerror or error}"
        raise SettingError(message) from None
    except (msgspec.DecodeError, UnroutablePromptError) as error:
        message = f"public_prefixes: {path}: {error}"
        raise SettingError(message) from None
