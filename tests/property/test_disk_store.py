"""A page store against a dictionary, through damage and restarts; threads; killed writers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sidecar.store import DiskStore, StoreError
from state.model import BlockId

PAGE_BYTES = 96
MAX_PAGES = 5
NUMBERS = st.integers(0, 7)

WRITER = """
import random, sys
from pathlib import Path
from sidecar.store import DiskStore
import xxhash
store = DiskStore(Path(sys.argv[1]), "n", int(sys.argv[2]), 1 << 30)
store.open()
rng = random.Random(int(sys.argv[3]))
print("ready", flush=True)
while True:
    key = xxhash.xxh3_128_digest(b"%d" % rng.randrange(300))
    if rng.random() < 0.2:
        store.remove(key)
    else:
        store.write(key, key * (int(sys.argv[2]) // 16))
"""


def key(number: int) -> BlockId:
    return BlockId(xxhash.xxh3_128_digest(b"%d" % number))


class StoreMachine(RuleBasedStateMachine):
    """Whatever happens to files, a read gives what was written last, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.written: dict[int, bytes] = {}
        self.damaged: set[int] = set()
        self.order: list[int] = []

    @initialize()
    def start(self) -> None:
        self.store = self.fresh()
        assert self.store.open() == []

    def fresh(self) -> DiskStore:
        return DiskStore(Path(self.folder.name), "n", PAGE_BYTES, MAX_PAGES * 4096)

    def used(self, number: int) -> None:
        self.order = [other for other in self.order if other != number] + [number]

    def gone(self, number: int) -> None:
        self.written.pop(number, None)
        self.damaged.discard(number)
        self.order = [other for other in self.order if other != number]

    @rule(number=NUMBERS, seed=st.integers(0, 255))
    def write(self, number: int, seed: int) -> None:
        page = bytes([seed]) * PAGE_BYTES
        self.gone(number)
        if len(self.written) == MAX_PAGES:
            with pytest.raises(StoreError):
                self.store.write(key(number), page)
        else:
            self.store.write(key(number), page)
            self.written[number] = page
            self.used(number)

    @rule(number=NUMBERS)
    def read(self, number: int) -> None:
        expected = None if number in self.damaged else self.written.get(number)
        assert self.store.read(key(number)) == expected
        if expected is None:
            self.gone(number)

    @rule(number=NUMBERS)
    def remove(self, number: int) -> None:
        self.store.remove(key(number))
        self.gone(number)

    @rule(number=NUMBERS)
    def touch(self, number: int) -> None:
        self.store.touch(key(number))
        if number in self.written:
            self.used(number)

    @rule(number=NUMBERS, at=st.integers(0, 159), bit=st.integers(0, 7))
    def flip(self, number: int, at: int, bit: int) -> None:
        if number not in self.written or number in self.damaged:
            return
        (path,) = Path(self.folder.name).glob(f"*/*/{key(number).hex()}")
        page = bytearray(path.read_bytes())
        page[at] ^= 1 << bit
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        path.write_bytes(page)
        os.utime(path, ns=times)
        self.damaged.add(number)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.fresh()
        assert self.store.open() == [key(number) for number in self.order]

    @invariant()
    def files_are_those_that_are_held(self) -> None:
        names = {path.name for path in Path(self.folder.name).glob("*/*/*")}
        assert names == {key(number).hex() for number in self.written}
        assert self.store.held_bytes == 4096 * len(self.written)

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


StoreMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestStore = StoreMachine.TestCase


def test_threads_that_write_read_and_remove_at_once_never_see_wrong_content(
    tmp_path: Path,
) -> None:
    store = DiskStore(tmp_path, "n", PAGE_BYTES, 40 * 4096)
    store.open()

    def work(seed: int) -> int:
        rng, refused = random.Random(seed), 0
        for _ in range(300):
            page = key(rng.randrange(60))
            kind = rng.randrange(4)
            try:
                if kind < 2:
                    store.write(page, page * (PAGE_BYTES // 16))
                elif kind == 2:
                    assert store.read(page) in (None, page * (PAGE_BYTES // 16))
                else:
                    store.remove(page)
            except StoreError:
                refused += 1
        return refused

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    held = store.held_bytes
    store.close()
    assert len(list(tmp_path.glob("*/*/*"))) * 4096 == held <= 40 * 4096


@pytest.mark.parametrize("seed", range(6))
def test_a_killed_writer_leaves_whole_pages_only(tmp_path: Path, seed: int) -> None:
    page_bytes = 64 << 10
    rng = random.Random(seed)
    for life in range(3):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(page_bytes), str(life)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            wanted = rng.randrange(5, 120)  # a kill at no set moment of some write
            while len([*tmp_path.glob(f"*/*/{'?' * 32}")]) < wanted:
                assert process.poll() is None
            process.send_signal(signal.SIGKILL)
        store = DiskStore(tmp_path, "n", page_bytes, 1 << 30)
        listed = store.open()
        assert listed
        assert not list(tmp_path.glob("*/*/*.tmp"))
        for page in listed:
            assert store.read(page) == page * (page_bytes // 16)
        assert store.bad_pages == 0
        store.close()
