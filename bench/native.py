"""The two compiled programs of the bench: stub replicas and load generator (``bench/csrc``)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

if TYPE_CHECKING:
    from types import TracebackType

BUILT = Path(__file__).resolve().parents[1] / "build" / "bench"
LOAD_TIMEOUT_S = 120.0


class NativeError(Exception):
    """A program is not built, or it failed; the text says what it said."""


def program(name: str) -> str:
    """Return the path of a compiled program; raises NativeError when it is not there."""
    path = BUILT / name
    if not path.exists():
        message = f"{path} is missing: `make bench-native` builds it (needs Linux and a C compiler)"
        raise NativeError(message)
    return str(path)


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of the load generator saw; ``event_reads`` are reads that ended an event."""

    answered: int
    failed: int
    wall_us: int
    bytes: int
    events: int
    reads: int
    event_reads: int
    connections: int
    p50_us: int
    p99_us: int
    most_us: int


class Delays(msgspec.Struct, frozen=True, kw_only=True):
    """How long the events of held streams took from the stub to the load generator."""

    events: int
    p50_us: int
    p99_us: int
    p999_us: int
    most_us: int


def parse_load(line: str) -> Load:
    """Return the figures in the load generator's last line; raises NativeError."""
    try:
        return msgspec.json.decode(line, type=Load)
    except msgspec.DecodeError as error:
        message = f"the load generator said {line[:200]!r}: {error}"
        raise NativeError(message) from None


def run_load(*words: object) -> Load:
    """Run the load generator to its end; raises NativeError, for any failed request too."""
    command = [program("load"), *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, check=False
    )
    if done.returncode:
        message = f"load {' '.join(command[1:])}: {done.stderr.strip()}"
        raise NativeError(message)
    load = parse_load(done.stdout)
    if load.failed:
        answers = sorted(set(done.stderr.splitlines()))
        message = f"load {' '.join(command[1:])}: {load.failed} requests failed {answers[:3]}"
        raise NativeError(message)
    return load


class _Child:
    """A program that is told by lines on its standard input and ends with it."""

    def __init__(self, name: str, *words: object) -> None:
        self._process = subprocess.Popen(
            [program(name), *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise NativeError(name)
        self._input, self._output = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the program."""
        self.close()

    def close(self) -> None:
        """End the program."""
        self._input.close()
        try:
            self._process.wait(5)
        finally:
            self._process.kill()
            self._process.wait()
            self._output.close()


class Stub(_Child):
    """Stub replicas, each on a port of its own; a context manager."""

    def __init__(self, replicas: int) -> None:
        super().__init__("stub", replicas)
        self.ports = [int(word) for word in self._output.readline().split()]
        if len(self.ports) != replicas:
            self.close()
            message = "the stub replicas did not start"
            raise NativeError(message)

    def served(self) -> tuple[int, int]:
        """Return the chats and the events sent so far."""
        self._input.write("\n")
        self._input.flush()
        chats, events = self._output.readline().split()
        return int(chats), int(events)


class HeldStreams(_Child):
    """Open streams that each brought one event; a context manager that closes them."""

    def __init__(self, port: int, bodies: Path, streams: int) -> None:
        super().__init__("load", port, "HOLD", bodies, streams)
        if self._output.readline() != "held\n":
            self.close()
            message = f"{streams} streams could not be opened and held"
            raise NativeError(message)

    def delays(self) -> Delays:
        """Return those of the events since the last call; raises NativeError where one broke."""
        try:
            self._input.write("\n")
            self._input.flush()
            return msgspec.json.decode(self._output.readline(), type=Delays)
        except (OSError, msgspec.DecodeError) as error:
            message = f"a held stream broke: {error}"
            raise NativeError(message) from error
