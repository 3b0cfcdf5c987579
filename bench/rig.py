"""What the benches of whole proxies share: stub replicas, bodies, proxies, loads."""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from contender import ENVIRONMENT, LOAD_CORE, Contender, Field
from conversation import GROWTH, Conversations, chars_per_token, write_bodies
from meter import Noise, cpu_s, on_core
from native import Load, NativeError, Stub, run_load
from warmroute.corpus import write_tokenizer
from warmroute.local import Processes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

REPLICAS = 2
TURN_TOKENS = 500


class Rig:
    """Stub replicas and the proxies in front of them; made by ``rig``."""

    def __init__(self, directory: Path, stub: Stub, field: Field, tokenizer: Path) -> None:
        self.stub = stub
        self.field = field
        self.chars_per_token = chars_per_token(tokenizer)
        self._directory = directory
        self._seed = itertools.count(1)

    def conversations(
        self, body_bytes: int, sessions: int, stamp: str | None = None, growth: float = GROWTH
    ) -> Conversations:
        """Return conversations that nobody saw before, with turns of ``TURN_TOKENS``."""
        chars, seed = int(TURN_TOKENS * self.chars_per_token), next(self._seed)
        return Conversations(body_bytes, sessions, chars, seed, stamp=stamp, growth=growth)

    def write(self, bodies: Iterable[bytes], count: int) -> Path:
        """Write the next bodies to a file; it replaces the one before."""
        return write_bodies(self._directory / "bodies", itertools.islice(bodies, count))

    def introduce(self, known: Conversations, field: Iterable[Contender]) -> None:
        """Have every proxy answer the conversations as they begin."""
        openers = known.openers()
        path = write_bodies(self._directory / "openers", openers)
        for one in field:
            run_load(one.port, path, 1, len(openers))

    def load(self, one: Contender, path: Path, *words: object) -> tuple[Load, float]:
        """Run a load through a proxy; returns it and the CPU microseconds that the proxy used.

        Raises NativeError when a request failed or the replicas saw another number of them.
        """
        chats = self.stub.served()[0]
        before_s = cpu_s(one.pid)
        load = run_load(one.port, path, *words)
        used_us = (cpu_s(one.pid) - before_s) * 1e6
        served = self.stub.served()[0] - chats
        if served != load.answered:
            message = f"{one.name}: {load.answered} answers to the load, {served} of the replicas"
            raise NativeError(message)
        return load, used_us


@contextlib.contextmanager
def rig(
    tokenizer: Path | None, *, shares_cores: bool = False, replicas: int = REPLICAS
) -> Iterator[Rig]:
    """Start stub replicas; stop everything at the end and tell how noisy the machine was.

    Stub and load have a core of their own unless ``shares_cores``. Without ``tokenizer`` one of
    some 1,500 tokens is trained.
    """
    began_s, noise = time.monotonic(), Noise()
    with (
        tempfile.TemporaryDirectory() as name,
        on_core(None if shares_cores else LOAD_CORE),
        Stub(replicas) as stub,
    ):
        directory = Path(name)
        model = tokenizer or write_tokenizer(directory / "tokenizer", 0)
        processes = Processes(directory, ENVIRONMENT)
        try:
            yield Rig(directory, stub, Field(processes, directory, stub.ports, model), model)
        finally:
            processes.stop_all()
    took_s = time.monotonic() - began_s
    print(f"\nCPython {sys.version.split()[0]}; took {took_s:.0f} s. {noise.told()}")
