"""What every source found last, made into one list of members.

A source that cannot be asked leaves its last list as it is: who is alive, the health checks tell. A
list without anybody is believed only when it was told several times in a row, because resolvers and
API servers answer so when they are ill, too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from router.fleet import ASSUMED_CAPACITY_TOKENS, Member
from router.registration import AddressRule, literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import Metric

    from router.endpoint import Endpoint
    from router.registration_setting import RegistrationSettings
    from state.model import ReplicaId

_log = logging.getLogger(__name__)


def found_member(
    replica: ReplicaId,
    endpoint: Endpoint,
    source: str,
    *,
    is_draining: bool = False,
    capacity_tokens: int | None = None,
) -> Member:
    """Return the member that a source tells of."""
    return Member(
        replica=replica,
        endpoint=endpoint,
        source=source,
        is_draining=is_draining,
        capacity_tokens=capacity_tokens or ASSUMED_CAPACITY_TOKENS,
    )


class Shelf:
    """The last list of one source, which ``name`` shows to people."""

    def __init__(self, name: str, empty_looks: int, on_change: Callable[[], None]) -> None:
        self.name = name
        self.members: tuple[Member, ...] = ()
        self.fault: str | None = None
        """Why the list may be old; None where the source answered the last time."""
        self._empty_looks = empty_looks
        self._empties = 0
        self._on_change = on_change

    def put(self, members: Iterable[Member]) -> bool:
        """Take an answer; return False where it should be asked for once more to be believed."""
        found = tuple(members)
        if self.fault is not None:
            _log.info("%s: answers again", self.name)
        self.fault = None
        self._empties = 0 if found else self._empties + 1
        if not found and self.members and self._empties < self._empty_looks:
            if self._empties == 1:
                _log.warning("%s: nobody is there, which is looked at again", self.name)
            return False
        if found != self.members:
            _log.info("%s: %d replicas, %d before", self.name, len(found), len(self.members))
            self.members = found
            self._on_change()
        return True

    def fail(self, fault: str) -> None:
        """Keep the list: the source could not be asked. An empty answer before counts no more."""
        self._empties = 0
        if fault != self.fault:
            _log.warning("%s: %s; %d replicas are kept", self.name, fault, len(self.members))
        self.fault = fault


class Directory(Collector):
    """The shelves of all sources, in the order in which they are believed; counts the lost ones."""

    def __init__(self, empty_looks: int, adopt: Callable[[tuple[Member, ...]], None]) -> None:
        self._empty_looks = empty_looks
        self._adopt = adopt
        self.shelves: list[Shelf] = []

    def shelf(self, name: str) -> Shelf:
        """Return a shelf for one more source."""
        shelf = Shelf(name, self._empty_looks, self._merge)
        self.shelves.append(shelf)
        return shelf

    def _merge(self) -> None:
        self._adopt(tuple(member for shelf in self.shelves for member in shelf.members))

    def collect(self) -> Iterable[Metric]:
        """Yield each family with its current value."""
        yield GaugeMetricFamily(
            "warmroute_discovery_sources",
            "Sources of replicas besides the shared state and the configuration.",
            value=len(self.shelves),
        )
        yield GaugeMetricFamily(
            "warmroute_discovery_lost_sources",
            "Those that could not be asked the last time: their last list is kept.",
            value=sum(shelf.fault is not None for shelf in self.shelves),
        )


class Bouncer:
    """Which of the addresses that a network service told may be dialled."""

    def __init__(self, settings: RegistrationSettings) -> None:
        self._rule = AddressRule(settings)

    def admits(self, endpoint: Endpoint) -> bool:
        """Return whether the endpoint, which has an address for a host, may be dialled."""
        try:
            address = literal(endpoint.host)
        except ValueError:
            return False
        is_allowed = address is not None and self._rule.allows(address)
        return is_allowed and self._rule.allows_port(endpoint.port)
