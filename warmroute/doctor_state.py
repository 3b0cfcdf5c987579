"""What sidecars wrote into the shared state: read once, for the doctor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from state.address import redact
from state.client import (
    STORE_ERRORS,
    RedisSettings,
    command_client,
    describe,
    run_command,
)
from state.facts import FactsBoard
from state.model import ReplicaFacts, ReplicaId, ReplicaRecord
from state.schema import REPLICA_INDEX, ReplicaKeys, decode_record, is_name

TIMEOUT_S: Final = 1.0


class StateUnreachableError(Exception):
    """The store does not answer; the text names it without credentials."""


class StateReport(Struct, frozen=True, kw_only=True):
    """The replicas that are registered in the store, and what their sidecars detected."""

    url: str
    records: Mapping[ReplicaId, ReplicaRecord]
    facts: Mapping[ReplicaId, ReplicaFacts]


async def examine_state(url: str) -> StateReport:
    """Return what the store at ``url`` holds; raises StateUnreachableError or ValueError."""
    settings = RedisSettings(url=url, command_timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S)
    client = command_client(settings)
    board = FactsBoard()
    records: dict[ReplicaId, ReplicaRecord] = {}
    try:
        members = await run_command(client, "ZRANGE", REPLICA_INDEX, 0, -1)
        names = [name.decode("utf-8", "replace") for name in members]
        for name in map(ReplicaId, filter(is_name, names)):
            value = await run_command(client, "HGET", ReplicaKeys(name).record, "value")
            record = decode_record(value, name) if isinstance(value, bytes) else None
            if record is not None:
                records[name] = record
        await board.read(client, records)
    except STORE_ERRORS as error:
        message = f"{redact(url)} does not answer: {describe(error)}"
        raise StateUnreachableError(message) from None
    finally:
        await client.aclose()
    return StateReport(url=redact(url), records=records, facts=board())
