"""The pace of the thread that reads large bodies: it works, and rests, so that the loop gets on.

A thread that only works gives the interpreter away once in a switch interval, for one callback of
the event loop, and the next callback waits as long again: a body that comes in as a hundred pieces
is a hundred callbacks. While the thread rests they all run at once.
"""

from __future__ import annotations

import threading
import time
from typing import Final

REST_SHARE: Final = 0.5
"""How long a rest is, of the work before it."""
LONGEST_REST_S: Final = 0.005


class _Paced(threading.local):
    """``since_s``: when this thread's work began, or went on; None where nobody keeps its pace."""

    since_s: float | None = None


_paced: Final = _Paced()


def keep_pace() -> None:
    """Begin work on this thread, which is not the event loop's: from now on it rests."""
    _paced.since_s = time.perf_counter()


def rest() -> None:
    """Rest between two steps of long work; nothing on a thread that keeps no pace."""
    since_s = _paced.since_s
    if since_s is None:
        return
    worked_s = time.perf_counter() - since_s
    time.sleep(min(REST_SHARE * worked_s, LONGEST_REST_S))
    _paced.since_s = time.perf_counter()
