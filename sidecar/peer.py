"""Pages from other workers: which may be asked, where they serve pages, and serving our own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
from msgspec import Struct

from sidecar.journal import Transition
from sidecar.transfer import allowed_source

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from sidecar.cache import PagedCache
    from sidecar.mover import Mover
    from sidecar.pool import PageId
    from sidecar.runner import Runner
    from sidecar.transfer_client import TransferClient, Why
    from state.model import BlockId

_KNOWN_S: Final = 30.0
_STALLED_S: Final = 5.0
_ASK_S: Final = 1.0
_MOST_ANSWER_BYTES: Final = 4096
GROUP_BYTES: Final = 16 * 2**20
"""Pages are read from the device in groups, as each read waits for the step under way."""
READER: Final = "transfer"
_ELSEWHERE: Final[frozenset[Why]] = frozenset(
    ("unreachable", "closed", "wrong_namespace", "bad_request", "malformed")
)
"""Ends of fetches after which the peer may have another port, or be another worker."""


class TransferAddress(Struct, frozen=True):
    """What ``GET /kv_transfer`` answers: where pages are served, and of which namespace (hex)."""

    port: int
    namespace: str


class Peers:
    """Fetches from the workers in ``allowed`` (``http://host:port``), and from nobody else."""

    def __init__(self, client: TransferClient, namespace: bytes, allowed: frozenset[str]) -> None:
        self._client = client
        self._namespace = namespace
        self._allowed = allowed
        self._known: dict[tuple[str, int], tuple[float, int | None]] = {}
        """By origin: one peer has many spellings, and clients choose them."""

    def is_allowed(self, source: str) -> bool:
        """Return whether pages may be fetched from the worker at ``source``."""
        return allowed_source(source, self._allowed) is not None

    async def fetch(
        self,
        source: str,
        keys: Sequence[BlockId],
        take: Callable[[int, bytes], None],
        patience_s: float | None = None,
    ) -> int:
        """Return how many leading pages of ``keys`` came; never raises for what a peer does.

        After ``patience_s`` the rest is given up.
        """
        origin = allowed_source(source, self._allowed)
        if origin is None:
            return 0
        pages = 0

        def took(index: int, content: bytes) -> None:
            nonlocal pages
            pages = index + 1
            take(index, content)

        why: Why = "stalled"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                port = await self._transfer_port(source, origin)
                if port is None:
                    return 0
                why = (await self._client.fetch(origin[0], port, keys, took)).why
        self._learn(origin, why, pages)
        return pages

    def _learn(self, origin: tuple[str, int], why: Why, pages: int) -> None:
        """Forget the port of a peer that is not there any more; leave one that hangs alone."""
        if why in _ELSEWHERE:
            self._known.pop(origin, None)
        elif why == "stalled" and not pages:
            self._known[origin] = (time.monotonic() + _STALLED_S, None)

    async def _transfer_port(self, source: str, origin: tuple[str, int]) -> int | None:
        """Return where ``source`` serves pages of our namespace, None when it does not."""
        now_s = time.monotonic()
        known_until_s, port = self._known.get(origin, (0.0, None))
        if now_s < known_until_s:
            return port
        port = await self._ask(source)
        self._known[origin] = (now_s + _KNOWN_S, port)
        return port

    async def _ask(self, source: str) -> int | None:
        timeout = aiohttp.ClientTimeout(total=_ASK_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{source.rstrip('/')}/kv_transfer", allow_redirects=False) as answer,
            ):
                if answer.status != 200:  # noqa: PLR2004 - the status that means yes
                    return None
                body = bytearray()
                async for chunk in answer.content.iter_chunked(_MOST_ANSWER_BYTES):
                    body += chunk
                    if len(body) > _MOST_ANSWER_BYTES:
                        return None
                told = msgspec.json.decode(body, type=TransferAddress)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, RecursionError, OSError):
            return None
        return told.port if told.namespace == self._namespace.hex() else None


class LocalPages:
    """What this worker holds, for peers: see ``transfer_server.PageSource``."""

    def __init__(
        self,
        cache: PagedCache,
        runner: Runner,
        mover: Mover | None = None,
        journal: Callable[[Transition], None] | None = None,
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._mover = mover
        self._journal = journal
        self._streams = 0

    async def pages(self, keys: Sequence[BlockId]) -> AsyncGenerator[bytes, None]:
        """Yield the content of the leading ``keys``: from the device, else from the tiers below."""
        self._streams += 1
        holder = f"{READER}-{self._streams}"
        at_once = max(1, GROUP_BYTES // max(1, self._runner.content_bytes))
        try:
            for start in range(0, len(keys), at_once):
                group = keys[start : start + at_once]
                contents = await self._group(group, holder)
                for content in contents:
                    yield content
                if len(contents) < len(group):
                    return
        finally:
            if self._journal is not None:
                self._journal(Transition(op="end", request=holder, why="read"))

    async def _group(self, keys: Sequence[BlockId], holder: str) -> list[bytes]:
        held = self._cache.tree.match(keys, len(keys))
        contents = await self._from_device(held, keys, holder) if held else []
        if len(contents) < len(held) or len(held) == len(keys) or self._mover is None:
            return contents
        return contents + await self._mover.read_for_peer(keys[len(held) :], holder)

    async def _from_device(
        self, pages: list[PageId], keys: Sequence[BlockId], holder: str
    ) -> list[bytes]:
        pool, tree = self._cache.pool, self._cache.tree
        pool.share(pages, holder)
        try:
            contents = await self._runner.read(tuple(pages))
            # A step that failed in between may have taken back what it had promised.
            are_right = [tree.key(page) == key for page, key in zip(pages, keys, strict=False)]
        finally:
            pool.release(pages[::-1], holder, "read")
        right = are_right.index(False) if False in are_right else len(pages)
        return contents[:right]
