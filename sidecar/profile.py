"""What a sidecar is told, and what it finds out by itself about its engine."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from sidecar.adapter import has_nameless_pages
from sidecar.scrape import EngineClient, EngineError, EngineMetrics, ModelCard
from sidecar.subscriber import EventSource
from state.model import (
    MAX_RANKS,
    NAME_PATTERN,
    Generation,
    ModelIdentity,
    ReplicaId,
    ReplicaRecord,
)
from state.prefix import block_tokens_for
from state.secret import ChainKeys, SecretError, read_deployment_key
from state.tls import ClientTls

ASSUMED_PAGE_TOKENS: Final = 16
_STARTUP_POLL_S: Final = 0.25
_LOG = logging.getLogger("warmroute.sidecar")
_UNLOADED_MODELS: Final = frozenset({"", "unknown"})

_Seconds = Annotated[float, Meta(gt=0)]
_Tokens = Annotated[int, Meta(ge=1)]


class SettingsError(ValueError):
    """The settings are wrong, or do not fit the engine."""


class SidecarSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sidecar's configuration. None means: ask the engine.

    ``engine`` is ``http[s]://host:port``; ``advertise`` is what routers dial, the same by default.
    ``events`` and ``replay`` are ZMQ endpoints, those of rank 0 where there are data-parallel
    ``ranks``: the others publish on the ports that follow. ``block_tokens`` is a multiple of the
    page.
    ``metrics`` is ``host:port`` (0: any free port). After ``event_silence_s`` an engine that works
    but was never heard is reported. ``tls`` is for an engine at ``https://``.
    """

    engine: str
    redis: str | None = None
    replica: str | None = None
    advertise: str | None = None
    api_key: str | None = None
    model: str | None = None
    weights_revision: str = ""
    tokenizer: str = ""
    kv_parameters: str = ""
    page_tokens: _Tokens | None = None
    block_tokens: _Tokens | None = None
    capacity_pages: _Tokens | None = None
    events: str | None = None
    replay: str | None = None
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)] | None = None
    metrics: str = "127.0.0.1:0"
    chain_seed: Annotated[int, Meta(ge=0)] = 0
    deployment_key_file: str | None = None
    heartbeat_interval_s: _Seconds = 1.0
    scrape_interval_s: _Seconds = 1.0
    flush_interval_s: _Seconds = 0.01
    drain_grace_s: Annotated[float, Meta(ge=0)] = 5.0
    failed_checks: Annotated[int, Meta(ge=1)] = 3
    event_silence_s: _Seconds = 10.0
    tls: ClientTls = ClientTls()

    def __repr__(self) -> str:
        """Leave out what may hold secrets."""
        return f"SidecarSettings(engine=..., replica={self.replica!r})"


class EngineProfile(Struct, frozen=True, kw_only=True):
    """What one life of an engine is; ``source`` is None where it publishes no usable events.

    ``can_fetch``: it takes KV pages of a prefix from another engine, and gives them.
    ``salts_tails``: it reads which prefix of a prompt is public.
    """

    identity: ModelIdentity
    page_tokens: int
    capacity_pages: int | None = None
    started_at_s: float | None = None
    source: EventSource | None = None
    can_fetch: bool = False
    salts_tails: bool = False

    def gifts(self) -> tuple[bool, bool]:
        """Return what it can do besides, of which its cache does not depend."""
        return self.can_fetch, self.salts_tails


def chain_keys(settings: SidecarSettings) -> ChainKeys:
    """Return the keys of chains; raises SettingsError for a deployment key that cannot be used."""
    return ChainKeys(settings.chain_seed, deployment_key(settings))


def deployment_key(settings: SidecarSettings) -> bytes | None:
    """Return the deployment key, where there is one; raises SettingsError for one of no use."""
    if settings.deployment_key_file is None:
        return None
    try:
        return read_deployment_key(Path(settings.deployment_key_file))
    except SecretError as error:
        message = f"deployment_key_file: {error}"
        raise SettingsError(message) from None


def replica_name(settings: SidecarSettings, client: EngineClient) -> ReplicaId:
    """Return the replica's name; raises SettingsError for one that cannot be a key."""
    name = settings.replica or client.address
    if not re.fullmatch(NAME_PATTERN, name):
        message = f"replica: {name!r} does not match {NAME_PATTERN}"
        raise SettingsError(message)
    return ReplicaId(name)


