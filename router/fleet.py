"""Who is in the fleet and who may be chosen: registered, configured and found replicas, merged.

One address is one replica, whoever tells of it: a sidecar's record is believed first, then the
configuration, then what was found elsewhere. Candidates are filtered by liveness before anything is
scored, so that what a dead replica holds never matters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import Struct, structs

from router.adapter import NONE, Adapters
from router.config import replica_name
from router.endpoint import Endpoint
from router.registration import AddressRule, Registration, checked
from router.registration_setting import RegistrationSettings
from state.model import ModelIdentity, ReplicaId, ReplicaLoad

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from router.adapter import AdapterSettings
    from router.config import StaticReplica
    from state.model import ReplicaState
    from state.store import FleetReader

_log = logging.getLogger(__name__)

ASSUMED_CAPACITY_TOKENS: Final = 400_000
"""Of a configured replica whose cache nobody told the size of."""
LOGGED_AT_ONCE: Final = 10
"""Replicas that are ignored from now on and named, each in a line."""


class Member(Struct, frozen=True, kw_only=True):
    """One replica of the fleet.

    Members of one table whose ``identity`` is equal share the object. It is None for a configured
    replica, whose models are what its own ``/v1/models`` answers. ``is_registered``: a sidecar
    vouches for it; ``has_events``: and tells what it holds. ``can_fetch``: its engine takes KV
    pages from another one, and gives them. ``salts_tails``: it is told what of a prompt is public,
    and keeps apart by its salt what follows. ``rank``: it is one of several behind ``endpoint``.
    ``adapters`` has what the chains of each adapter start from that the replica has loaded.
    ``source``: who told of it.
    """

    replica: ReplicaId
    endpoint: Endpoint
    identity: ModelIdentity | None = None
    load: ReplicaLoad | None = None
    is_registered: bool = False
    has_events: bool = False
    is_draining: bool = False
    capacity_tokens: int | None = None
    can_fetch: bool = False
    salts_tails: bool = False
    rank: int | None = None
    adapters: Mapping[str, ModelIdentity] = NONE
    source: str = "configured"


class Pulse(Protocol):
    """What the health checks know of a replica."""

    def is_up(self, replica: ReplicaId) -> bool:
        """Return whether the replica may be sent requests."""
        ...

    def served_models(self, replica: ReplicaId) -> frozenset[str]:
        """Return the model names that its own ``/v1/models`` answered; empty when unknown."""
        ...


def dialled(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint by the address that is dialled, whatever name it is known by."""
    if endpoint.address is None:
        return endpoint
    return structs.replace(endpoint, host=endpoint.address, address=None)


def static_member(settings: StaticReplica) -> Member:
    """Return the member that a ``replicas:`` entry describes."""
    return Member(
        replica=ReplicaId(replica_name(settings)),
        endpoint=Endpoint.configured(settings.url),
        capacity_tokens=settings.kv_capacity_tokens or ASSUMED_CAPACITY_TOKENS,
    )


def registered_member(
    state: ReplicaState, adapters: Adapters | None = None, endpoint: Endpoint | None = None
) -> Member | None:
    """Return the member that a registry entry describes; None when its address is unusable.

    ``endpoint``: how it is dialled, where that was found out before.
    """
    record = state.record
    if endpoint is None:
        try:
            endpoint = checked(record, AddressRule())
        except ValueError:
            return None
    capacity = record.capacity_pages
    return Member(
        replica=record.replica,
        endpoint=endpoint,
        identity=record.identity,
        load=state.load,
        is_registered=True,
        has_events=record.has_events,
        is_draining=record.is_draining,
        capacity_tokens=None if capacity is None else capacity * record.page_tokens,
        can_fetch=record.can_fetch,
        salts_tails=record.salts_tails,
        rank=record.rank,
        adapters=(adapters or Adapters()).of(record),
        source="registered",
    )


