"""The log line of an outage tells that outage's reason."""

from __future__ import annotations

import logging
from random import Random
from typing import TYPE_CHECKING

from state.mirror import Mirror
from state.model import RouterId, Rung
from support.running_clock import RunningClock
from support.state_backend import SOON_STALE
from support.valkey import eventually

if TYPE_CHECKING:
    import pytest

    from support.valkey import ValkeyProcess


async def test_an_outage_is_not_explained_by_the_one_before(
    own_server: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """First the server is killed, then it freezes: no command has failed when the view is stale."""
    caplog.set_level(logging.WARNING, logger="state.mirror")
    settings = own_server.settings
    async with (
        RunningClock() as clock,
        Mirror(settings, RouterId("r1"), clock=clock, rng=Random(3), timing=SOON_STALE) as mirror,
    ):
        await eventually(lambda: mirror.freshness()[0] is Rung.LIVE)
        own_server.kill()
        await eventually(lambda: mirror.freshness()[0] is Rung.STALE)
        own_server.start()
        await eventually(lambda: mirror.freshness()[0] is Rung.LIVE)
        own_server.freeze()
        try:
            await eventually(lambda: mirror.freshness()[0] is Rung.STALE)
        finally:
            own_server.thaw()
    first, second = [entry.message for entry in caplog.records if entry.name == "state.mirror"]
    assert "Error" in first
    assert "Error" not in second
