"""Adapters: what a list of models tells of them, and what chains start from for each."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.adapter import Adapters, AdapterSettings, announced_of
from router.config import ConfigError, StaticReplica, decode_config
from router.fleet import FleetTable, registered_member
from router.health import Health
from router.health_setting import HealthSettings
from router.upstream import UpstreamPool, UpstreamSettings
from sidecar.adapter import KNOWN_NAMES, AdapterBook, has_nameless_pages
from sidecar.event import RemovedPages, StoredPages
from sidecar.fold import PageFolder
from sidecar.scrape import ModelCard
from state.memory import MemoryState
from state.model import (
    MAX_ADAPTERS,
    Adapter,
    Generation,
    ModelIdentity,
    ReplicaId,
    ReplicaRecord,
    ReplicaState,
    RouterId,
    Tier,
)
from state.prefix import chain_of, chain_root, namespace_of, pack_tokens
from state.schema import decode_record, encode_record
from support.choosing import Choosing, prompt_for
from support.sidecar import eventually

BASE = ModelIdentity(model="m", block_tokens=4)


def card(name: str, root: str | None = None, owned_by: str | None = None) -> ModelCard:
    return ModelCard(name, parent="m", root=root, owned_by=owned_by)


def listed(book: AdapterBook) -> list[tuple[str, str]]:
    return [(adapter.name, adapter.key) for adapter in book.listed]


def record(name: str, *adapters: Adapter, model: str = "m") -> ReplicaRecord:
    return ReplicaRecord(
        replica=ReplicaId(name),
        endpoint=f"http://127.0.0.1:{ord(name)}",
        generation=Generation("g"),
        identity=msgspec.structs.replace(BASE, model=model),
        page_tokens=4,
        sidecar="s",
        adapters=adapters,
    )


def test_a_name_is_its_own_key_until_its_weights_change() -> None:
    book = AdapterBook()
    assert book.look([ModelCard("m"), card("a", "/1"), card("b", "/1")]) == []
    assert listed(book) == [("a", "a"), ("b", "b")]
    assert book.look([ModelCard("m"), card("b", "/1"), card("a", "/2")]) == ["a"]
    first = dict(book.keys)
    assert set(first) == {"a"}
    assert first["a"] not in {"a", "b"}
    assert book.look([card("a", "/2")]) == []
    assert listed(book) == [("a", first["a"])]
    assert book.look([card("a", "/1")]) == ["a"]
    assert book.keys["a"] not in {"a", first["a"]}


def test_a_name_that_comes_back_with_other_weights_is_void_too() -> None:
    book = AdapterBook()
    book.look([card("a", "/1")])
    book.look([])
    assert listed(book) == []
    assert book.look([card("a", "/2")]) == ["a"]


def test_the_key_of_one_adapter_is_never_the_name_of_another() -> None:
    """F10: whatever an adapter is called."""
    book = AdapterBook()
    book.look([card("a", "/1")])
    book.look([card("a", "/2")])
    twin = book.keys["a"]
    assert book.look([card("a", "/2"), card(twin, "/1")]) == []
    assert [adapter.name for adapter in book.listed] == ["a"]
    assert book.left_out == 1


@pytest.mark.parametrize("name", ["", "a\n", "x" * 513, "\x1b[2J"])
def test_a_name_that_cannot_be_shown_is_left_out(name: str) -> None:
    book = AdapterBook()
    book.look([card(name), card("a")])
    assert listed(book) == [("a", "a")]


def test_adapters_that_come_and_go_leave_nothing() -> None:
    """B52: 10,000 names, each listed once; and a name that is forgotten is void."""
    book = AdapterBook()
    book.look([card("first", "/1")])
    book.look([card("first", "/2")])
    void = []
    for number in range(10_000):
        void += book.look([card(f"a{number}", "/1")])
    assert void == ["first"]
    assert book.keys == {}
    assert len(book._weights) <= KNOWN_NAMES


def test_an_engine_with_more_adapters_than_routers_are_told_of_is_cut() -> None:
    book = AdapterBook()
    book.look([card(f"a{number}") for number in range(MAX_ADAPTERS + 7)])
    assert (len(book.listed), book.left_out) == (MAX_ADAPTERS, 7)
    told = record("r", *book.listed)
    assert decode_record(encode_record(told), told.replica) == told


def test_events_that_name_no_adapter_are_those_of_nobody() -> None:
    """B16: SGLang's pages of an adapter look like those of its base."""
    assert has_nameless_pages([ModelCard("m", owned_by="sglang"), card("a", owned_by="sglang")])
    assert not has_nameless_pages([ModelCard("m", owned_by="sglang")])
    assert not has_nameless_pages([ModelCard("m", owned_by="vllm"), card("a", owned_by="vllm")])


