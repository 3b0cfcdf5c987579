"""Requests that replicas died of: kept away from the others. No clock of its own, no I/O.

What a replica had and did not answer when it died is suspect. A request that was with two deaths is
refused for a while; one that ends well after a death is cleared, as those are that only shared a
replica with the culprit. Requests are known by keyed digests of this process: nothing of their text
is kept. Both tables are bounded.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from msgspec import Meta, Struct

if TYPE_CHECKING:
    from state.model import ReplicaId

SUSPECT_S: Final = 5.0
"""A failure that long before the death of its replica belongs to it."""
ONE_DEATH_S: Final = 5.0
"""What is noticed of one replica within this time is one death."""
SUSPECTS_MOST: Final = 256
"""Of one replica: the last ones."""
DIGEST_BYTES: Final = 16


class QuarantineSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a request is refused because replicas died of it.

    ``deaths``: of so many replicas; 0 turns it off. ``ttl_s``: for so long, and so long a death
    counts. ``requests``: so many are kept in mind at most.
    """

    deaths: Annotated[int, Meta(ge=0)] = 2
    ttl_s: Annotated[float, Meta(gt=0)] = 600.0
    requests: Annotated[int, Meta(ge=1, le=65_536)] = 1_024


class Key(NamedTuple):
    """A request: the length of its body first, which is compared before anything is hashed."""

    body_bytes: int
    digest: bytes


class _Death(NamedTuple):
    replica: ReplicaId
    at_s: float


class Quarantine:
    """The suspects and the convicts of one router. ``secret`` keys the digests."""

    def __init__(self, settings: QuarantineSettings, secret: bytes) -> None:
        self._settings = settings
        self._secret = secret
        self._suspects: dict[ReplicaId, deque[tuple[Key, float]]] = {}
        self.marked: OrderedDict[Key, list[_Death]] = OrderedDict()
        """Requests that were with a death, the last one at the end; empty where all is well."""
        self._lengths: dict[int, int] = {}
        self.refused = 0

    def key(self, path: str, body: bytes) -> Key:
        """Return what the request is known by."""
        digest = blake2b(key=self._secret, digest_size=DIGEST_BYTES)
        digest.update(path.encode())
        digest.update(b"\0")
        digest.update(body)
        return Key(len(body), digest.digest())

    @property
    def convicts(self) -> int:
        """How many requests are refused now."""
        return sum(len(deaths) >= self._settings.deaths for deaths in self.marked.values())

    def suspect(self, replica: ReplicaId, key: Key, now_s: float) -> None:
        """Note a request that ``replica`` had and failed."""
        if self._settings.deaths:
            known = self._suspects.setdefault(replica, deque(maxlen=SUSPECTS_MOST))
            known.append((key, now_s))

    def died(self, replica: ReplicaId, now_s: float) -> None:
        """Mark what ``replica`` had when it died."""
        for key, at_s in self._suspects.pop(replica, ()):
            if now_s - at_s <= SUSPECT_S:
                self._mark(key, replica, now_s)

    def left_s(self, path: str, body: bytes, now_s: float) -> float | None:
        """Return for how long the request is refused still; None where it is not.

        A body of a length that no marked request has is not hashed.
        """
        if len(body) not in self._lengths:
            return None
        key = self.key(path, body)
        deaths = self.marked.get(key)
        if deaths is None:
            return None
        left_s = deaths[-1].at_s + self._settings.ttl_s - now_s
        if left_s <= 0:
            self._drop(key)
            return None
        return left_s if len(deaths) >= self._settings.deaths else None

    def clear(self, path: str, body: bytes, key: Key | None = None) -> None:
        """Forget a request that ended well; where it has a ``key``, the body is not looked at."""
        if (len(body) if key is None else key.body_bytes) in self._lengths:
            key = key or self.key(path, body)
            if key in self.marked:
                self._drop(key)

    def tick(self, now_s: float) -> None:
        """Forget what is over."""
        while self.marked:
            key, deaths = next(iter(self.marked.items()))
            if now_s - deaths[-1].at_s < self._settings.ttl_s:
                break
            self._drop(key)
        for replica, known in list(self._suspects.items()):
            if now_s - known[-1][1] > SUSPECT_S:
                del self._suspects[replica]

    def _mark(self, key: Key, replica: ReplicaId, now_s: float) -> None:
        deaths = self.marked.get(key)
        if deaths is None:
            deaths = self.marked[key] = []
            self._lengths[key.body_bytes] = self._lengths.get(key.body_bytes, 0) + 1
        elif any(
            death.replica == replica and now_s - death.at_s <= ONE_DEATH_S for death in deaths
        ):
            return
        deaths[:] = [each for each in deaths if now_s - each.at_s < self._settings.ttl_s]
        deaths.append(_Death(replica, now_s))
        del deaths[: -max(1, self._settings.deaths)]
        self.marked.move_to_end(key)
        while len(self.marked) > self._settings.requests:
            self._drop(next(iter(self.marked)))

    def _drop(self, key: Key) -> None:
        del self.marked[key]
        left = self._lengths[key.body_bytes] - 1
        if left:
            self._lengths[key.body_bytes] = left
        else:
            del self._lengths[key.body_bytes]
