"""Session hash: a session stays on the replica that its name hashes to, whatever the load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import xxhash
from msgspec import Meta, Struct

from policies.baselines.ballot import candidate_of, decided
from policies.baselines.prefix_name import prefix_name, session_name

if TYPE_CHECKING:
    from policies.model import Decision, ReplicaView, RoutingRequest

_HASHES: Final = 2.0**64


class SessionHash(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="session_hash",
):
    """The highest hash of (session, replica) wins: rendezvous hashing.

    As ``rendezvous_hash`` of vllm-project/router (0.1.15). ``distance`` is how far the hash is from
    the highest possible one, as a part of all hashes.

    A request without a session goes by its first ``prefix_blocks`` blocks: 256 tokens, as much as
    ``prefix_hash`` of SMG hashes. One shorter than a block goes anywhere. There is no bound on
    the load: a popular session or prefix overloads its replica. A replica that comes or goes
    moves only the sessions that are its own.
    """

    hashes_prefix: ClassVar[bool] = True
    """Places by the ids of the first blocks."""

    prefix_blocks: Annotated[int, Meta(ge=1)] = 4

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        name = session_name(request) or prefix_name(request, self.prefix_blocks)
        candidates = tuple(
            candidate_of(view, {"distance": 0.0 if name is None else _distance(name, view.replica)})
            for view in fleet
        )
        return decided(request, candidates)


def _distance(name: bytes, replica: str) -> float:
    return 1.0 - xxhash.xxh3_64_intdigest(name + b"\0" + replica.encode()) / _HASHES
