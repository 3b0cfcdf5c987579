"""Replicas behind a name: its A and AAAA records with a given port, or its SRV records.

The answer is taken as a whole: where one of several questions is not answered, nothing is changed.
The resolver is dnspython's, because the host's own tells no time to live and knows no SRV.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import dns.asyncresolver
import dns.exception
import dns.name
import dns.rdatatype
import dns.resolver

from router.discovery.directory import found_member
from router.endpoint import Endpoint
from state.model import ReplicaId

if TYPE_CHECKING:
    from dns.rdatatype import RdataType

    from router.discovery.directory import Bouncer, Shelf
    from router.discovery.setting import DnsSource

SOURCE: Final = "dns"
LEAST_S: Final = 1.0
"""The least time between two looks, whatever the time to live is."""
MOST_REPLICAS: Final = 1_000
ADDRESSES: Final = (dns.rdatatype.A, dns.rdatatype.AAAA)


def open_resolver(settings: DnsSource) -> dns.asyncresolver.Resolver:
    """Return the resolver of a source; raises ValueError for servers that are none."""
    resolver = dns.asyncresolver.Resolver(configure=not settings.servers)
    if settings.servers:
        hosts = [split_server(server) for server in settings.servers]
        resolver.nameservers = [host for host, _ in hosts]
        resolver.nameserver_ports = dict(hosts)
    resolver.lifetime = settings.timeout_s
    resolver.timeout = min(2.0, settings.timeout_s / 2)
    return resolver


def split_server(server: str) -> tuple[str, int]:
    """Return address and port of ``10.0.0.2``, ``10.0.0.2:5353`` or ``[::1]:5353``."""
    host, _, port = server.rpartition(":")
    if not port.isdecimal() or (":" in host and not host.endswith("]")):
        return server.strip("[]"), 53
    return host.strip("[]"), int(port)


class DnsWatch:
    """Looks a name up again and again. The members are named by their addresses."""

    def __init__(self, settings: DnsSource, shelf: Shelf, bouncer: Bouncer) -> None:
        self._settings = settings
        self._shelf = shelf
        self._bouncer = bouncer
        self._resolver: dns.asyncresolver.Resolver | None = None

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            pause_s = await self.look()
            await asyncio.sleep(pause_s)

    async def look(self) -> float:
        """Look once; return the seconds until the next look."""
        settings = self._settings
        try:
            if self._resolver is None:
                self._resolver = open_resolver(settings)
            found, ttl_s = await self._found(self._resolver)
        except (dns.exception.DNSException, OSError, ValueError) as error:
            # What a resolver's configuration said may be what is wrong.
            self._resolver = None
            self._shelf.fail(f"{settings.name} was not looked up: {type(error).__name__}")
            return min(LEAST_S * 2, settings.interval_s)
        members = [
            found_member(ReplicaId(endpoint.name), endpoint, SOURCE)
            for endpoint in sorted(found, key=lambda each: each.url)[:MOST_REPLICAS]
            if self._bouncer.admits(endpoint)
        ]
        if not self._shelf.put(members):
            return min(LEAST_S, settings.interval_s)
        return min(max(LEAST_S, ttl_s), settings.interval_s)

    async def _found(self, resolver: dns.asyncresolver.Resolver) -> tuple[set[Endpoint], float]:
        """Return the endpoints, and for how long the answer holds; raises DNSException."""
        settings, is_tls = self._settings, self._settings.scheme == "https"
        name, ttl_s = dns.name.from_text(settings.name, None), settings.interval_s
        targets = [(name, settings.port)]
        if settings.port is None:
            records, ttl_s = await _asked(resolver, name, dns.rdatatype.SRV, ttl_s)
            targets = [(one.target, one.port) for one in records if one.target != dns.name.root]
        found: set[Endpoint] = set()
        for target, port in targets[:MOST_REPLICAS]:
            for kind in ADDRESSES:
                records, ttl_s = await _asked(resolver, target, kind, ttl_s)
                found.update(Endpoint(one.address, port or 0, is_tls) for one in records)
        return found, ttl_s


async def _asked(
    resolver: dns.asyncresolver.Resolver, name: dns.name.Name, kind: RdataType, ttl_s: float
) -> tuple[list[Any], float]:
    """Return the records of one kind, none where there are none, and the lesser time to live."""
    try:
        answer = await resolver.resolve(name, kind, search=True)
    except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
        return [], ttl_s
    return list(answer), min(ttl_s, answer.chaining_result.minimum_ttl)
