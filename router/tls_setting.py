"""What a listener's TLS is told."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct


class ListenerTls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of one listener; paths of PEM files, which are read again when they change.

    ``certificate`` holds the chain, the own one first. ``client_certificates``: whether clients are
    asked for one of ``client_ca``'s, and turned away without.
    """

    certificate: str
    key: str
    client_ca: str | None = None
    client_certificates: Literal["off", "optional", "required"] = "off"
    min_version: Literal["1.2", "1.3"] = "1.2"

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that it names."""
        given = (self.certificate, self.key, self.client_ca)
        return tuple(Path(path) for path in given if path is not None)
