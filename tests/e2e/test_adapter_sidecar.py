"""What the sidecar of an engine with adapters tells routers, against real sockets."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from state.model import Adapter
from support.kv_engine import KvEngine, stored
from support.sidecar import IDENTITY, Fleet, eventually, page, pages, settings_for, sidecar

SQL = msgspec.structs.replace(IDENTITY, adapter="sql")


class AdapterList(KvEngine):
    """``adapters`` are names and roots, in the list of an engine that is called ``owner``."""

    def __init__(self, owner: str = "vllm") -> None:
        super().__init__()
        self.owner = owner
        self.adapters: dict[str, str] = {}

    async def _models(self, request: web.Request) -> web.Response:
        del request
        base: dict[str, Any] = {"id": self.model, "parent": None, "owned_by": self.owner}
        cards = [base] + [
            {"id": name, "parent": self.model, "root": root, "owned_by": self.owner}
            for name, root in self.adapters.items()
        ]
        return web.json_response({"object": "list", "data": cards})


def adapters_of(fleet: Fleet) -> tuple[Adapter, ...]:
    replica = fleet.replica()
    return replica.record.adapters if replica is not None else ()


def lora(handles: list[int], tokens: list[int], name: str) -> dict[str, Any]:
    keys = [[name] for _ in handles]
    return stored(handles, tokens, lora_id=1, lora_name=name, extra_keys=keys)


async def test_loads_unloads_and_other_weights_are_told_in_one_generation() -> None:
    fleet = Fleet()
    async with AdapterList() as engine, sidecar(settings_for(engine), fleet):
        await eventually(fleet.is_registered)
        engine.adapters = {"sql": "/1", "law": "/1"}
        await eventually(
            lambda: adapters_of(fleet) == (Adapter("law", "law"), Adapter("sql", "sql"))
        )
        await engine.publish(
            lora([1, 2], pages(1, 2), "sql"), lora([3], page(1), "law"), stored([4], page(1))
        )
        await eventually(fleet.holds(pages(1, 2), 2, identity=SQL))
        engine.adapters["sql"] = "/2"
        await eventually(fleet.holds(pages(1, 2), 0, identity=SQL))
        [law, sql] = adapters_of(fleet)
        assert law == Adapter("law", "law")
        assert (sql.name, sql.key != "sql") == ("sql", True)
        assert fleet.blocks(page(1)) == 1
        assert fleet.blocks(page(1), identity=msgspec.structs.replace(IDENTITY, adapter="law")) == 1
        await engine.publish(lora([5], page(1), "sql"))
        anew = msgspec.structs.replace(IDENTITY, adapter=sql.key)
        await eventually(fleet.holds(page(1), 1, identity=anew))
        engine.adapters = {}
        await eventually(lambda: adapters_of(fleet) == ())
        assert len(fleet.generations) == 1


async def test_a_sidecar_that_comes_late_tells_of_adapters_at_once() -> None:
    fleet = Fleet()
    async with AdapterList() as engine:
        engine.adapters = {"sql": "/1"}
        engine.lose(lora([1, 2], pages(1, 2), "sql"))
        async with sidecar(settings_for(engine), fleet):
            await eventually(fleet.holds(pages(1, 2), 2, identity=SQL))
            await eventually(lambda: adapters_of(fleet) == (Adapter("sql", "sql"),))
            await engine.restart()
            await eventually(fleet.holds(pages(1, 2), 0, identity=SQL))
            await eventually(lambda: adapters_of(fleet) == (Adapter("sql", "sql"),))


async def test_events_that_name_no_adapter_leave_the_replica_known_by_load() -> None:
    """B16: SGLang's do not; while it has adapters, no page is said to be the base's."""
    fleet = Fleet()
    async with AdapterList(owner="sglang") as engine, sidecar(settings_for(engine), fleet):
        await eventually(fleet.is_registered)
        await engine.publish(stored([1], page(1)))
        await eventually(fleet.holds(page(1), 1))
        engine.adapters = {"sql": "/1"}
        await eventually(
            lambda: (state := fleet.replica()) is not None and not state.record.has_events
        )
        await eventually(fleet.holds(page(1), 0))
        await eventually(lambda: adapters_of(fleet) == (Adapter("sql", "sql"),))
        engine.adapters = {}
        await eventually(lambda: (state := fleet.replica()) is not None and state.record.has_events)
        await eventually(fleet.holds(page(1), 1))
