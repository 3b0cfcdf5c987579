"""What the supervisor and its processes tell each other, over a pair of sockets.

A message is a MessagePack map behind its length (4 bytes, big-endian). The first one is ``Orders``.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    import socket

_LENGTH: Final = struct.Struct(">I")
MOST_BYTES: Final = 64 << 20


class Orders(Struct, frozen=True, kw_only=True, tag="orders"):
    """What a new process is to be. ``config`` is the whole configuration, as JSON has it.

    ``sockets`` are descriptors that it inherits, ``url`` is where clients reach them. ``folder``
    has the sockets of operators' questions. ``is_successor``: others serve, it may take its time.
    """

    number: int
    config: Any
    sockets: tuple[int, ...]
    url: str
    state_url: str
    folder: str
    is_successor: bool
    log_level: str
    loop: str


class Accept(Struct, frozen=True, tag="accept"):
    """Take connections from these of the inherited sockets, by their places, and from no other."""

    sockets: tuple[int, ...]


class Lead(Struct, frozen=True, tag="lead"):
    """Do from now on what only one process does."""


class End(Struct, frozen=True, tag="end"):
    """End as a router does on SIGTERM, on SIGINT if interactive; at once if it is insisted on."""

    is_interactive: bool = False
    is_insisting: bool = False


class Retire(Struct, frozen=True, tag="retire"):
    """Another process took over: accept nothing more, finish what is open, end."""


class Reload(Struct, frozen=True, tag="reload"):
    """Read certificates again."""


class SidecarEnded(Struct, frozen=True, tag="sidecar_ended"):
    """A sidecar that the process had launched ended."""

    sidecar: int
    status: int


class Ready(Struct, frozen=True, tag="ready"):
    """It answers operators and can accept connections."""


class Leaving(Struct, frozen=True, tag="leaving"):
    """It accepts no connections any more."""


class Relieve(Struct, frozen=True, tag="relieve"):
    """It was told by a signal to end: another process is to take over, or all end."""


class Launch(Struct, frozen=True, tag="launch"):
    """Run a sidecar for ``replica``, in place of one that runs for it; secrets are in neither."""

    sidecar: int
    replica: str
    command: tuple[str, ...]
    environment: dict[str, str]


class Farewell(Struct, frozen=True, tag="farewell"):
    """The last it tells: its metrics and its last seconds, each as the paths for them answer."""

    metrics: bytes
    pulse: bytes


Message: TypeAlias = (
    Orders | Accept | Lead | End | Retire | Reload | SidecarEnded
    | Ready | Leaving | Relieve | Launch | Farewell
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def framed(message: Message) -> bytes:
    """Return the bytes of one message."""
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


def receive_orders(control: socket.socket) -> Orders:
    """Return the first message, waiting for it; raises EOFError where none comes."""
    (length,) = _LENGTH.unpack(_exactly(control, _LENGTH.size))
    message = _decoder.decode(_exactly(control, length))
    if not isinstance(message, Orders):
        text = f"expected orders first, got {type(message).__name__}"
        raise EOFError(text)  # noqa: TRY004 - of the channel, not of an argument
    return message


def _exactly(control: socket.socket, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        data = control.recv(length - len(found))
        if not data:
            message = "the supervisor is gone"
            raise EOFError(message)
        found += data
    return bytes(found)


class Channel:
    """One end of the pair, from when ``open`` was awaited; messages are sent without waiting."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Take the socket over."""
        self._reader, self._writer = await asyncio.open_unix_connection(
            sock=self._control, limit=MOST_BYTES
        )

    def send(self, message: Message) -> None:
        """Send, unless the other side is gone."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(framed(message))

    async def receive(self) -> Message | None:
        """Return the next message; None at the end."""
        if self._reader is None:
            return None
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MOST_BYTES:
                return None
            return _decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
            return None

    async def close(self) -> None:
        """Send what is left and close."""
        if self._writer is None:
            self._control.close()
            return
        self._writer.close()
        with suppress(OSError):  # the other side was gone before
            await self._writer.wait_closed()
