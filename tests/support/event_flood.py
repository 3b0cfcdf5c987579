"""A process that publishes KV events as fast as it can: ``event_flood.py PORT BATCHES EVENTS``.

It binds, waits for a line on its standard input, sends all batches, and says how many.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import zmq

PAGE_TOKENS = 4


def batch_of(number: int, events: int) -> bytes:
    """Return a payload of ``events`` stores of one page each, all different."""
    first = number * events
    stores: list[dict[str, Any]] = [
        {
            "type": "BlockStored",
            "block_hashes": [page],
            "parent_block_hash": None,
            "token_ids": [page] * PAGE_TOKENS,
            "block_size": PAGE_TOKENS,
            "medium": "GPU",
        }
        for page in range(first, first + events)
    ]
    return msgspec.msgpack.encode([0.0, stores, 0])


def say(line: str) -> None:
    """Tell the process that started this one."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    port, batches, events = map(int, sys.argv[1:])
    payloads = [batch_of(number, events) for number in range(batches)]
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    publisher.setsockopt(zmq.SNDHWM, batches)
    publisher.bind(f"tcp://127.0.0.1:{port}")
    say("bound")
    sys.stdin.readline()
    for number, payload in enumerate(payloads):
        publisher.send_multipart([b"", number.to_bytes(8, "big"), payload])
    say(f"sent {batches}")
    sys.stdin.readline()
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
