"""What ``warmroute doctor`` knows of a fleet, and what it says about it. No I/O."""

from __future__ import annotations

import enum

from msgspec import Struct

from router.diagnosis import Diagnosis
from router.replica_view import ReplicaView, RouterView
from sidecar.scrape import EngineMetrics
from sidecar.subscriber import EventSource
from state.model import EngineKind, ReplicaFacts, ReplicaRecord


class Code(enum.StrEnum):
    """What can be wrong; docs/doctor.md has a line for each."""

    CACHE_TOO_SMALL = "cache_too_small"
    CACHING_OFF = "caching_off"
    ENGINE_UNREACHABLE = "engine_unreachable"
    EVENTS_LOST = "events_lost"
    EVENTS_OFF = "events_off"
    EVENTS_SILENT = "events_silent"
    FLEET_DRAINED = "fleet_drained"
    HITS_UNREPORTED = "hits_unreported"
    INDEX_EMPTY = "index_empty"
    KEYS_DIFFER = "keys_differ"
    NO_SIDECAR = "no_sidecar"
    OTHER_STATE = "other_state"
    PAGE_MISMATCH = "page_mismatch"
    PREDICTION_WRONG = "prediction_wrong"
    PROMPTS_SHORT = "prompts_short"
    PROMPTS_UNREAD = "prompts_unread"
    REPLICA_EJECTED = "replica_ejected"
    REPLICA_LEFT = "replica_left"
    ROUTER_UNREACHABLE = "router_unreachable"
    SALT_MISMATCH = "salt_mismatch"
    STATE_NOT_LIVE = "state_not_live"
    STATE_UNREACHABLE = "state_unreachable"
    TEMPLATE_MISMATCH = "template_mismatch"
    TOKENIZER_MISMATCH = "tokenizer_mismatch"
    UNKNOWN_MEDIUM = "unknown_medium"
    UNTRUSTED = "untrusted"
    WRONG_EVENT_PORT = "wrong_event_port"


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that is wrong: what was seen, what it means, and what to do about it.

    ``replica`` is None for what concerns the whole fleet. ``fix`` is a command or a setting.
    """

    code: Code
    replica: str | None = None
    seen: str
    meaning: str
    fix: str


class Unchecked(Struct, frozen=True, kw_only=True):
    """Something that could not be looked at, and why."""

    what: str
    why: str


class EngineReport(Struct, frozen=True, kw_only=True):
    """What an engine answered. None: it does not tell.

    ``sources`` are the event endpoints that it names, empty when it publishes none; ``deaf`` those
    of them that this host cannot connect to. ``cache_queries`` and ``cache_hits`` are prompt
    tokens since its start; ``preemptions`` counts requests that lost their pages.
    """

    url: str
    kind: EngineKind = EngineKind.UNKNOWN
    version: str | None = None
    models: tuple[str, ...] = ()
    metrics: EngineMetrics
    sources: tuple[EventSource, ...] | None = None
    deaf: tuple[str, ...] = ()
    is_caching: bool | None = None
    does_report_hits: bool | None = None
    cache_queries: int | None = None
    cache_hits: int | None = None
    preemptions: int | None = None


class TokenCheck(Struct, frozen=True, kw_only=True):
    """One model's tokens by the router's own files and by the engine, over a few samples.

    ``texts`` and ``chats`` count the samples that were compared; ``other_texts`` and
    ``other_chats`` those that came out differently. ``first`` describes the first difference in
    numbers.
    """

    model: str
    directory: str
    texts: int = 0
    chats: int = 0
    other_texts: int = 0
    other_chats: int = 0
    first: str = ""


class ProbeResult(Struct, frozen=True, kw_only=True):
    """One prompt that was sent twice, in tokens.

    ``reported_tokens`` is what the engine said to have found of it the second time, None where it
    does not say. ``predicted_tokens`` is what the router expected to be found there, None where no
    router was asked.
    """

    prompt_tokens: int
    reported_tokens: int | None = None
    predicted_tokens: int | None = None


class ReplicaCase(Struct, frozen=True, kw_only=True):
    """One replica from all sides. None: nobody could be asked."""

    name: str
    url: str
    engine: EngineReport | None = None
    view: ReplicaView | None = None
    record: ReplicaRecord | None = None
    facts: ReplicaFacts | None = None
    tokens: tuple[TokenCheck, ...] = ()
    probe: ProbeResult | None = None

    @property
    def is_registered(self) -> bool:
        """Whether a sidecar vouches for it, as far as anybody told."""
        return self.record is not None or (self.view is not None and self.view.registered)


class Case(Struct, frozen=True, kw_only=True):
    """Everything that was gathered."""

    replicas: tuple[ReplicaCase, ...] = ()
    router: RouterView | None = None
    fleet: tuple[ReplicaView, ...] | None = None
    """All that the router knows, also those that were not named; None where nobody was asked."""
    diagnoses: tuple[Diagnosis, ...] = ()
    has_state: bool = False
    """The state store was read by the doctor itself."""
    findings: tuple[Finding, ...] = ()
    """Those of gathering: what could not be reached although it was named."""
    unchecked: tuple[Unchecked, ...] = ()


class Report(Struct, frozen=True, kw_only=True):
    """What the doctor says."""

    replicas: tuple[str, ...]
    findings: tuple[Finding, ...]
    unchecked: tuple[Unchecked, ...]
