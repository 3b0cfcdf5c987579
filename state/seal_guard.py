"""What one process takes of the shared state: all of it, or what is sealed with its key.

Without a deployment key there is nothing to look for. With one, seals are looked at and what is
wrong is counted; whether it is then taken or ignored is ``is_required``. Of a kind that is ignored
(or taken although it is not sealed) one line is logged for each fault, whatever comes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from state.seal import TIMED, Fault, Kind

if TYPE_CHECKING:
    from state.seal import Seal

SEAL_AGE_S: Final = 300.0
"""So old, or so far ahead, may a seal's time be: clocks may be that far apart."""
RESEAL_S: Final = 60.0
"""So often what does not change is sealed anew."""
_PLACES_KEPT: Final = 65_536
_WORDS: Final = {
    Fault.UNSEALED: "without a seal",
    Fault.WRONG: "with a seal that is not of this deployment's key and of their place",
    Fault.OLD: "with a seal of another time (clocks may be 300 s apart)",
}

_log = logging.getLogger(__name__)


class SealGuard:
    """Opens what this process reads. ``seal`` is None where there is no key."""

    def __init__(self, seal: Seal | None = None, *, is_required: bool = False) -> None:
        self.seal = seal
        self.is_required = is_required and seal is not None
        self.faults: dict[tuple[Kind, Fault], int] = {}
        """Values that were read with such a fault."""
        self._newest: dict[tuple[Kind, str, str], int] = {}

    def open(self, kind: Kind, key: str, value: bytes, field: str = "") -> bytes | None:
        """Return what ``value`` says; None where it is to be ignored."""
        seal = self.seal
        if seal is None:
            return value
        opened = seal.opened(kind, key, value, field)
        fault = opened.fault
        if fault is None and kind in TIMED:
            place = (kind, key, field)
            fault = Fault.OLD if self._is_old(place, opened.issued_ms, seal.now_ms()) else None
        if fault is None:
            return opened.value
        self._note(kind, fault)
        return None if self.is_required else opened.value

    def sealed(self, kind: Kind, key: str, value: bytes, field: str = "") -> bytes:
        """Return ``value`` with its seal, as it is without a key."""
        return value if self.seal is None else self.seal.sealed(kind, key, value, field)

    def _is_old(self, place: tuple[Kind, str, str], issued_ms: int, now_ms: int) -> bool:
        """Note the newest seal of each place; return whether this one is of another time."""
        age_ms = SEAL_AGE_S * 1000
        if abs(now_ms - issued_ms) > age_ms or issued_ms < self._newest.get(place, 0):
            return True
        if len(self._newest) >= _PLACES_KEPT and place not in self._newest:
            self._newest = {
                one: at_ms for one, at_ms in self._newest.items() if now_ms - at_ms <= age_ms
            }
        self._newest[place] = issued_ms
        return False

    def _note(self, kind: Kind, fault: Fault) -> None:
        count = self.faults.get((kind, fault), 0)
        self.faults[kind, fault] = count + 1
        if not count:
            done = "ignored" if self.is_required else "taken for now, as sealed_state is accept"
            _log.warning("the store has values (%s) %s: %s", kind.value, _WORDS[fault], done)