class FleetTable:
    """The current members, rebuilt only when the registry changed."""

    def __init__(
        self,
        reader: FleetReader,
        configured: Iterable[StaticReplica],
        adapters: Sequence[AdapterSettings] = (),
        registration: RegistrationSettings = RegistrationSettings(),  # noqa: B008 - a frozen value
    ) -> None:
        self._reader = reader
        self.adapters = Adapters(adapters)
        given = tuple(configured)
        self._configured = tuple(static_member(settings) for settings in given)
        self._assumed = {replica_name(one) for one in given if one.kv_capacity_tokens is None}
        own = (member.endpoint for member in self._configured)
        self.registration = Registration(registration, own)
        self.registration.on_found = self.refresh
        self._found: tuple[Member, ...] = ()
        self._drained: frozenset[ReplicaId] = frozenset()
        self._seen: Mapping[ReplicaId, ReplicaState] | None = None
        self._members: dict[ReplicaId, Member] = {}
        self._identities: dict[ModelIdentity, ModelIdentity] = {}
        self._unusable: frozenset[ReplicaId] = frozenset()
        self._have_events = False

    @property
    def unusable(self) -> frozenset[ReplicaId]:
        """The registered replicas that are no members: nobody can be reached at their address."""
        self.members()
        return self._unusable

    def learn_capacity(self, replica: ReplicaId, tokens: int) -> None:
        """Take an engine's word for the size of a configured replica's cache, if none was given."""
        known = {member.replica: member.capacity_tokens for member in self._configured}
        if replica in self._assumed and known.get(replica) != tokens:
            self._configured = tuple(
                structs.replace(member, capacity_tokens=tokens)
                if member.replica == replica
                else member
                for member in self._configured
            )
            self._seen = None

    def drain(self, replicas: frozenset[ReplicaId]) -> None:
        """Let exactly these get nothing new, by an operator's word; whoever has requests ends them.

        A replica that leaves and comes back still drains.
        """
        self._drained = replicas
        self._seen = None

    def is_configured(self, member: Member) -> bool:
        """Return whether the operator's file has ``member``, by its name or its address."""
        address = dialled(member.endpoint)
        return any(
            own.replica == member.replica or dialled(own.endpoint) == address
            for own in self._configured
        )

    def adopt(self, found: tuple[Member, ...]) -> None:
        """Take these, and no others, as what other sources tell of the fleet."""
        self._found = found
        self._seen = None

    def members(self) -> Mapping[ReplicaId, Member]:
        """Return all members, live or not, in a stable order."""
        registered = self._reader.replicas()
        if registered is not self._seen:
            self._seen = registered
            self._members = self._merge(registered)
        return self._members

    @property
    def have_events(self) -> bool:
        """Whether any member tells what it holds."""
        self.members()
        return self._have_events

    def _merge(self, registered: Mapping[ReplicaId, ReplicaState]) -> dict[ReplicaId, Member]:
        known = dict(self._known(registered))
        merged = {member.replica: self._shared(member) for member in known.values()}
        self._identities = {m.identity: m.identity for m in merged.values() if m.identity}
        taken = {dialled(member.endpoint) for member in merged.values()}
        for member in (*self._configured, *self._found):
            address = dialled(member.endpoint)
            if address not in taken and member.replica not in merged:
                taken.add(address)
                merged[member.replica] = member
        ending = {dialled(member.endpoint) for member in self._found if member.is_draining}
        for replica in [r for r, m in merged.items() if ending and dialled(m.endpoint) in ending]:
            merged[replica] = structs.replace(merged[replica], is_draining=True)
        for replica in self._drained & merged.keys():
            merged[replica] = structs.replace(merged[replica], is_draining=True)
        self.adapters.settle(merged.values())
        self._have_events = any(member.has_events for member in merged.values())
        return merged

    def _known(
        self, registered: Mapping[ReplicaId, ReplicaState]
    ) -> Iterator[tuple[ReplicaId, Member]]:
        """Yield the registered replicas that can be dialled; note which ones never can."""
        taken = self.registration.taken(registered, self._members)
        unusable = registered.keys() - set(taken)
        for name in taken:
            state = registered[name]
            try:
                endpoint = self.registration.endpoint(state.record)
            except ValueError:
                unusable.add(name)
                continue
            member = endpoint and registered_member(state, self.adapters, endpoint)
            if member:
                yield name, member
        self._note_unusable(frozenset(unusable))

    def _note_unusable(self, unusable: frozenset[ReplicaId]) -> None:
        fresh = sorted(unusable - self._unusable)
        for replica in fresh[:LOGGED_AT_ONCE]:
            _log.warning("replica %s is ignored: its record has no usable address", replica)
        if len(fresh) > LOGGED_AT_ONCE:
            _log.warning("%d more replicas are ignored", len(fresh) - LOGGED_AT_ONCE)
        self._unusable = unusable

    def refresh(self) -> None:
        """Look at every record again."""
        self._seen = None

    def _shared(self, member: Member) -> Member:
        """Return ``member`` with the one object that stands for its identity in this table."""
        if member.identity is None:
            return member
        identity = self._identities.setdefault(member.identity, member.identity)
        return structs.replace(member, identity=identity)

    def candidates(
        self, model: str | None, pulse: Pulse, tried: Collection[ReplicaId] = ()
    ) -> list[Member]:
        """Return the members that may be sent a request for ``model`` (None: any model).

        Those that have it; where it may be loaded and none has, those of its base model.
        """
        able = self._able(model, pulse, tried)
        base = None if able or model is None else self.adapters.loadable_base(model)
        return able if base is None else self._able(base, pulse, tried)

    def _able(self, model: str | None, pulse: Pulse, tried: Collection[ReplicaId]) -> list[Member]:
        is_up, served_models = pulse.is_up, pulse.served_models
        return [
            member
            for member in self.members().values()
            if not member.is_draining
            and member.replica not in tried
            and is_up(member.replica)
            and (  # as ``serves`` has it
                model is None
                or (member.identity is not None and member.identity.model == model)
                or model in member.adapters
                or model in served_models(member.replica)
            )
        ]

    @staticmethod
    def served(member: Member, pulse: Pulse) -> frozenset[str]:
        """Return the models that ``member`` serves."""
        told = pulse.served_models(member.replica)
        own = told if member.identity is None else told | {member.identity.model}
        return own.union(member.adapters) if member.adapters else own

    def serves(self, member: Member, model: str, pulse: Pulse) -> bool:
        """Return whether ``member`` serves ``model``."""
        if member.identity is not None and member.identity.model == model:
            return True
        if model in member.adapters:
            return True
        return model in pulse.served_models(member.replica)

    def models(self, pulse: Pulse) -> set[str]:
        """Return every model that some member serves, live or not."""
        return set().union(*(self.served(member, pulse) for member in self.members().values()))

    def live_models(self, pulse: Pulse) -> set[str]:
        """Return every model that can be asked for now."""
        return set().union(
            *(
                self.served(member, pulse)
                for member in self.members().values()
                if pulse.is_up(member.replica)
            )
        )
