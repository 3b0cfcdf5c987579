"""What the registry names is dialled where a replica can be and the operator lets it."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address
from typing import TYPE_CHECKING

import pytest

from router.config import ConfigError, StaticReplica, decode_config
from router.endpoint import Endpoint
from router.fleet import FleetTable
from router.registration import MAX_REPLICAS, AddressRule, Registration, checked, literal
from router.registration_setting import RegistrationSettings
from state.memory import MemoryState
from state.model import Generation, ModelIdentity, ReplicaId, ReplicaRecord, RouterId

if TYPE_CHECKING:
    from collections.abc import Iterable

GPU = ReplicaId("gpu")


def record(
    endpoint: str, name: str = GPU, *, generation: str = "g", model: str = "m"
) -> ReplicaRecord:
    return ReplicaRecord(
        replica=ReplicaId(name),
        endpoint=endpoint,
        generation=Generation(generation),
        identity=ModelIdentity(model=model),
        page_tokens=16,
        sidecar="s",
    )


class Names:
    """A resolver whose answers a test sets."""

    def __init__(self, **known: list[str]) -> None:
        self.known = known
        self.asked: list[str] = []

    async def __call__(self, host: str) -> Iterable[str]:
        self.asked.append(host)
        if host not in self.known:
            raise OSError
        return self.known[host]


@pytest.mark.parametrize(
    "url",
    [
        *(f"http://{host}:80" for host in ("2130706433", "127.1", "0x7f.1", "0x7f000001", "0")),
        *(f"http://{host}:80" for host in ("017700000001", "0177.0.0.1", "127.0.0.01", "1.2.3.4.")),
        *(f"http://{host}:80" for host in ("127.0.0.1.5", "a.0x1", "a.7", "1.2.3.256", "0X7F.1")),
        *(f"http://user{word}@10.0.0.1:80" for word in ("", ":word", ":")),
        *(f"http://10.0.0.1:80{rest}" for rest in ("#f", "#", "?q=1", "?", "/path", "/;", "\\")),
        *(
            "http://10.0.0.1:80 ",
            " http://10.0.0.1:80",
            "http://10.0.\n0.1:80",
            "http://10.0.0.1\t",
        ),
        *("ftp://10.0.0.1:80", "unix:/run/x", "//10.0.0.1:80", "10.0.0.1:80", "http:10.0.0.1", ""),
        *("http://10.0.0.1:0", "http://10.0.0.1:65536", "http://10.0.0.1:-1", "http://10.0.0.1:x"),
        *("http://[fe80::1%25eth0]:80", "http://[::1%lo]:80", "http://[::1", "http://[v1.a]:80"),
        *("http://１０.0.0.1:80", "http://10。0.0.1:80", "http://ⓔxample:80"),  # noqa: RUF001
    ],
)
def test_an_address_in_disguise_makes_no_replica(url: str) -> None:
    """W-02: one plain form only; what readers of URLs and resolvers disagree on is refused."""
    with pytest.raises(ValueError, match=r".+"):
        checked(record(url), AddressRule())


@pytest.mark.parametrize(
    "host",
    [
        *("169.254.169.254", "169.254.0.1", "[fe80::1]", "[fd00:ec2::254]", "[fd20:ce::254]"),
        *("100.100.100.200", "168.63.129.16", "192.0.0.192"),
        *("0.0.0.0", "[::]", "224.0.0.1", "[ff02::1]", "255.255.255.255", "240.0.0.1"),  # noqa: S104
        *("[::ffff:10.0.0.1]", "[::ffff:169.254.169.254]", "[::7f00:1]", "[64:ff9b::a00:1]"),
        *("[2002:a9fe:a9fe::1]", "[2001:0:a9fe:a9fe::1]", "[64:ff9b:1::1]"),
    ],
)
def test_an_address_where_no_replica_is_is_not_dialled(host: str) -> None:
    """C74, W-02, F17: metadata services, unspecified, multicast, and IPv4 inside of IPv6."""
    with pytest.raises(ValueError, match="not dialled"):
        checked(record(f"http://{host}:80"), AddressRule())


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.0.0.7", "100.64.0.1", "8.8.8.8", "[::1]", "[fd00::7]", "[2600::1]"]
)
def test_an_address_where_a_replica_can_be_is_dialled(host: str) -> None:
    endpoint = checked(record(f"https://{host}:8443/"), AddressRule())
    assert endpoint == Endpoint(host.strip("[]"), 8443, is_tls=True)


def test_where_the_operator_names_networks_and_ports_nothing_else_is_dialled() -> None:
    rule = AddressRule(
        RegistrationSettings(
            networks=("10.1.0.0/16", "fe80::/10", "169.254.0.0/16"), ports=(80, "8000-8002")
        )
    )
    for host in ("10.1.2.3", "[fe80::1]", "169.254.7.7"):
        assert checked(record(f"http://{host}:8002"), rule).port == 8002
    for url in ("http://10.2.0.1", "http://[::1]", "http://169.254.169.254", "http://127.0.0.1"):
        with pytest.raises(ValueError, match="not dialled"):
            checked(record(url), rule)
    for port in (81, 7999, 8003):
        with pytest.raises(ValueError, match="port"):
            checked(record(f"http://10.1.2.3:{port}"), rule)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ({"networks": ["10.0.0.1/8"]}, r"registration\.networks\[0\]"),
        ({"networks": ["10.0.0.0/8", "a"]}, r"registration\.networks\[1\]"),
        ({"ports": ["8000-"]}, r"registration\.ports\[0\]"),
        ({"ports": [1, "9-8"]}, r"registration\.ports\[1\]"),
        ({"ports": [0]}, r"registration\.ports\[0\]"),
        ({"ports": ["1-65536"]}, r"registration\.ports\[0\]"),
    ],
)
def test_a_wrong_setting_is_named(setting: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        decode_config({"registration": setting})


@pytest.mark.parametrize(
    "broken",
    [
        record("http://10.0.0.1", model="m\n"),
        record("http://10.0.0.1", model="\u202em"),
        record("http://10.0.0.1", model="m" * 257),
        record("http://10.0.0.1", generation="\x1b[2J"),
        record("http://10.0.0.1", generation="g" * 129),
    ],
)
def test_a_text_that_must_not_reach_a_log_makes_no_replica(broken: ReplicaRecord) -> None:
    """W-04, G-01."""
    with pytest.raises(ValueError, match="printable"):
        checked(broken, AddressRule())


async def test_a_name_is_looked_up_once_and_its_first_address_dialled_from_then_on() -> None:
    """W-02: whoever owns the name cannot lead the router elsewhere later (DNS rebinding)."""
    names = Names(**{"gpu-0.pods": ["10.0.0.7", "10.0.0.8"]})
    registration = Registration(look_up=names)
    told = record("http://gpu-0.pods:8000")
    assert registration.endpoint(told) is None
    await registration.look_up_due(0.0)
    names.known["gpu-0.pods"] = ["169.254.169.254"]
    for _ in range(3):
        await registration.look_up_due(1e9)
        endpoint = registration.endpoint(told)
        assert endpoint is not None
        assert (endpoint.address, endpoint.authority) == ("10.0.0.7", "gpu-0.pods:8000")
    again = record("http://gpu-0.pods:8000", model="other")
    assert registration.endpoint(again) == endpoint
    assert names.asked == ["gpu-0.pods"]


@pytest.mark.parametrize("bad", ["169.254.169.254", "::ffff:10.0.0.1", "fe80::1%eth0"])
async def test_a_name_with_one_address_that_is_not_dialled_is_refused(bad: str) -> None:
    registration = Registration(look_up=Names(a=["10.0.0.7", bad]))
    told = record("http://a:1")
    assert registration.endpoint(told) is None
    await registration.look_up_due(0.0)
    with pytest.raises(ValueError, match="a name with an address"):
        registration.endpoint(told)


async def test_another_life_of_a_replica_is_looked_up_again() -> None:
    """A pod that comes back has another address under its old name."""
    names = Names(a=["10.0.0.7"])
    registration = Registration(look_up=names)
    for generation, address in (("g", "10.0.0.7"), ("h", "10.0.0.9")):
        names.known["a"] = [address]
        told = record("http://a:1", generation=generation)
        assert registration.endpoint(told) is None
        await registration.look_up_due(0.0)
        endpoint = registration.endpoint(told)
        assert endpoint is not None
        assert endpoint.address == address


async def test_a_name_that_is_not_found_is_looked_up_again_after_longer_and_longer() -> None:
    names = Names()
    registration = Registration(look_up=names)
    assert registration.endpoint(record("http://a:1")) is None
    asked_at_s = []
    for now_s in range(100):
        before = len(names.asked)
        await registration.look_up_due(float(now_s))
        asked_at_s += [now_s] * (len(names.asked) - before)
    assert asked_at_s == [0, 1, 3, 7, 15, 31, 61, 91]


async def test_the_fleet_takes_a_named_replica_when_its_name_is_known() -> None:
    state = MemoryState(clock=lambda: 0.0)
    table = FleetTable(state.reader(RouterId("me")), ())
    table.registration = Registration(look_up=Names(a=["10.0.0.7"]))
    table.registration.on_found = table.refresh
    await state.register(record("http://a:1"))
    assert (dict(table.members()), table.unusable) == ({}, frozenset())
    looking = asyncio.create_task(table.registration.run())
    async with asyncio.timeout(20):
        while not table.members():  # noqa: ASYNC110 - observes from outside
            await asyncio.sleep(0.01)
    looking.cancel()
    assert table.members()[GPU].endpoint == Endpoint("a", 1, address="10.0.0.7")


async def test_what_the_operator_configured_is_dialled_as_it_is() -> None:
    """Its own sidecar registers it, too: one replica, by whatever address."""
    state = MemoryState(clock=lambda: 0.0)
    own = (StaticReplica(url="http://engine:8000"), StaticReplica(url="http://169.254.1.1:8000"))
    table = FleetTable(
        state.reader(RouterId("me")), own, registration=RegistrationSettings(ports=(1,))
    )
    for index, one in enumerate(own):
        await state.register(record(one.url, f"r{index}"))
    assert [(name, one.endpoint.address) for name, one in table.members().items()] == [
        ("r0", None),
        ("r1", None),
    ]


async def test_a_flood_of_records_drives_no_known_replica_out_nor_fills_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """W-05: a thousand at most, those first that were there before."""
    state = MemoryState(clock=lambda: 0.0)
    table = FleetTable(state.reader(RouterId("me")), ())
    await state.register(record("http://10.0.0.1", "zz"))
    assert list(table.members()) == ["zz"]
    for index in range(MAX_REPLICAS + 50):
        await state.register(record("http://10.0.0.2", f"a{index:05}"))
    assert len(table.members()) == MAX_REPLICAS
    assert "zz" in table.members()
    assert len(table.unusable) == 51
    assert len(caplog.records) == 11


async def test_a_replica_that_registers_again_and_again_is_looked_up_once_a_round() -> None:
    """W-05: a round reads each record once, however often it was written since."""
    names = Names(a=["10.0.0.7"])
    registration = Registration(look_up=names)
    for index in range(1_000):
        registration.endpoint(record("http://a:1", generation=str(index)))
    await registration.look_up_due(0.0)
    assert names.asked == ["a"]


def test_only_the_one_plain_form_of_an_address_is_one() -> None:
    assert literal("10.0.0.1") == ip_address("10.0.0.1")
    assert literal("::1") == ip_address("::1")
    for name in ("localhost", "gpu-0", "a.b.c", "7.example", "0x7f.example"):
        assert literal(name) is None
