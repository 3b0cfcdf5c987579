"""What the operator's paths show of the fleet and of the router: all from memory, made when asked.

``warmroute replicas`` and ``warmroute doctor`` decode the same structs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs, to_builtins

from prompt.model import Unroutable
from router.availability import StandingView
from router.entrance import AdmissionView
from router.trust import TrustRow
from state.address import redact
from state.facts import facts_of, key_check
from state.model import ReplicaFacts, ReplicaLoad, Rung

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from router.chooser import DecidedBy
    from router.config import Config
    from router.fleet import FleetTable, Member
    from router.health import Health
    from router.trace import DecisionTrace
    from state.lease import LeaseBook
    from state.model import ReplicaId, ReplicaRecord
    from state.secret import ChainKeys
    from state.store import FleetReader

RECENT_DECISIONS: Final = 200
LONG_TOKENS: Final = 512
"""Prompts below are read as bytes on purpose where the engine would have to be asked."""


class ReplicaView(Struct, frozen=True, kw_only=True):
    """One replica as this router knows it. None: not known.

    ``registered``: a sidecar vouches for it, and ``facts`` is what that one detected. ``same_keys``
    tells whether the sidecar's block ids are those of this router. ``trust`` has a row for each
    model and kind of prediction. ``fault`` is what the last health check met with, if anything.
    ``standing`` says what live traffic makes of it; see docs/health.md. ``source`` told of it:
    registered, configured, file, dns or kubernetes.
    """

    replica: str
    endpoint: str
    up: bool
    draining: bool
    fault: str | None = None
    standing: StandingView | None = None
    registered: bool = False
    source: str = ""
    has_events: bool
    can_fetch: bool
    salts_tails: bool = False
    models: tuple[str, ...]
    inflight: int
    inflight_elsewhere: int
    load: ReplicaLoad | None
    resident_blocks: int
    capacity_tokens: int | None
    rank: int | None = None
    generation: str | None = None
    page_tokens: int | None = None
    block_tokens: int | None = None
    same_keys: bool | None = None
    trust: tuple[TrustRow, ...] = ()
    facts: ReplicaFacts | None = None


class ModelView(Struct, frozen=True, kw_only=True):
    """How this router reads the prompts of one model; see ``router.config.ModelSettings``.

    ``digest`` names the tokenizer and template that were loaded.
    """

    name: str
    tokenizer: str | None = None
    digest: str | None = None
    tokens: str | None = None


class RequestCounts(Struct, frozen=True, kw_only=True):
    """The last requests by what was known of them, at most ``RECENT_DECISIONS``.

    ``unroutable`` counts, by reason, those whose prefix could not be computed; ``inexact`` those of
    ``LONG_TOKENS`` and more that are known by their bytes only; ``short`` those with fewer tokens
    than a block. ``answered`` counts, by replica, those with a prefix that ended well and told
    usage; ``salted`` those of them with a cache salt, ``unreported`` those whose engine did not say
    what it found in its cache. What was refused before anything was chosen is not counted.
    """

    requests: int = 0
    unroutable: dict[str, int] = {}
    inexact: int = 0
    short: int = 0
    answered: dict[str, int] = {}
    salted: dict[str, int] = {}
    unreported: dict[str, int] = {}


class RouterView(Struct, frozen=True, kw_only=True):
    """The router itself. ``state`` is the store's URL without credentials, None for its own one.

    ``listen`` is where clients reach it.
    """

    rung: Rung
    state_age_s: float
    state: str | None
    lookup: str
    policy: str
    settings_version: int = 0
    models: tuple[ModelView, ...] = ()
    default_tokens: str = ""
    has_tenants: bool = False
    listen: str | None = None
    recent: RequestCounts = RequestCounts()
    admission: AdmissionView | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewParts:
    """What the views are made of; ``digests`` names the tokenizer of each model that has one."""

    config: Config
    digests: Callable[[], Mapping[str, str]]
    reader: FleetReader
    fleet: FleetTable
    health: Health
    leases: LeaseBook
    trace: DecisionTrace
    keys: ChainKeys
    facts: Callable[[], Mapping[ReplicaId, ReplicaFacts]]
    holdings: Callable[[], Mapping[ReplicaId, int]]
    trust: Callable[[], Sequence[TrustRow]]
    standing: Callable[[ReplicaId], StandingView]
    admission: Callable[[], AdmissionView] | None = None
    decided_by: Callable[[], DecidedBy] | None = None


class FleetView:
    """Makes the views; costs a request nothing."""

    def __init__(self, parts: ViewParts) -> None:
        self._parts = parts
        self._key_check = key_check(parts.keys)
        self.listen: str | None = None
        """Where clients reach the router, once it listens."""

    def replicas(self) -> list[ReplicaView]:
        """Return every replica, in the order of the fleet."""
        parts = self._parts
        holdings, facts = parts.holdings(), parts.facts()
        registered = parts.reader.replicas()
        trust: dict[ReplicaId, list[TrustRow]] = {}
        for row in parts.trust():
            if row.replica is not None:
                trust.setdefault(row.replica, []).append(row)
        records = {name: state.record for name, state in registered.items()}
        return [
            self._replica(
                member,
                holdings.get(name, 0),
                records.get(name),
                facts_of(records.get(name), facts),
                tuple(trust.get(name, ())),
            )
            for name, member in parts.fleet.members().items()
        ]

    def _replica(
        self,
        member: Member,
        resident_blocks: int,
        record: ReplicaRecord | None,
        facts: ReplicaFacts | None,
        trust: tuple[TrustRow, ...],
    ) -> ReplicaView:
        parts = self._parts
        foreign = parts.reader.foreign_leases().get(member.replica)
        identity = member.identity
        return ReplicaView(
            replica=member.replica,
            endpoint=member.endpoint.url,
            up=parts.health.is_up(member.replica),
            fault=parts.health.fault(member.replica),
            standing=parts.standing(member.replica),
            draining=member.is_draining,
            registered=member.is_registered,
            source=member.source,
            has_events=member.has_events,
            can_fetch=member.can_fetch,
            salts_tails=member.salts_tails,
            models=tuple(sorted(parts.fleet.served(member, parts.health))),
            inflight=parts.leases.inflight(member.replica),
            inflight_elsewhere=foreign.inflight if foreign is not None else 0,
            load=member.load,
            resident_blocks=resident_blocks,
            capacity_tokens=member.capacity_tokens,
            rank=member.rank,
            generation=record.generation if record is not None else None,
            page_tokens=record.page_tokens if record is not None else None,
            block_tokens=identity.block_tokens if identity is not None else None,
            same_keys=facts.key_check == self._key_check if facts is not None else None,
            trust=trust,
            facts=structs.replace(facts, key_check="") if facts is not None else None,
        )

    def router(self) -> RouterView:
        """Return what the router is told, and how good its knowledge is."""
        parts = self._parts
        config = parts.config
        rung, age_s = parts.reader.freshness()
        policy: object = config.policy
        version = 0
        if parts.decided_by is not None:
            policy, version = parts.decided_by()
        return RouterView(
            rung=rung,
            state_age_s=round(age_s, 3),
            state=redact(config.state.redis) if config.state.redis else None,
            lookup=config.state.lookup,
            policy=kind_of(policy),
            settings_version=version,
            models=tuple(self._models()),
            default_tokens=config.tokens.source,
            has_tenants=bool(config.tenants),
            listen=self.listen,
            recent=self.recent(),
            admission=parts.admission() if parts.admission is not None else None,
        )

    def _models(self) -> list[ModelView]:
        parts = self._parts
        configured = {model.name: model for model in parts.config.models}
        digests = parts.digests()
        shown = []
        for name in sorted({*configured, *digests}):
            model = configured.get(name)
            shown.append(
                ModelView(
                    name=name,
                    tokenizer=model.tokenizer if model is not None else None,
                    digest=digests.get(name),
                    tokens=model.tokens if model is not None else None,
                )
            )
        return shown

    def recent(self) -> RequestCounts:
        """Return the last requests by what was known of them."""
        unroutable: Counter[str] = Counter()
        answered: Counter[str] = Counter()
        unreported: Counter[str] = Counter()
        salted: Counter[str] = Counter()
        requests = inexact = short = 0
        members = self._parts.fleet.members().values()
        blocks = [m.identity.block_tokens for m in members if m.identity is not None]
        least_block = min(blocks, default=0)
        for record in self._parts.trace.latest(RECENT_DECISIONS):
            if not record.attempts:  # refused before anything was chosen
                continue
            requests += 1
            has_prefix = record.unroutable is not Unroutable.LOAD_ONLY
            has_usage = record.reported_prompt_tokens is not None
            if has_prefix and has_usage and record.status == HTTPStatus.OK:
                replica = record.attempts[-1].decision.replica
                answered[replica] += 1
                salted[replica] += record.is_salted
                unreported[replica] += record.reported_cached_tokens is None
            if record.unroutable is not None:
                unroutable[str(record.unroutable)] += 1
                continue
            inexact += not record.is_exact and record.prompt_tokens >= LONG_TOKENS
            short += record.prompt_tokens < least_block
        return RequestCounts(
            requests=requests,
            unroutable=dict(unroutable),
            inexact=inexact,
            short=short,
            salted=dict(salted),
            answered=dict(answered),
            unreported=dict(unreported),
        )


def kind_of(policy: object) -> str:
    """Return what a policy is called in the configuration."""
    return str(to_builtins(policy)["kind"])
