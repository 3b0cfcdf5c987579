"""What sockets tell of their other side, and how they send; unix sockets have no address."""

from __future__ import annotations

import socket
import ssl
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

INET: Final = frozenset({socket.AF_INET, socket.AF_INET6})
_NETWORK_BYTES: Final = 8


def send_at_once(transport: asyncio.BaseTransport) -> None:
    """Let small writes of a TCP connection not wait for acknowledgements."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def peer_address(name: object) -> str | None:
    """Return the address in a socket's peer name: as text, without a zone; None where it has none.

    An IPv4 address that came through an IPv6 socket is told as what it is.
    """
    if not isinstance(name, tuple) or not name:
        return None
    text = str(name[0])
    if ":" not in text:
        return text or None
    text = text.partition("%")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return text if mapped is None else str(mapped)


def network_of(peer: str | None) -> str:
    """Return what an address is counted under: a client has a whole /64 of IPv6."""
    try:
        address = ip_address((peer or "").partition("%")[0])
    except ValueError:
        return peer or ""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return address.packed[:_NETWORK_BYTES].hex()
    return str(address)


def said_farewell(transport: asyncio.Transport) -> bool:
    """Return whether the other side ended TLS itself: anybody on the way can end the TCP below."""
    session = transport.get_extra_info("ssl_object")
    try:
        return session is not None and not session.read(1)
    except ssl.SSLError:  # nothing more came
        return False