async def discover(settings: SidecarSettings, client: EngineClient) -> EngineProfile:
    """Ask a healthy engine what it is; raises EngineError while it cannot serve yet.

    SettingsError when the configured blocks are no whole number of its pages.
    """
    if not await client.is_healthy():
        message = "/health does not answer 200"
        raise EngineError(message)
    try:
        cards = await client.models()
    except EngineError:
        if settings.model is None:
            raise
        cards = []
    model = settings.model or _served_model(cards)
    try:
        metrics = await client.metrics()
    except EngineError:
        metrics = EngineMetrics()
    told = metrics.page_tokens, metrics.capacity_pages
    if metrics.page_tokens is None:
        info = await client.sglang_info()
        told = (info.page_tokens, info.capacity_pages) if info is not None else told
    page_tokens = settings.page_tokens or told[0] or ASSUMED_PAGE_TOKENS
    if (settings.block_tokens or page_tokens) % page_tokens:
        message = f"block_tokens: {settings.block_tokens} is no multiple of {page_tokens}"
        raise SettingsError(message)
    identity = ModelIdentity(
        model=model,
        weights_revision=settings.weights_revision or await client.weight_version(),
        tokenizer=settings.tokenizer,
        kv_parameters=settings.kv_parameters,
        block_tokens=settings.block_tokens or block_tokens_for(page_tokens),
    )
    return EngineProfile(
        identity=identity,
        page_tokens=page_tokens,
        capacity_pages=settings.capacity_pages or told[1],
        started_at_s=metrics.started_at_s,
        source=None if has_nameless_pages(cards) else await _event_source(settings, client),
        can_fetch=await client.can_transfer(),
        salts_tails=any(card.salts_tails for card in cards),
    )


def record_of(
    profile: EngineProfile,
    settings: SidecarSettings,
    client: EngineClient,
    sidecar: str,
    cache_life: str,
) -> ReplicaRecord:
    """Return what the registry is told of the engine; its generation is not known yet."""
    return ReplicaRecord(
        replica=replica_name(settings, client),
        endpoint=settings.advertise or client.endpoint,
        generation=Generation(""),
        identity=profile.identity,
        has_events=profile.source is not None,
        page_tokens=profile.page_tokens,
        sidecar=sidecar,
        capacity_pages=profile.capacity_pages,
        can_fetch=profile.can_fetch,
        salts_tails=profile.salts_tails,
        rank=client.pin,
        cache_life=cache_life,
    )


async def await_engine(
    settings: SidecarSettings, client: EngineClient, replica: ReplicaId, stop: asyncio.Event
) -> EngineProfile | None:
    """Return the engine's profile once it serves a model; None when stopped before."""
    is_told = False
    while not stop.is_set():
        try:
            return await discover(settings, client)
        except EngineError as error:
            if not is_told:
                _LOG.info("waiting for the engine: replica=%s %s", replica, error)
                is_told = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_STARTUP_POLL_S):
                await stop.wait()
    return None


def with_page(profile: EngineProfile, page_tokens: int, settings: SidecarSettings) -> EngineProfile:
    """Return ``profile`` for an engine whose events show another page size."""
    block_tokens = settings.block_tokens or block_tokens_for(page_tokens)
    return msgspec.structs.replace(
        profile,
        page_tokens=page_tokens,
        identity=msgspec.structs.replace(profile.identity, block_tokens=block_tokens),
    )


def with_weights(profile: EngineProfile, weights_revision: str) -> EngineProfile:
    """Return ``profile`` with other weights."""
    identity = msgspec.structs.replace(profile.identity, weights_revision=weights_revision)
    return msgspec.structs.replace(profile, identity=identity)


def is_same_life(found: EngineProfile, known: EngineProfile, *, is_told: bool) -> bool:
    """Return whether the cache is the known one; after ``is_told`` its process is a newer one.

    What the engine can do besides says nothing of what it holds.
    """
    started_at_s = known.started_at_s if is_told else found.started_at_s
    can_fetch, salts_tails = known.gifts()
    same = msgspec.structs.replace(
        found, started_at_s=started_at_s, can_fetch=can_fetch, salts_tails=salts_tails
    )
    return same == known


def _served_model(cards: list[ModelCard]) -> str:
    """Return the base model; an engine lists itself before it knows what it serves."""
    for card in cards:
        if card.parent is None and card.id.lower() not in _UNLOADED_MODELS:
            return card.id
    message = "/v1/models names no model yet"
    raise EngineError(message)


async def _event_source(settings: SidecarSettings, client: EngineClient) -> EventSource | None:
    """Return the one publisher to follow; None when there is none.

    Where each rank has one, ``client`` is that of a rank (``sidecar.rank``).
    """
    if settings.events is not None:
        return EventSource(events=settings.events, replay=settings.replay)
    try:
        sources = await client.event_sources()
    except EngineError:
        return None
    return sources[0] if len(sources) == 1 else None
