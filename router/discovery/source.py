"""Opens the sources that are configured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from router.discovery.directory import Bouncer, Directory
from router.discovery.file import FileWatch

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable

    from router.config import Config
    from router.fleet import FleetTable


Loops = dict[str, "Callable[[], Awaitable[None]]"]


class Discovery:
    """What has to run for each source, by its name; nothing without any."""

    def __init__(self, config: Config, fleet: FleetTable, rng: random.Random) -> None:
        settings = config.discovery
        self.directory = directory = Directory(settings.empty_looks, fleet.adopt)
        self.loops: Loops = {}
        bouncer = Bouncer(config.registration)
        if settings.file is not None:
            name = f"replicas of {Path(settings.file).name}"
            watch = FileWatch(settings.file, settings.file_interval_s, directory.shelf(name))
            self.loops[name] = watch.run
        if settings.kubernetes is not None:
            # A library that takes long to load is loaded where it is wanted.
            from router.discovery.kube import KubeWatch  # noqa: PLC0415

            name = f"replicas of service {settings.kubernetes.service}"
            shelf = directory.shelf(name)
            self.loops[name] = KubeWatch(settings.kubernetes, shelf, bouncer, rng).run
        if settings.dns:
            from router.discovery.dns import DnsWatch  # noqa: PLC0415 - as above

            for index, source in enumerate(settings.dns):
                name = f"replicas of {source.name} [{index}]"
                self.loops[name] = DnsWatch(source, directory.shelf(name), bouncer).run
