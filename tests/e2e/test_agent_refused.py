"""A sidecar whose state store takes no writes for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from state.store import StateError
from support.dials import Dials
from support.kv_engine import KvEngine
from support.port import free_port
from support.sidecar import Fleet, eventually, settings_for, sidecar

if TYPE_CHECKING:
    from state.model import ReplicaRecord


class FullFleet(Fleet):
    """Refuses the first three registrations."""

    refused = 0

    async def register(self, record: ReplicaRecord) -> None:
        if self.refused < 3:
            self.refused += 1
            message = "register: OutOfMemoryError: full"
            raise StateError(message)
        await super().register(record)


async def test_refused_writes_are_on_the_dials_and_tried_again() -> None:
    """R-09."""
    fleet, port = FullFleet(), free_port()
    async with KvEngine() as engine:
        settings = settings_for(engine, metrics=f"127.0.0.1:{port}")
        async with sidecar(settings, fleet):
            await eventually(fleet.is_registered)
            await Dials(port).show(failed_state_writes_total=3)
