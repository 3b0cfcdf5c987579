"""Puts the parts of warm-up together, where the configuration asks for it."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Final

from router.warm_call import WarmCallParts, WarmCalls
from router.warm_look import WarmLook
from router.warm_room import WarmRoom
from router.warm_text import PrefixTexts
from router.warm_up import WarmUps
from router.warm_work import WarmWork, WarmWorkParts
from state.client import RedisSettings
from state.model import RouterId
from state.warm_claim import RedisWarmClaims

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from router.app import App
    from state.warm_claim import WarmClaims

STORE_TIMEOUT_S: Final = 1.0


def enter_warm_ups(stack: AsyncExitStack, app: App, state_url: str) -> None:
    """Let ``app`` warm replicas, with claims in its store, if it is to."""
    if not app.config.warm_up.enabled:
        return
    settings = RedisSettings(
        url=state_url,
        command_timeout_s=STORE_TIMEOUT_S,
        connect_timeout_s=STORE_TIMEOUT_S,
        max_connections=2,
    )
    claims = RedisWarmClaims(settings, RouterId(secrets.token_hex(8)))
    stack.push_async_callback(claims.aclose)
    app.warm_ups = app.proxy.warm_ups = open_warm_ups(app, claims)
    app.metrics.registry.register(app.warm_ups)


def open_warm_ups(app: App, claims: WarmClaims) -> WarmUps:
    """Return what keeps prefixes and does the jobs; ``run`` has to be called."""
    config, know, clock, gate = app.config, app.know, time.monotonic, app.gate
    texts = PrefixTexts(
        config.warm_up,
        know.heat,
        clock,
        salt_of=gate.salt_of if gate is not None else lambda _: "",
        min_tokens=config.hot_prefix.min_prefix_tokens,
    )
    warm_ups = WarmUps(config.warm_up, texts, app.fleet, app.reader, clock, time.time)
    outlook = app.chooser.outlook
    calls = WarmCalls(
        WarmCallParts(
            know=know,
            outlook=outlook,
            pool=app.pool,
            prefill=lambda: getattr(app.chooser.decided_by.policy, "prefill", None),
            recording=app.recording,
            clock=clock,
            unix_clock=time.time,
        )
    )
    warm_ups.work = WarmWork(
        WarmWorkParts(
            settings=config.warm_up,
            transfer=config.kv_transfer,
            fleet=app.fleet,
            reader=app.reader,
            look=WarmLook(texts, know, outlook, app.fleet, app.health),
            room=WarmRoom(
                fleet=app.fleet,
                reader=app.reader,
                leases=know.leases,
                standing=app.resilience.availability.standing,
                entrance=app.entrance,
                own=lambda replica: calls.open[replica],
                clock=clock,
            ),
            calls=calls,
            claims=claims,
            clock=clock,
            empty=warm_ups.empty,
            note=warm_ups.counted,
        )
    )
    return warm_ups
