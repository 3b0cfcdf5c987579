"""What this machine has, so that no size is promised that it cannot hold."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sidecar.setting import SettingError

if TYPE_CHECKING:
    from sidecar.setting import WorkerSettings

MIB: Final = 2**20


def memory_bytes() -> int:
    """Return the machine's memory; a container may have less."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def file_system_bytes(directory: Path) -> int:
    """Return the size of the file system that ``directory`` is, or will be, on."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).total


def expect_room(settings: WorkerSettings, page_bytes: int) -> None:
    """Refuse tiers larger than the machine; ``page_bytes`` is what a page really takes in memory.

    Raises SettingError: a page table of such a size alone could take all memory.
    """
    most_bytes = memory_bytes()
    if settings.pages is not None and settings.pages * page_bytes > most_bytes:
        most = most_bytes // page_bytes
        message = f"pages: expected at most {most}, the memory here, got {settings.pages}"
        raise SettingError(message)
    if page_bytes and settings.host_mib * MIB > most_bytes:
        most = most_bytes // MIB
        message = f"host_mib: expected at most {most}, the memory here, got {settings.host_mib}"
        raise SettingError(message)
    if settings.disk_dir is None:
        return
    most = file_system_bytes(Path(settings.disk_dir)) // MIB
    if settings.disk_mib > most:
        message = (
            f"disk_mib: expected at most {most}, the file system of {settings.disk_dir}, "
            f"got {settings.disk_mib}"
        )
        raise SettingError(message)
