"""How loaded a replica is, in requests, when some engines do not report their queue."""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policies.model import ReplicaView


def assumed_queues(fleet: tuple[ReplicaView, ...]) -> list[float]:
    """Return each replica's engine queue, in requests, in fleet order.

    An unknown queue counts as the mean of the known ones: 0 would draw all traffic to the replica
    that went silent. Where no engine reports, the leases are all there is, and each counts 0.
    """
    queues = [view.queued for view in fleet]
    known = [queue for queue in queues if queue is not None]
    if not known:
        return [0.0] * len(queues)
    unknown = sum(known) / len(known)
    return [unknown if queue is None else float(queue) for queue in queues]


def mean_of(values: list[float]) -> float:
    """Return the mean, the same for every order of ``values``; they are not empty."""
    return fsum(values) / len(values)
