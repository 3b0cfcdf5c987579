"""Finds out what a calibration has to know of an engine: its model, limits, cache, and traffic."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
from msgspec import Struct

from replay.probe import EngineFacts
from sidecar.scrape import (
    MAX_BODY_BYTES,
    EngineClient,
    EngineError,
    EngineMetrics,
    parse_metrics,
)
from sidecar.setting import WorkerSettings
from warmroute.cli import UsageError
from warmroute.engine_look import is_loopback as is_loopback

if TYPE_CHECKING:
    from sidecar.scrape import ModelCard

INFO_S: Final = 30.0
"""vLLM looks around on its machine before it answers."""
NO_CACHING: Final = 'enable_prefix_caching="False"'
"""In the metrics of an engine that keeps no prefixes."""


class UnreachableError(Exception):
    """Nobody answers at the address, or no engine does."""


class Limits(Struct, frozen=True, kw_only=True):
    """Tokens and sequences of one step at most; None: not known."""

    step_tokens: int | None = None
    max_sequences: int | None = None


class _SchedulerConfig(Struct, frozen=True):
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None


class _EngineConfig(Struct, frozen=True):
    scheduler_config: _SchedulerConfig = _SchedulerConfig()


class _ServerInfo(Struct, frozen=True):
    """``/server_info`` of vLLM, in its development mode, or of the bundled worker."""

    vllm_config: _EngineConfig | None = None
    worker_settings: dict[str, Any] | None = None


def parse_limits(body: str) -> Limits:
    """Return what ``/server_info`` says of the limits; nothing where it cannot be read."""
    try:
        info = msgspec.json.decode(body, type=_ServerInfo)
        if info.worker_settings is not None:
            settings = msgspec.convert(info.worker_settings, WorkerSettings)
            return Limits(step_tokens=settings.step_tokens, max_sequences=settings.max_num_seqs)
    except msgspec.DecodeError:  # of which wrong settings are a kind
        return Limits()
    if info.vllm_config is None:
        return Limits()
    scheduler = info.vllm_config.scheduler_config
    return Limits(
        step_tokens=scheduler.max_num_batched_tokens or None,
        max_sequences=scheduler.max_num_seqs or None,
    )


async def get_text(client: EngineClient, path: str, api_key: str | None) -> str | None:
    """Return what the engine answers at ``path``; None where that is no 200."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=INFO_S)
    try:
        async with (
            aiohttp.ClientSession(
                connector=client.connector(), timeout=timeout, headers=headers, trust_env=False
            ) as http,
            http.get(client.endpoint + path, allow_redirects=False) as response,
        ):
            if response.status != HTTPStatus.OK:
                return None
            body = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    return None
            return body.decode("utf-8", "replace")
    except (TimeoutError, aiohttp.ClientError, OSError):
        return None


def choose_model(cards: list[ModelCard], wanted: str | None) -> ModelCard:
    """Return the model to ask; raises UsageError where there is no such, or no only one."""
    bases = [card for card in cards if card.parent is None]
    names = ", ".join(card.id for card in cards) or "no model"
    if wanted is not None:
        for card in cards:
            if card.id == wanted:
                return card
        message = f"--model: {wanted} is not found: the engine serves {names}"
        raise UsageError(message)
    if len(bases) != 1:
        message = f"--model: expected one of those that the engine serves: {names}"
        raise UsageError(message)
    return bases[0]


def facts_of(card: ModelCard, metrics: str, given: Limits, told: Limits) -> EngineFacts:
    """Return what is known; ``given`` by the user counts before what the engine ``told``."""
    numbers = parse_metrics(metrics)
    page_tokens, pages = numbers.page_tokens, numbers.capacity_pages
    known: dict[str, Any] = {
        "context_tokens": card.max_model_len,
        "step_tokens": given.step_tokens or told.step_tokens,
        "max_sequences": given.max_sequences or told.max_sequences,
        "page_tokens": page_tokens,
        "capacity_tokens": page_tokens * pages if page_tokens and pages else None,
        "is_caching": False if NO_CACHING in metrics else None,
    }
    known = {name: value for name, value in known.items() if value is not None}
    return EngineFacts(model=card.id, told=frozenset(known), **known)


async def find_facts(
    client: EngineClient, wanted: str | None, given: Limits, api_key: str | None
) -> EngineFacts:
    """Ask the engine about itself; raises UsageError and UnreachableError."""
    try:
        cards = await client.models()
    except EngineError as error:
        message = f"no engine answers at {client.endpoint}: {error}"
        raise UnreachableError(message) from error
    card = choose_model(cards, wanted)
    info = await get_text(client, "/server_info?config_format=json", api_key)
    metrics = await get_text(client, "/metrics", api_key)
    return facts_of(card, metrics or "", given, parse_limits(info or ""))


async def read_metrics(client: EngineClient) -> EngineMetrics:
    """Return the engine's own numbers, all None where it has none."""
    try:
        return await client.metrics()
    except EngineError:
        return EngineMetrics()
