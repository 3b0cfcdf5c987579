"""Programs of ours that are started beside a router: they end with it."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from state.embedded import bound_to_this_process

if TYPE_CHECKING:
    from collections.abc import Mapping


def launch(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, out of reach of a terminal's Ctrl-C.

    What it logs goes where this process logs.
    """
    return subprocess.Popen(  # noqa: S603 - our own program
        bound_to_this_process(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **environment},
        process_group=0,
    )
