"""Replicas from a file, in the form of ``replicas:`` of the configuration (YAML or JSON).

The file is taken as a whole or not at all. Write another one beside it and rename it: half a list
may be a good list, too.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Final

from router.config import ConfigError, decode_config, replica_name
from router.discovery.directory import found_member
from router.endpoint import Endpoint
from state.model import ReplicaId

if TYPE_CHECKING:
    from router.discovery.directory import Shelf
    from router.fleet import Member

SOURCE: Final = "file"
MOST_BYTES: Final = 4 << 20
Stamp = tuple[int, int, int]


def members_of(text: str) -> list[Member]:
    """Return the members that a file's text names; raises ValueError with the wrong key."""
    from router.strict_yaml import YAMLError, load_yaml  # noqa: PLC0415 - no file, no parser

    try:
        raw = load_yaml(text)
    except YAMLError as error:
        message = f"not YAML: {' '.join(str(error).split())}"
        raise ValueError(message) from None
    except RecursionError:
        message = "not YAML: too many levels"
        raise ValueError(message) from None
    if not isinstance(raw, list):
        message = "expected a list of replicas; [] for none"
        raise ValueError(message)  # noqa: TRY004 - one kind of error for every wrong text
    try:
        listed = decode_config({"replicas": raw}).replicas
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("replicas")) from None
    return [
        found_member(
            ReplicaId(replica_name(replica)),
            Endpoint.configured(replica.url),
            SOURCE,
            capacity_tokens=replica.kv_capacity_tokens,
        )
        for replica in listed
    ]


def _stamp(path: Path) -> Stamp:
    told = path.stat()
    return told.st_mtime_ns, told.st_size, told.st_ino


def _read(path: Path) -> list[Member]:
    """Return what the file has; on a thread, as a long list takes a quarter of a second."""
    return members_of(_text(path))


def _text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        message = f"more than {MOST_BYTES} bytes"
        raise ValueError(message)
    return data.decode()


class FileWatch:
    """Reads the file when it is another one than before."""

    def __init__(self, path: str, interval_s: float, shelf: Shelf) -> None:
        self._path = Path(path)
        self._interval_s = interval_s
        self._shelf = shelf
        self._seen: Stamp | None = None

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(self._interval_s)

    async def look(self) -> None:
        """Look once."""
        try:
            stamp = await asyncio.to_thread(_stamp, self._path)
            if stamp == self._seen:
                return
            members = await asyncio.to_thread(_read, self._path)
        except OSError as error:
            self._seen = None
            self._shelf.fail(str(error.strerror or error))
        except ValueError as error:
            self._seen = stamp  # the same text is as wrong the next time
            self._shelf.fail(str(error))
        else:
            self._seen = stamp if self._shelf.put(members) else None
