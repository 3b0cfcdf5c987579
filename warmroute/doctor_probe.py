"""The end-to-end probe: one prompt twice, and what each side made of it.

The prompt is new each time, so that its first request finds nothing. It goes to the replica itself;
then the router is asked the same, and its record of that decision tells what it expected of every
replica. Where the router knows tenants, the replica's own answer would be of another scope: then
one prompt goes through the router twice, for whichever replica it chooses.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
from msgspec import Struct

from router.header import RANK_NAME
from router.replica_view import ReplicaView
from router.trace import DecisionRecord
from warmroute.admin_client import read_bounded
from warmroute.doctor_case import ProbeResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmroute.admin_client import AdminClient

PROBE_S: Final = 60.0
EVENTS_S: Final = 4.0
"""How long events may take from the engine to the router."""
PENDING_S: Final = 2.5
"""Longer than a router's own placements count (``placements.pending_s``)."""
POLL_S: Final = 0.1
LEAST_WORDS: Final = 400
WORDS_PER_BLOCK: Final = 4
MAX_ANSWER_BYTES: Final = 1 << 20
_OK: Final = 200
_CHAT: Final = "/v1/chat/completions"
REQUEST_ID: Final = "x-request-id"


class ProbeFailedError(Exception):
    """A probe could not be sent or was refused; the text says by whom."""


class _Details(Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


class _Answer(Struct, frozen=True):
    usage: _Usage


def probe_body(model: str, block_tokens: int) -> dict[str, Any]:
    """Return a chat request whose prompt nobody sent before and that spans some blocks."""
    words = max(LEAST_WORDS, WORDS_PER_BLOCK * block_tokens)
    counted = " ".join(str(number) for number in range(words))
    text = f"Probe {secrets.token_hex(8)} of warmroute doctor. Numbers: {counted}. Say ok."
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 1,
        "temperature": 0,
    }


async def probe_engine(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], rank: int | None = None
) -> ProbeResult:
    """Send ``body`` twice to one engine, or to one of its ranks; raises ProbeFailedError."""
    pinned = {} if rank is None else {RANK_NAME.decode(): str(rank)}
    await _chat(http, url, body, pinned)
    usage = await _chat(http, url, body, pinned)
    details = usage.prompt_tokens_details
    return ProbeResult(
        prompt_tokens=usage.prompt_tokens,
        reported_tokens=details.cached_tokens if details is not None else None,
    )


async def has_been_told(admin: AdminClient, replica: str, blocks_before: int) -> bool:
    """Wait until the router knows of more blocks of ``replica`` than before; False: it never did.

    It must be asked before the router is: what a router sent itself it expects to find anyway.
    """
    until_s = time.monotonic() + EVENTS_S
    while time.monotonic() < until_s:
        views = await admin.find("/admin/replicas", list[ReplicaView]) or []
        if any(view.replica == replica and view.resident_blocks > blocks_before for view in views):
            return True
        await asyncio.sleep(POLL_S)
    return False


async def predicted_tokens(
    http: aiohttp.ClientSession,
    url: str,
    admin: AdminClient,
    body: Mapping[str, Any],
    replica: str,
) -> int | None:
    """Return what the router at ``url`` expects ``replica`` to have of ``body``; None: not told.

    Raises ProbeFailedError.
    """
    request_id = f"doctor-{secrets.token_hex(12)}"
    await _chat(http, url, body, {REQUEST_ID: request_id})
    return _expected_of(await _record(admin, request_id), replica)


async def probe_router(
    http: aiohttp.ClientSession, url: str, admin: AdminClient, body: Mapping[str, Any]
) -> tuple[str, ProbeResult]:
    """Send ``body`` twice through the router; return where the second one went, and what was found.

    In between the router forgets that it sent the first one, so that it expects what events tell.
    Raises ProbeFailedError.
    """
    await _chat(http, url, body)
    await asyncio.sleep(PENDING_S)
    request_id = f"doctor-{secrets.token_hex(12)}"
    usage = await _chat(http, url, body, {REQUEST_ID: request_id})
    record = await _record(admin, request_id)
    if record is None or not record.attempts:
        message = f"{admin.base} keeps no record of it"
        raise ProbeFailedError(message)
    decision = record.attempts[-1].decision
    details = usage.prompt_tokens_details
    return decision.replica, ProbeResult(
        prompt_tokens=usage.prompt_tokens,
        reported_tokens=details.cached_tokens if details is not None else None,
        predicted_tokens=decision.predicted_cached_tokens,
    )


def _expected_of(record: DecisionRecord | None, replica: str) -> int | None:
    if record is None or not record.attempts:
        return None
    for candidate in record.attempts[0].decision.candidates:
        if candidate.replica == replica:
            return candidate.cached_tokens
    return None


async def _record(admin: AdminClient, request_id: str) -> DecisionRecord | None:
    """Return the record of a request that has just ended."""
    for _ in range(20):
        record = await admin.find(f"/debug/decisions/{request_id}", DecisionRecord)
        if record is not None:
            return record
        await asyncio.sleep(POLL_S / 2)
    return None


async def _chat(
    http: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
) -> _Usage:
    try:
        async with http.post(
            url + _CHAT,
            data=msgspec.json.encode(body),
            headers={"Content-Type": "application/json", **(headers or {})},
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=PROBE_S),
        ) as answer:
            if answer.status != _OK:
                message = f"{url}{_CHAT} answered {answer.status}"
                raise ProbeFailedError(message)
            raw = await read_bounded(answer, MAX_ANSWER_BYTES)
            return msgspec.json.decode(raw, type=_Answer).usage
    except msgspec.DecodeError:
        message = f"{url}{_CHAT}: an answer without usage"
        raise ProbeFailedError(message) from None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        message = f"{url}{_CHAT}: {type(error).__name__}"
        raise ProbeFailedError(message) from None
