"""Seals of what is in the shared state: who wrote a value had the deployment key.

A seal is when it was made, 8 bytes, and a MAC, 16 bytes. The MAC is BLAKE2b under a key of the kind
of value (HKDF of the deployment key) over

    length and name of the key | length and name of the field | time | value

with lengths of 4 bytes, so that no two inputs read alike, and a value is good in its own place
only: under another key, another field or as another kind it is not. What ends an old value is in
the value or in the seal: records, loads, facts and leases go by the time, entries of a change
stream by generation and sequence, settings by their version. Those have no time, so that all
routers write the same bytes. Seals say nothing of what is missing: whoever may write may also
delete.

Values stay readable without the key, and by earlier versions, which do not look at what they do not
know: in JSON the seal is the last member of the object, in msgpack the last bytes of the value.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import hmac
from typing import TYPE_CHECKING, Final, NamedTuple

from state.secret import derived

if TYPE_CHECKING:
    from collections.abc import Callable

MAC_BYTES: Final = 16
_TIME_BYTES: Final = 8
SEAL_BYTES: Final = _TIME_BYTES + MAC_BYTES
_SEAL_TAG: Final = b"warmroute seal\0"
_PERSON: Final = b"warmroute seal"
_JSON_HEAD: Final = b',"seal":"'
_JSON_END: Final = b'"}'
_JSON_BYTES: Final = len(_JSON_HEAD) + SEAL_BYTES // 3 * 4 + len(_JSON_END)
_PACKED_HEAD: Final = bytes((0xC4, SEAL_BYTES))
"""How msgpack begins a byte string of a seal's length."""
_PACKED_BYTES: Final = len(_PACKED_HEAD) + SEAL_BYTES
NO_SEAL: Final = bytes(SEAL_BYTES)
"""What a msgpack value that is to be sealed ends with, as its last byte string."""
_PLACES_KEPT: Final = 8_192
MOST_BYTES: Final = 1 << 20
"""A larger value is none of anybody's, and is not looked through for a seal."""


class Kind(enum.StrEnum):
    """What a sealed value is."""

    RECORD = "record"
    LOAD = "load"
    FACTS = "facts"
    CHANGE = "change"
    """An entry of a replica's change stream."""
    LEASES = "leases"
    SETTINGS = "settings"
    CANARY = "canary"


TIMED: Final = frozenset({Kind.RECORD, Kind.LOAD, Kind.FACTS, Kind.LEASES})
"""Kinds that are good for a while after they were sealed."""
_JSON_KINDS: Final = frozenset({Kind.RECORD, Kind.LOAD, Kind.FACTS, Kind.SETTINGS})


class Fault(enum.StrEnum):
    """What is wrong with a value's seal."""

    UNSEALED = "unsealed"
    WRONG = "wrong"
    """Of another key, another place, or another value."""
    OLD = "old"
    """Of another time than now, or of before what was read last."""


class Opened(NamedTuple):
    """A value without its seal, as far as it is to be decoded without; and what is wrong."""

    value: bytes
    issued_ms: int
    fault: Fault | None


class Seal:
    """Seals values and opens them. Nothing here reads or waits."""

    __slots__ = ("_bases", "_clock", "_keys")

    def __init__(self, secret: bytes, unix_clock: Callable[[], float]) -> None:
        self._keys = {kind: derived(secret, _SEAL_TAG + kind.value.encode()) for kind in Kind}
        self._clock = unix_clock
        self._bases: dict[tuple[Kind, str, str], hashlib.blake2b] = {}

    def now_ms(self) -> int:
        """Return the time, in ms since 1970, as seals have it."""
        return round(self._clock() * 1000)

    def sealed(self, kind: Kind, key: str, value: bytes, field: str = "") -> bytes:
        """Return ``value``, of the ``field`` of ``key``, with its seal.

        JSON has to be an object that is not empty; entries and leases have to end with NO_SEAL.
        """
        issued = (self.now_ms() if kind in TIMED else 0).to_bytes(_TIME_BYTES, "big")
        if kind in _JSON_KINDS:
            seal = issued + self._mac(kind, key, field, issued, value)
            return value[:-1] + _JSON_HEAD + base64.urlsafe_b64encode(seal) + _JSON_END
        body = value + _PACKED_HEAD if kind is Kind.CANARY else value[:-SEAL_BYTES]
        return body + issued + self._mac(kind, key, field, issued, body)

    def opened(self, kind: Kind, key: str, value: bytes, field: str = "") -> Opened:
        """Return what ``value`` says and whether its seal is good, of whatever time."""
        if len(value) > MOST_BYTES:
            return Opened(value, 0, Fault.UNSEALED)
        if kind in _JSON_KINDS:
            shown, seal = _split_json(value)
            body = shown
        else:
            shown, body, seal = _split_packed(kind, value)
        if seal is None:
            return Opened(value, 0, Fault.UNSEALED)
        issued, mac = seal[:_TIME_BYTES], seal[_TIME_BYTES:]
        is_good = hmac.compare_digest(mac, self._mac(kind, key, field, issued, body))
        return Opened(shown, int.from_bytes(issued, "big"), None if is_good else Fault.WRONG)

    def _mac(self, kind: Kind, key: str, field: str, issued: bytes, body: bytes) -> bytes:
        base = self._bases.get((kind, key, field)) or self._base(kind, key, field)
        state = base.copy()
        state.update(issued)
        state.update(body)
        return state.digest()

    def _base(self, kind: Kind, key: str, field: str) -> hashlib.blake2b:
        """Return the state after the place, which is the same for all values there."""
        if len(self._bases) >= _PLACES_KEPT:
            self._bases.clear()
        base = hashlib.blake2b(key=self._keys[kind], digest_size=MAC_BYTES, person=_PERSON)
        for name in (key.encode(), field.encode()):
            base.update(len(name).to_bytes(4, "little") + name)
        self._bases[kind, key, field] = base
        return base


def _split_json(value: bytes) -> tuple[bytes, bytes | None]:
    """Return the object without its seal, and the seal; None for none."""
    end = value[-_JSON_BYTES:]
    if not (end.startswith(_JSON_HEAD) and end.endswith(_JSON_END)):
        return value, None
    try:
        text = end[len(_JSON_HEAD) : -len(_JSON_END)]
        seal = base64.b64decode(text, altchars=b"-_", validate=True)
    except binascii.Error:
        return value, None
    return value[:-_JSON_BYTES] + b"}", seal


def _split_packed(kind: Kind, value: bytes) -> tuple[bytes, bytes, bytes | None]:
    """Return what is to be decoded, what the MAC is of, and the seal; None for none.

    In entries and leases the seal is a part of the value, behind canary sums it is not.
    """
    body = value[:-SEAL_BYTES]
    if not body.endswith(_PACKED_HEAD):
        return value, value, None
    shown = value[:-_PACKED_BYTES] if kind is Kind.CANARY else value
    return shown, body, value[-SEAL_BYTES:]
