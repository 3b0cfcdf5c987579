"""Publishes cache changes in vLLM's wire format: a PUB socket and a replay socket, both ZMQ.

A message is ``[topic, sequence u64 big-endian, msgpack [time, events, rank]]``; sequences count
from 0 for each process. The replay socket (ROUTER) answers ``["", start]`` with
``["", topic, sequence, payload]`` for every batch from ``start`` that is still kept, and then with
``["", "", 2^64 - 1, ""]``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import zmq
import zmq.asyncio

from sidecar.pagechange import PageChange, PagesCleared, PagesRemoved, PagesStored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.journal import TierName
    from state.model import BlockId

END_SEQUENCE: Final = (2**64 - 1).to_bytes(8, "big")
SEND_HIGH_WATER_MARK: Final = 100_000
KEPT_BATCHES: Final = 10_000
KEPT_BYTES: Final = 64 * 2**20
_SEQUENCE_BYTES: Final = 8
_HASH_BYTES: Final = 8
_MEDIA: Final[dict[TierName, str]] = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}

HashForm = Literal["int", "bytes"]
EventEncoding = Literal["map", "array"]


class EventFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How events are written: both forms of hashes and of events that vLLM has used."""

    page_tokens: int
    hashes: HashForm = "int"
    encoding: EventEncoding = "map"

    def batch(self, changes: Sequence[PageChange], now_s: float) -> bytes:
        """Return the payload of one message."""
        events = [self._event(change) for change in changes]
        return msgspec.msgpack.encode([now_s, events, 0])

    def _event(self, change: PageChange) -> Any:
        match change:
            case PagesStored():
                return self._stored(change)
            case PagesRemoved(keys=keys, tier=tier):
                hashes = [self._hash(key) for key in keys]
                if self.encoding == "array":
                    return ["BlockRemoved", hashes, _MEDIA[tier]]
                return {
                    "type": "BlockRemoved",
                    "block_hashes": hashes,
                    "medium": _MEDIA[tier],
                    "group_idx": 0,
                }
            case PagesCleared():
                name = "AllBlocksCleared"
                return [name] if self.encoding == "array" else {"type": name}

    def _stored(self, change: PagesStored) -> Any:
        extra_keys: list[list[str] | None] = [None] * len(change.keys)
        if change.salt is not None:
            extra_keys[0] = [change.salt]
        fields: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": [self._hash(key) for key in change.keys],
            "parent_block_hash": None if change.parent is None else self._hash(change.parent),
            "token_ids": change.token_ids,
            "block_size": self.page_tokens,
            "lora_id": None,
            "medium": _MEDIA[change.tier],
            "lora_name": None,
            "extra_keys": extra_keys,
        }
        is_tail = change.salt is not None and change.parent is not None
        more = {"cache_salt": change.salt} if is_tail else {}
        if self.encoding == "array":
            return [*fields.values(), *([more] if more else ())]
        return fields | more | {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}

    def _hash(self, key: BlockId) -> int | bytes:
        return key if self.hashes == "bytes" else int.from_bytes(key[-_HASH_BYTES:], "big")


class BatchLog:
    """The last batches, bounded in number and in bytes."""

    def __init__(self, kept_batches: int = KEPT_BATCHES, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_batches = kept_batches
        self._kept_bytes = kept_bytes
        self._batches: deque[bytes] = deque()
        self._bytes = 0
        self.next_sequence = 0

    def append(self, payload: bytes) -> int:
        """Keep ``payload`` and return its sequence."""
        self._batches.append(payload)
        self._bytes += len(payload)
        while len(self._batches) > self._kept_batches or self._bytes > self._kept_bytes:
            self._bytes -= len(self._batches.popleft())
        self.next_sequence += 1
        return self.next_sequence - 1

    def since(self, start_sequence: int) -> list[tuple[int, bytes]]:
        """Return the kept batches from ``start_sequence`` on, each with its sequence."""
        first = self.next_sequence - len(self._batches)
        begin = max(start_sequence, first)
        kept = itertools.islice(self._batches, begin - first, None)
        return list(enumerate(kept, start=begin))


class EventPublisher:
    """Owns both sockets. ``publish`` never blocks: ZMQ drops for subscribers that lag too far."""

    def __init__(self, event_format: EventFormat, topic: str) -> None:
        self._format = event_format
        self._topic = topic.encode()
        self._log = BatchLog()
        self._context = zmq.asyncio.Context()
        # Not an asyncio socket: a PUB send never waits.
        self._events: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PUB)
        self._events.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.SNDHWM, 2 * KEPT_BATCHES + 2)
        for socket in (self._events, self._replay):
            socket.setsockopt(zmq.LINGER, 0)

    def bind(self, events_endpoint: str, replay_endpoint: str) -> tuple[str, str]:
        """Bind both sockets and return their real endpoints; raises zmq.ZMQError."""
        self._events.bind(_with_wildcard_port(events_endpoint))
        self._replay.bind(_with_wildcard_port(replay_endpoint))
        return (
            _endpoint(self._events.getsockopt(zmq.LAST_ENDPOINT)),
            _endpoint(self._replay.getsockopt(zmq.LAST_ENDPOINT)),
        )

    def publish(self, changes: Sequence[PageChange], now_s: float) -> None:
        """Send ``changes`` as one batch; nothing when there are none."""
        if not changes:
            return
        payload = self._format.batch(changes, now_s)
        sequence = self._log.append(payload).to_bytes(_SEQUENCE_BYTES, "big")
        self._events.send_multipart([self._topic, sequence, payload], zmq.NOBLOCK)

    async def serve_replay(self) -> None:
        """Answer replay requests until cancelled."""
        while True:
            frames = await self._replay.recv_multipart()
            match frames:
                case [client, b"", start] if len(start) == _SEQUENCE_BYTES:
                    await self._answer_replay(client, int.from_bytes(start, "big"))
                case _:
                    continue  # not this protocol: there is no answer that the peer would know

    async def _answer_replay(self, client: bytes, start_sequence: int) -> None:
        for sequence, payload in self._log.since(start_sequence):
            head = sequence.to_bytes(_SEQUENCE_BYTES, "big")
            await self._replay.send_multipart([client, b"", self._topic, head, payload])
        await self._replay.send_multipart([client, b"", b"", END_SEQUENCE, b""])
        await asyncio.sleep(0)

    def close(self) -> None:
        """Close both sockets."""
        self._events.close(linger=0)
        self._replay.close(linger=0)
        self._context.term()


def _with_wildcard_port(endpoint: str) -> str:
    return f"{endpoint.removesuffix(':0')}:*" if endpoint.endswith(":0") else endpoint


def _endpoint(raw: bytes | int) -> str:
    return raw.rstrip(b"\0").decode() if isinstance(raw, bytes) else str(raw)