def store(handles: list[int], tokens: list[int], adapter: str, **fields: object) -> StoredPages:
    event = StoredPages(
        handles=tuple(handles),
        parent=None,
        packed_tokens=pack_tokens(tokens),
        page_tokens=4,
        adapter=adapter,
    )
    return msgspec.structs.replace(event, **fields)


def blocks_of(folder: PageFolder, key: str) -> dict[str, int]:
    namespace = namespace_of(msgspec.structs.replace(BASE, adapter=key))
    return {
        tier.value: len(blocks)
        for (found, tier), blocks in folder.resident().items()
        if found == namespace
    }


def test_pages_of_other_weights_are_indexed_no_more_and_their_children_neither() -> None:
    book = AdapterBook()
    book.look([card("a", "/1"), card("b", "/1")])
    folder = PageFolder(BASE, 4, adapter_keys=book.keys)
    tokens = list(range(8))
    folder.apply([store([1, 2], tokens, "a"), store([3], tokens[:4], "b"), store([4], [9] * 4, "")])
    folder.apply([store([1], tokens[:4], "a", tier=Tier.HOST)])
    [void] = book.look([card("a", "/2"), card("b", "/1")])
    fold = folder.drop_adapter(void)
    assert sorted((change.tier, len(change.removed)) for change in fold.changes) == [
        (Tier.GPU, 2),
        (Tier.HOST, 1),
    ]
    assert all(not change.stored for change in fold.changes)
    assert blocks_of(folder, "a") == {}
    assert blocks_of(folder, "b") == {"gpu": 1}
    assert blocks_of(folder, "") == {"gpu": 1}
    child = folder.apply([store([5], [7] * 4, "a", parent=2)])
    assert child.changes == ()
    assert folder.held_pages() == 5
    gone = folder.apply([RemovedPages(handles=(1, 2, 5))])
    assert gone.changes == ()
    assert folder.held_pages() == 2
    fold = folder.apply([store([6, 7], tokens, "a")])
    own = msgspec.structs.replace(BASE, adapter=book.keys["a"])
    chain = chain_of(chain_root(own, 0), pack_tokens(tokens), 4, 0)
    assert [change.stored for change in fold.changes] == [chain]


def test_a_name_that_several_bases_have_is_read_by_none() -> None:
    adapters = Adapters()
    one, two = (record(name, Adapter("a", "a"), model=f"m{name}") for name in "xy")
    members = [registered_member(ReplicaState(record=each), adapters) for each in (one, two)]
    known = [member for member in members if member is not None]
    adapters.settle(known[:1])
    assert adapters.base_of("a") == "mx"
    adapters.settle(known)
    assert adapters.base_of("a") is None
    assert adapters.base_of("b") is None


def test_what_is_made_of_a_record_is_made_once_and_forgotten_with_it() -> None:
    """B52: loads come every second, adapters hardly ever."""
    adapters = Adapters()
    told = record("x", Adapter("a", "a\0001"))
    made = adapters.of(told)
    assert made == {"a": msgspec.structs.replace(BASE, adapter="a\0001")}
    assert adapters.of(told) is made
    assert adapters.of(record("x")) == {}
    assert adapters.of(told) is not made
    adapters.settle([])
    assert adapters._known == {}


def test_a_pattern_stands_for_what_begins_like_it() -> None:
    exact, prefix = AdapterSettings(name="a", base="m"), AdapterSettings(name="team-*", base="n")
    adapters = Adapters([exact, prefix])
    asked = ("a", "ab", "team-", "team-x", "tea", "m")
    assert [adapters.loadable_base(model) for model in asked] == ["m", None, "n", "n", None, None]
    everything = Adapters([AdapterSettings(name="*", base="m")])
    assert [everything.loadable_base(model) for model in ("m", "x")] == [None, "m"]


