"""What memory this process has taken, and what it may: from /proc and its control group (Linux)."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final

UNLIMITED_BYTES: Final = 1 << 60
"""Control groups of version 1 write "no limit" as a number beyond any machine's memory."""
_MOST_BYTES: Final = 256
_V1_MOUNT = Path("memory")


@cache
def _statm(pid: int) -> int | None:
    """Return a descriptor of what the system tells of a process: open, it is read again cheaply."""
    try:
        return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None where the system does not tell."""
    statm = _statm(os.getpid())
    if statm is None:
        return None
    try:
        pages = int(os.pread(statm, _MOST_BYTES, 0).split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def group_limit_bytes(
    proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the lowest limit of this process's control groups, of either version; None without.

    A container sees its own group as the root, whatever path /proc names, so both are looked at.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            found += _limits(root, path, "memory.max")
        elif "memory" in controllers.split(","):
            found += _limits(root / _V1_MOUNT, path, "memory.limit_in_bytes")
    return min(found, default=None)


def _limits(mount: Path, path: str, name: str) -> list[int]:
    """Return the limits of the group at ``path`` and of all that it is in."""
    group = mount / path.strip("/")
    limits = []
    for folder in (group, *group.parents):
        if folder != mount and mount not in folder.parents:
            break
        try:
            limit_bytes = int((folder / name).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        if limit_bytes < UNLIMITED_BYTES:
            limits.append(limit_bytes)
    return limits
