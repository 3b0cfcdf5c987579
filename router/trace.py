"""The last decisions, kept in memory so that each can be explained afterwards. No prompt text."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from msgspec import Struct

from policies.model import Decision
from state.model import Rung

if TYPE_CHECKING:
    from collections.abc import Iterator


class Attempt(Struct, frozen=True):
    """One try on one replica: the decision behind it and how it ended.

    ``kv_source`` is the replica that it was told to fetch KV pages from. ``credits`` are those of
    candidates that are trusted in part: what their predictions were multiplied by.
    ``promised_tokens`` is what the chosen one's would be if it were trusted, None where it is.
    ``is_hedge``: it began beside the one before it, which had not answered for long.
    """

    decision: Decision
    outcome: str
    error: str | None = None
    kv_source: str | None = None
    credits: dict[str, float] = {}
    promised_tokens: int | None = None
    is_hedge: bool = False


class DecisionRecord(Struct, frozen=True):
    """One request as the router saw it. Unknown is None. One is made per request, by place.

    ``request_id`` is the router's own; ``client_request_id`` is what the client called it.
    ``unroutable`` says why no prefix could be computed, when none could. ``held_s``: what it waited
    in the router for its replica. ``tenant`` is whose key came with it; ``is_salted``: its body has
    a cache salt. ``settings_version`` is what the last decision was made by; 0: the file alone.
    ``side`` is that of a canary, None where there is none.
    """

    request_id: str
    client_request_id: str | None
    ordinal: int
    seed: int
    started_unix_s: float
    path: str
    model: str | None
    policy: str
    prompt_tokens: int
    is_exact: bool
    unroutable: str | None
    rung: Rung
    state_age_s: float
    hot_prefix_tokens: int | None
    hot_holders: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    status: int
    outcome: str
    ttft_s: float | None
    duration_s: float
    reported_prompt_tokens: int | None
    reported_cached_tokens: int | None
    reported_output_tokens: int | None = None
    held_s: float = 0.0
    tenant: str | None = None
    is_salted: bool = False
    trace_id: str | None = None
    settings_version: int = 0
    side: str | None = None


class DecisionTrace:
    """A ring of the last ``kept`` records, found by either request id."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._by_client_id: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: DecisionRecord) -> None:
        """Keep ``record``, dropping the oldest beyond the bound."""
        self._records[record.request_id] = record
        if record.client_request_id is not None:
            self._by_client_id[record.client_request_id] = record.request_id
        while len(self._records) > self._kept:
            request_id, oldest = self._records.popitem(last=False)
            alias = oldest.client_request_id
            if alias is not None and self._by_client_id.get(alias) == request_id:
                del self._by_client_id[alias]

    def find(self, request_id: str) -> DecisionRecord | None:
        """Return the record of the router's id, or the last one of a client's id."""
        record = self._records.get(request_id)
        if record is None:
            record = self._records.get(self._by_client_id.get(request_id, ""))
        return record

    def latest(self, count: int) -> Iterator[DecisionRecord]:
        """Yield up to ``count`` records, newest first."""
        for _, record in zip(range(count), reversed(self._records.values()), strict=False):
            yield record