class Up:
    """Every replica is up and lists nothing."""

    def is_up(self, replica: ReplicaId) -> bool:
        del replica
        return True

    def served_models(self, replica: ReplicaId) -> frozenset[str]:
        del replica
        return frozenset()


async def test_only_replicas_that_have_it_are_asked_and_others_only_if_they_may_load_it() -> None:
    state = MemoryState(clock=lambda: 100.0)
    for each in (record("x", Adapter("a", "a")), record("y"), record("z", model="other")):
        await state.register(each)
    reader = state.reader(RouterId("me"))
    plain, loading = (
        FleetTable(reader, (), settings)
        for settings in ((), (AdapterSettings(name="a", base="m"),))
    )

    def names(fleet: FleetTable, model: str, tried: tuple[str, ...] = ()) -> list[str]:
        gone = {ReplicaId(name) for name in tried}
        return [member.replica for member in fleet.candidates(model, Up(), gone)]

    assert names(plain, "a") == names(loading, "a") == ["x"]
    assert names(plain, "a", ("x",)) == []
    assert names(loading, "a", ("x",)) == ["y"]
    assert names(loading, "b") == []
    assert plain.models(Up()) == {"m", "other", "a"}


async def test_an_adapter_that_is_not_loaded_yet_has_no_part_in_its_bases_prefix() -> None:
    """A69: nor has one that is loaded; and an alias of the base has all of it."""
    state = MemoryState(clock=lambda: 100.0)
    told = record("x", Adapter("a", "a\0001"))
    await state.register(told)
    fleet = FleetTable(state.reader(RouterId("me")), ())
    member = fleet.members()[told.replica]
    chooser = Choosing(state.reader(RouterId("me"))).chooser
    for model, is_loadable, adapter in (
        ("m", False, ""),
        ("m", True, ""),
        ("a", False, "a\0001"),
        ("a", True, "a\0001"),
        ("b", True, "b"),
        ("alias", False, ""),
    ):
        prompt = msgspec.structs.replace(prompt_for(range(8)), model=model)
        routed = chooser.route(prompt)
        routed.is_loadable = is_loadable
        identity = announced_of(routed, member)
        assert identity == msgspec.structs.replace(BASE, adapter=adapter)


@pytest.mark.parametrize(
    ("adapters", "field"),
    [
        ([{"name": "a"}], "base"),
        ([{"name": "", "base": "m"}], r"adapters\[0\].name"),
        ([{"name": "a", "base": "m", "path": "/x"}], "path"),
    ],
)
def test_a_wrong_adapter_in_the_configuration_is_named(
    adapters: list[dict[str, str]], field: str
) -> None:
    with pytest.raises(ConfigError, match=field):
        decode_config({"adapters": adapters})


async def test_a_list_of_models_tells_of_adapters_where_no_sidecar_does() -> None:
    """An unloaded adapter is gone with the next record, not with the next list, 30 s later."""

    async def answer(request: web.Request) -> web.Response:
        del request
        cards = [{"id": "m"}, {"id": "also m", "parent": None}, {"id": "a", "parent": "m"}]
        return web.json_response({"object": "list", "data": cards})

    app = web.Application()
    app.router.add_get("/health", answer)
    app.router.add_get("/v1/models", answer)
    server = TestServer(app)
    await server.start_server()
    url = f"http://127.0.0.1:{server.port}"
    state = MemoryState(clock=lambda: 100.0)
    await state.register(msgspec.structs.replace(record("x"), endpoint=url))
    other = StaticReplica(url=url.replace("127.0.0.1", "localhost"), name="static")
    fleet = FleetTable(state.reader(RouterId("me")), (other,))
    pool = UpstreamPool(UpstreamSettings())
    health = Health(fleet, pool, HealthSettings(), random.Random(1))
    task = asyncio.create_task(health.run())
    try:
        names = [ReplicaId("x"), ReplicaId("static")]
        await eventually(lambda: all(health.served_models(name) for name in names))
        assert health.served_models(names[0]) == {"m", "also m"}
        assert health.served_models(names[1]) == {"m", "also m", "a"}
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await pool.close()
        await server.close()
