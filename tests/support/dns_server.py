"""A DNS server on loopback, over UDP and TCP, whose answers a test changes while it runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self, cast

import dns.flags
import dns.message
import dns.rcode
import dns.rrset

if TYPE_CHECKING:
    from types import TracebackType


@dataclass(slots=True)
class DnsServer:
    """``records`` by name and kind, each with the texts of its records.

    ``silent`` kinds are not answered, ``truncated`` ones over TCP only; ``rcode`` is the answer to
    everything where it is set. A name without any record does not exist.
    """

    records: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    ttl_s: int = 1
    silent: set[str] = field(default_factory=set)
    truncated: set[str] = field(default_factory=set)
    rcode: dns.rcode.Rcode | None = None
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    port: int = 0
    _tcp: asyncio.Server | None = None
    _udp: asyncio.DatagramTransport | None = None

    @property
    def address(self) -> str:
        """What a source names."""
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._tcp = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._tcp.sockets[0].getsockname()[1]
        self._udp, _ = await loop.create_datagram_endpoint(
            lambda: _Datagrams(self), ("127.0.0.1", self.port)
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._tcp is not None
        assert self._udp is not None
        self._tcp.close()
        self._udp.close()
        await asyncio.sleep(0)

    def answer(self, data: bytes, way: str) -> bytes | None:
        """Return the answer to one question, None for silence."""
        query = dns.message.from_wire(data)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True)
        kind = question.rdtype.name
        self.asked.append((way, name, kind))
        if kind in self.silent:
            return None
        response = dns.message.make_response(query)
        if self.rcode is not None:
            response.set_rcode(self.rcode)
        elif not any(known == name for known, _ in self.records):
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif kind in self.truncated and way == "udp":
            response.flags |= dns.flags.TC
        elif texts := self.records.get((name, kind)):
            answer = dns.rrset.from_text_list(question.name, self.ttl_s, "IN", kind, texts)
            response.answer.append(answer)
        return response.to_wire()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            length = int.from_bytes(await reader.readexactly(2), "big")
            answer = self.answer(await reader.readexactly(length), "tcp")
            if answer is not None:
                writer.write(len(answer).to_bytes(2, "big") + answer)
                await writer.drain()
        finally:
            writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = self._server.answer(data, "udp")
        if answer is not None and self._transport is not None:
            self._transport.sendto(answer, addr)
