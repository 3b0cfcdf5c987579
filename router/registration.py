"""Which replicas of the registry a router takes: what it connects to, others may have written.

An address is taken in its one plain form, and where no replica can be, none is dialled: a cloud's
metadata service least of all. A host name is looked up once for each life of a replica; every
address that it has must be one that may be dialled, and the first is dialled from then on, whatever
the name says later.
"""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Final

from msgspec import structs

from router.endpoint import Endpoint
from router.names import Names
from router.registration_setting import RegistrationSettings, port_range

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

    from state.model import Generation, ReplicaId, ReplicaRecord, ReplicaState

    Address = IPv4Address | IPv6Address
    LookUp = Callable[[str], Awaitable[Iterable[str]]]

_log = logging.getLogger(__name__)

MAX_REPLICAS: Final = 1_000
"""Registered replicas that a router takes; of more, those that it knew first, then by name."""
MAX_MODEL_CHARS: Final = 256
MAX_GENERATION_CHARS: Final = 128
LOOK_UP_S: Final = 5.0
TICK_S: Final = 0.1
AGAIN_S: Final = (1.0, 30.0)
"""After a name was not found: the first pause, doubled up to the last one."""
AT_ONCE: Final = 16
METADATA: Final = frozenset(
    map(
        ip_address,
        (
            *("169.254.169.254", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
            *("fd00:ec2::254", "fd20:ce::254"),
        ),
    )
)
"""Where clouds tell a machine its secrets."""
_DISGUISES: Final = tuple(
    map(
        ip_network,
        ("::ffff:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"),
    )
)
"""IPv6 addresses that lead to an IPv4 address inside of them."""
_LOOPBACK: Final = ip_address("::1")
_NUMERIC: Final = re.compile(r"(?:.*\.)?(?:[0-9]+|0[xX][0-9A-Fa-f]*)\.?")
"""What resolvers read as an IPv4 address, in whichever of its spellings."""
_NO_ADDRESS: Final = re.compile(r"[^!-~]|[?#@\\]")
"""Readers of URLs skip some of these, or read on behind them."""


def literal(host: str) -> Address | None:
    """Return the address that ``host`` is, None for a name; raises ValueError for neither.

    ``2130706433``, ``127.1``, ``0x7f.1`` and the like are neither: their readers disagree.
    """
    if ":" in host:
        if "%" in host:
            message = "an address with a zone"
            raise ValueError(message)
        return IPv6Address(host)
    return IPv4Address(host) if _NUMERIC.fullmatch(host) else None


def is_possible(address: Address) -> bool:
    """Return whether a replica may be at ``address`` where the operator says nothing of it."""
    if address == _LOOPBACK:
        return True
    if isinstance(address, IPv6Address) and any(address in network for network in _DISGUISES):
        return False
    is_special = address.is_link_local or address.is_multicast or address.is_unspecified
    return not (is_special or address.is_reserved or address in METADATA)


class AddressRule:
    """Decides which addresses and ports may be dialled."""

    def __init__(self, settings: RegistrationSettings = RegistrationSettings()) -> None:  # noqa: B008 - a frozen value
        self._networks = tuple(map(ip_network, settings.networks))
        self._ports = tuple(filter(None, map(port_range, settings.ports)))

    def allows(self, address: Address) -> bool:
        """Return whether ``address`` may be dialled."""
        if not self._networks:
            return is_possible(address)
        is_never = address in METADATA or address.is_multicast or address.is_unspecified
        return not is_never and any(address in network for network in self._networks)

    def allows_port(self, port: int) -> bool:
        """Return whether ``port`` may be dialled."""
        return not self._ports or any(port in ports for ports in self._ports)


@dataclass(slots=True)
class _Name:
    """A host name of one life of a replica; ``address`` is what it was found to be."""

    host: str
    generation: Generation
    address: str | None = None
    is_refused: bool = False
    due_s: float = 0.0
    pause_s: float = AGAIN_S[0]


class Registration:
    """Turns records into endpoints; looks names up in the background (``run``).

    ``own`` are the endpoints that the operator configured: they are dialled as they are.
    """

    def __init__(
        self,
        settings: RegistrationSettings = RegistrationSettings(),  # noqa: B008 - a frozen value
        own: Iterable[Endpoint] = (),
        look_up: LookUp | None = None,
    ) -> None:
        self._rule = AddressRule(settings)
        self._own = frozenset(own)
        self._known: dict[ReplicaId, tuple[ReplicaRecord, Endpoint]] = {}
        self._look_up = look_up or Names().addresses
        self._names: dict[ReplicaId, _Name] = {}
        self.on_found: Callable[[], None] = lambda: None
        """Called when a name was looked up: the fleet may have a member more."""

    def endpoint(self, record: ReplicaRecord) -> Endpoint | None:
        """Return where the replica is dialled; None where its name is not looked up yet.

        Raises ValueError for a record that makes no replica.
        """
        known = self._known.get(record.replica)
        if known is not None and known[0] is record:
            return known[1]
        endpoint = checked(record, self._rule, self._own)
        if endpoint not in self._own and literal(endpoint.host) is None:
            named = self._named(record, endpoint)
            if named is None:
                return None
            endpoint = named
        self._known[record.replica] = (record, endpoint)
        return endpoint

    def _named(self, record: ReplicaRecord, endpoint: Endpoint) -> Endpoint | None:
        name = self._names.get(record.replica)
        if name is None or (name.host, name.generation) != (endpoint.host, record.generation):
            name = self._names[record.replica] = _Name(endpoint.host, record.generation)
        if name.is_refused:
            message = "a name with an address that is not dialled"
            raise ValueError(message)
        if name.address is None:
            return None
        return structs.replace(endpoint, address=name.address)

    def taken(
        self, registered: Mapping[ReplicaId, ReplicaState], known: Iterable[ReplicaId]
    ) -> list[ReplicaId]:
        """Return the names of the replicas that are looked at, sorted."""
        for kept in (self._names, self._known):
            for replica in kept.keys() - registered.keys():
                del kept[replica]
        if len(registered) <= MAX_REPLICAS:
            return sorted(registered)
        first = [replica for replica in known if replica in registered]
        others = sorted(registered.keys() - set(first))
        return sorted([*first, *others][:MAX_REPLICAS])

    async def run(self) -> None:
        """Look up names until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.look_up_due(asyncio.get_running_loop().time())

    async def look_up_due(self, now_s: float) -> None:
        """Look up the names whose turn it is, some at once."""
        due = [n for n in self._names.values() if n.address is None and n.due_s <= now_s]
        waiting = [name for name in due if not name.is_refused][:AT_ONCE]
        if waiting:
            await asyncio.gather(*(self._look_up_one(name, now_s) for name in waiting))
            self.on_found()

    async def _look_up_one(self, name: _Name, now_s: float) -> None:
        try:
            async with asyncio.timeout(LOOK_UP_S):
                found = [ip_address(told) for told in await self._look_up(name.host)]
        except (OSError, ValueError, TimeoutError):
            found = []
        if found and all(map(self._rule.allows, found)):
            name.address = str(found[0])
        elif found:
            name.is_refused = True
        else:
            name.due_s = now_s + name.pause_s
            name.pause_s = min(2 * name.pause_s, AGAIN_S[1])
            _log.info("the name of a replica was not found; it is looked up again")


def checked(record: ReplicaRecord, rule: AddressRule, own: Collection[Endpoint] = ()) -> Endpoint:
    """Return the endpoint that ``record`` names, unless it is none that may be dialled.

    Raises ValueError. What a host name stands for is not known here.
    """
    _check_words(record)
    if _NO_ADDRESS.search(record.endpoint):
        message = "an address with more than a host and a port"
        raise ValueError(message)
    endpoint = Endpoint.parse(record.endpoint)
    if "[" in record.endpoint and ":" not in endpoint.host:
        message = "brackets around no address"
        raise ValueError(message)
    if endpoint in own:
        return endpoint
    if not rule.allows_port(endpoint.port):
        message = "a port outside of registration.ports"
        raise ValueError(message)
    address = literal(endpoint.host)
    if address is not None and not rule.allows(address):
        message = "an address that is not dialled"
        raise ValueError(message)
    return endpoint


def _check_words(record: ReplicaRecord) -> None:
    """Raise ValueError for texts that must not get into a log, a page or a head."""
    for text, most in (
        (record.identity.model, MAX_MODEL_CHARS),
        (record.generation, MAX_GENERATION_CHARS),
    ):
        if not text.isprintable() or len(text) > most:
            message = "a text that is not printable, or too long"
            raise ValueError(message)
