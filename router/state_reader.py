"""How a router looks at the shared state: by a mirror of it, or by lookups beside one."""

from __future__ import annotations

import random
import secrets
import time
from typing import TYPE_CHECKING, Final

from state.client import RedisSettings
from state.direct import LOOKUP_CONNECTIONS, DirectReader
from state.eviction_check import EvictionCheck
from state.mirror import Mirror
from state.model import RouterId

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from router.epoch import ScopeEpochs
    from state.seal_guard import SealGuard

STATE_TIMEOUT_S: Final = 1.0
"""Patient, as no request waits for the state store; by then the view is called stale anyway."""


async def enter_reader(
    stack: AsyncExitStack,
    state_url: str,
    lookup: str,
    scopes: ScopeEpochs | None = None,
    guard: SealGuard | None = None,
) -> Mirror | DirectReader:
    """Open this router's view of the shared state, with or without a copy of the index.

    The epochs of ``scopes`` are read before anything else, in every round.
    """
    mirror = build_mirror(state_url, has_index=lookup == "mirror", guard=guard)
    mirror.read_first = scopes.exchange if scopes is not None else None
    if lookup == "mirror":
        return await stack.enter_async_context(mirror)
    reader = DirectReader(
        mirror,
        RedisSettings(url=state_url, max_connections=LOOKUP_CONNECTIONS),
        clock=time.monotonic,
        rng=random.Random(secrets.randbits(63)),  # noqa: S311 - jitter
    )
    return await stack.enter_async_context(reader)


def build_mirror(
    state_url: str, *, has_index: bool = True, guard: SealGuard | None = None
) -> Mirror:
    """Return this router's view of the shared state at ``state_url``."""
    router_id = RouterId(secrets.token_hex(6))
    mirror = Mirror(
        RedisSettings(
            url=state_url,
            command_timeout_s=STATE_TIMEOUT_S,
            connect_timeout_s=STATE_TIMEOUT_S,
            guard=guard,
        ),
        router_id,
        clock=time.monotonic,
        rng=random.Random(router_id),  # noqa: S311 - jitter
        has_index=has_index,
    )
    mirror.server_check = EvictionCheck(state_url).run
    return mirror
