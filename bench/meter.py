"""What a process used: CPU to the nanosecond, and memory. Linux only."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROCESS_CLOCK = 2
"""The kernel's CPUCLOCK_SCHED, see clock_getcpuclockid(3) and include/linux/posix-timers.h."""


def cpu_s(pid: int) -> float:
    """Return the CPU seconds (user + system) of all threads of a process, ended ones too."""
    return time.clock_gettime((~pid << 3) | _PROCESS_CLOCK)


def rss_kib(pid: int) -> float:
    """Return the resident memory of a process in KiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def children(pid: int) -> list[int]:
    """Return the processes that a process started itself."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


class Noise:
    """What else ran on the machine since this was made."""

    def __init__(self) -> None:
        self._before = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Return CPU seconds so far: busy, stolen by the host, of this process and ended children.

        The first two since boot, see proc_stat(5).
        """
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
        hertz = os.sysconf("SC_CLK_TCK")
        used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        own_s = sum(one.ru_utime + one.ru_stime for one in used)
        return (user + nice + system + irq + softirq) / hertz, steal / hertz, own_s

    def told(self) -> str:
        """Return a sentence on it; children that still run count as others."""
        busy_s, stolen_s, own_s = (
            after - before for before, after in zip(self._before, self._read(), strict=True)
        )
        others_s = max(0.0, busy_s - own_s)
        return (
            f"CPU: {own_s:.0f} s for this bench, {others_s:.0f} s for other processes of the "
            f"machine, {stolen_s:.1f} s taken by its host"
        )


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Have processes that are started inside run on one core alone, where the machine has two."""
    before = os.sched_getaffinity(0)
    if core is not None and len(before) > 1:
        os.sched_setaffinity(0, {sorted(before)[core]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
