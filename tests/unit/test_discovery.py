"""What sources tell, without any source: lists, slices of pods, and one replica for one address."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.config import ConfigError, StaticReplica, decode_config
from router.discovery.directory import Bouncer, Directory, found_member
from router.discovery.dns import split_server
from router.discovery.file import members_of
from router.discovery.slice import EndpointSlice, Pod, pods_of
from router.endpoint import Endpoint
from router.fleet import ASSUMED_CAPACITY_TOKENS, FleetTable, Member
from router.registration_setting import RegistrationSettings
from state.memory import MemoryState
from state.model import Generation, ModelIdentity, ReplicaId, ReplicaRecord, RouterId
from support.kube_server import endpoint, endpoint_slice


def member(name: str, port: int = 8000, *, is_draining: bool = False) -> Member:
    at = Endpoint("10.0.0.1", port)
    return found_member(ReplicaId(name), at, "dns", is_draining=is_draining)


def record(name: str, endpoint_url: str) -> ReplicaRecord:
    return ReplicaRecord(
        replica=ReplicaId(name),
        endpoint=endpoint_url,
        generation=Generation("g"),
        identity=ModelIdentity(model="m"),
        page_tokens=16,
        sidecar=name,
    )


def read(*told: dict[str, Any]) -> list[EndpointSlice]:
    return [msgspec.convert(one, EndpointSlice) for one in told]


# Lists.


def test_nobody_is_believed_only_at_the_second_look() -> None:
    adopted: list[tuple[Member, ...]] = []
    shelf = Directory(2, adopted.append).shelf("a")
    assert shelf.put([member("r")])
    assert not shelf.put([])
    assert adopted == [(member("r"),)]
    assert shelf.put([])
    assert adopted[-1] == ()


def test_an_answer_with_somebody_or_a_fault_starts_the_looks_again() -> None:
    adopted: list[tuple[Member, ...]] = []
    shelf = Directory(2, adopted.append).shelf("a")
    shelf.put([member("r")])
    shelf.put([])
    shelf.put([member("r")])
    assert not shelf.put([])
    shelf.fail("away")
    assert not shelf.put([])
    assert adopted == [(member("r"),)]


def test_one_empty_look_is_enough_where_the_settings_say_so() -> None:
    shelf = Directory(1, lambda _: None).shelf("a")
    shelf.put([member("r")])
    assert shelf.put([])
    assert shelf.members == ()


def test_a_source_that_is_lost_keeps_its_list_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shelf = Directory(2, lambda _: None).shelf("a file")
    shelf.put([member("r")])
    for _ in range(3):
        shelf.fail("away")
    assert shelf.members == (member("r"),)
    assert [one.message for one in caplog.records] == ["a file: away; 1 replicas are kept"]
    shelf.put([member("r")])
    assert shelf.fault is None


def test_nothing_is_told_where_nothing_changed() -> None:
    adopted: list[tuple[Member, ...]] = []
    shelf = Directory(2, adopted.append).shelf("a")
    shelf.put([member("r")])
    shelf.put([member("r")])
    assert len(adopted) == 1


def test_what_all_sources_found_is_taken_together() -> None:
    adopted: list[tuple[Member, ...]] = []
    directory = Directory(2, adopted.append)
    first, second = directory.shelf("a"), directory.shelf("b")
    second.put([member("b", 2)])
    first.put([member("a", 1)])
    assert adopted[-1] == (member("a", 1), member("b", 2))


def test_the_sources_and_the_lost_ones_among_them_are_counted() -> None:
    directory = Directory(2, lambda _: None)
    directory.shelf("a").fail("away")
    directory.shelf("b").put([member("r")])
    counted = {family.name: family.samples[0].value for family in directory.collect()}
    assert counted == {"warmroute_discovery_sources": 2, "warmroute_discovery_lost_sources": 1}


# One address is one replica.


async def test_one_address_is_one_replica_whoever_tells_of_it() -> None:
    """Registered wins, then what is configured, then what was found first."""
    state = MemoryState(clock=lambda: 0.0)
    own = (StaticReplica(url="http://10.0.0.1:2", name="own"),)
    table = FleetTable(state.reader(RouterId("me")), own)
    await state.register(record("known", "http://10.0.0.1:1"))
    table.adopt((member("f1", 1), member("f2", 2), member("f3", 3), member("again", 3)))
    seen = table.members()
    assert {name: one.source for name, one in seen.items()} == {
        "known": "registered",
        "own": "configured",
        "f3": "dns",
    }
    table.adopt(())
    assert list(table.members()) == ["known", "own"]


async def test_a_registered_replica_known_by_its_name_is_the_one_at_that_address() -> None:
    state = MemoryState(clock=lambda: 0.0)
    table = FleetTable(state.reader(RouterId("me")), ())

    async def look_up(_: str) -> list[str]:
        return ["10.0.0.1"]

    table.registration._look_up = look_up
    await state.register(record("known", "http://engine.example:8000"))
    table.members()
    await table.registration.look_up_due(0.0)
    table.adopt((member("found", 8000),))
    assert list(table.members()) == ["known"]


async def test_a_replica_that_a_source_drains_drains_though_its_sidecar_does_not_know() -> None:
    state = MemoryState(clock=lambda: 0.0)
    table = FleetTable(state.reader(RouterId("me")), ())
    await state.register(record("known", "http://10.0.0.1:1"))
    assert not table.members()[ReplicaId("known")].is_draining
    table.adopt((member("pod", 1, is_draining=True),))
    assert table.members()[ReplicaId("known")].is_draining
    table.adopt((member("pod", 1),))
    assert not table.members()[ReplicaId("known")].is_draining


# A file's text.


def test_a_file_lists_replicas_as_the_configuration_does() -> None:
    text = (
        "- url: http://10.0.0.1:8000\n  name: a\n  kv_capacity_tokens: 7\n- url: unix:/run/e.sock"
    )
    first, second = members_of(text)
    assert (first.replica, first.endpoint.url) == ("a", "http://10.0.0.1:8000")
    assert (first.capacity_tokens, first.source) == (7, "file")
    assert (second.replica, second.capacity_tokens) == ("run.e.sock", ASSUMED_CAPACITY_TOKENS)
    assert members_of('[{"url": "http://10.0.0.1:8000", "name": "a"}]')[0].replica == "a"
    assert members_of("[]") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a list"),
        ("replicas: []", "expected a list"),
        ("- url: [", "not YAML"),
        ("- name: a", r"\[0\].*url"),
        ("- url: http://a:1\n  size: 3", r"\[0\].*size"),
        ("- url: http://a:1\n- url: ftp://b:1", r"\[1\].url"),
        ("- url: http://a:1\n- url: http://a:1", r"\[1\].*twice"),
    ],
)
def test_a_file_with_a_fault_anywhere_is_no_list(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        members_of(text)


# Slices.


def test_a_pod_that_terminates_or_is_not_ready_is_drained() -> None:
    told = endpoint_slice(
        "s",
        endpoint("a", "10.0.0.1"),
        endpoint("b", "10.0.0.2", ready=False, terminating=True),
        endpoint("c", "10.0.0.3", ready=False, serving=False),
        endpoint("d", "10.0.0.4", ready=True, terminating=True),
        {"addresses": ["10.0.0.5"]},
    )
    assert [(pod.name, pod.is_draining) for pod in pods_of(read(told), "http")] == [
        ("", False),
        ("a", False),
        ("b", True),
        ("c", True),
        ("d", True),
    ]


def test_a_pod_in_two_slices_is_one_by_its_ipv4_address() -> None:
    pods = pods_of(
        read(
            endpoint_slice("v6", endpoint("a", "fd00::1"), family="IPv6"),
            endpoint_slice("v4", endpoint("a", "10.0.0.1")),
            endpoint_slice("only6", endpoint("b", "fd00::2"), family="IPv6"),
            endpoint_slice("names", endpoint("c", "c.example"), family="FQDN"),
        ),
        "http",
    )
    assert pods == [Pod("a", "10.0.0.1", 8000), Pod("b", "fd00::2", 8000)]


def test_a_pod_that_moves_between_slices_is_what_the_better_one_says() -> None:
    old = endpoint_slice("a", endpoint("p", "10.0.0.1", ready=False))
    new = endpoint_slice("b", endpoint("p", "10.0.0.1"))
    assert pods_of(read(old, new), 8000) == [Pod("p", "10.0.0.1", 8000)]
    assert pods_of(read(new, old), 8000) == [Pod("p", "10.0.0.1", 8000)]


@pytest.mark.parametrize(("wanted", "port"), [("http", 8001), (None, 9100), (7, 7)])
def test_a_port_is_named_or_told_or_the_first_one(wanted: str | int | None, port: int) -> None:
    told = read(endpoint_slice("a", endpoint("p", "10.0.0.1"), port=8001))
    assert pods_of(told, wanted)[0].port == port
    assert pods_of(told, "none-such") == []


def test_a_slice_without_endpoints_and_ports_is_nobody() -> None:
    told = endpoint_slice("a") | {"endpoints": None, "ports": None}
    assert pods_of(read(told), "http") == []


# What is dialled.


@pytest.mark.parametrize("host", ["169.254.169.254", "0.0.0.0", "ff02::1", "a.example", "127.1"])  # noqa: S104 - refused here
def test_an_address_that_no_replica_has_is_not_taken_from_a_network_service(host: str) -> None:
    assert not Bouncer(RegistrationSettings()).admits(Endpoint(host, 80))


def test_the_networks_and_ports_of_registration_hold_for_found_replicas() -> None:
    bouncer = Bouncer(RegistrationSettings(networks=("10.0.0.0/8",), ports=(8000,)))
    assert bouncer.admits(Endpoint("10.0.0.1", 8000))
    assert not bouncer.admits(Endpoint("10.0.0.1", 8001))
    assert not bouncer.admits(Endpoint("192.168.0.1", 8000))


# Settings.


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"dns": [{"name": "a b"}]}, r"discovery.dns\[0\].name"),
        ({"dns": [{"name": "a.example", "port": 0}]}, r"discovery.dns\[0\].port"),
        ({"dns": [{"name": "a.example", "servers": ["dns.example"]}]}, r"discovery.dns\[0\].serv"),
        ({"kubernetes": {}}, "discovery.kubernetes"),
        ({"kubernetes": {"service": "A/b"}}, "discovery.kubernetes.service"),
        ({"kubernetes": {"service": "a", "api_server": "kube"}}, "discovery.kubernetes.api_server"),
        ({"empty_looks": 0}, "discovery.empty_looks"),
        ({"consul": "x"}, "discovery"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        decode_config({"discovery": settings})


@pytest.mark.parametrize(
    ("told", "server"),
    [
        ("10.0.0.2", ("10.0.0.2", 53)),
        ("10.0.0.2:5353", ("10.0.0.2", 5353)),
        ("::1", ("::1", 53)),
        ("[::1]:5353", ("::1", 5353)),
        ("[::1]", ("::1", 53)),
    ],
)
def test_a_name_server_is_an_address_with_a_port_or_without(
    told: str, server: tuple[str, int]
) -> None:
    assert split_server(told) == server
