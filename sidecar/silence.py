"""Notices an engine that works but never publishes: a wrong port, or events that are off.

Silence alone proves nothing: an idle engine says nothing, nor does one that finds whole prompts in
its cache. So only an engine that was seen working and was never heard at all is suspect.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidecar.scrape import EngineMetrics
    from sidecar.subscriber import EventSource
    from state.model import ReplicaId

_LOG = logging.getLogger("warmroute.sidecar")


class Silence:
    """Follows one event source after another; ``timeout_s`` counts from the first work on."""

    def __init__(self, replica: ReplicaId, timeout_s: float) -> None:
        self._replica = replica
        self._timeout_s = timeout_s
        self._is_heard = False
        self._is_told = False
        self._prompt_tokens: int | None = None
        self._worked_s: float | None = None

    def begin(self) -> None:
        """Start over: another engine, or another source."""
        self._is_heard = self._is_told = False
        self._prompt_tokens = None
        self._worked_s = None

    def hear(self) -> None:
        """Note a batch of events."""
        self._is_heard = True

    def look(self, source: EventSource | None, metrics: EngineMetrics | None, now_s: float) -> bool:
        """Note what a scrape tells; return whether events are missing, and log it once."""
        if metrics is not None and self._works(metrics) and self._worked_s is None:
            self._worked_s = now_s
        is_due = self._worked_s is not None and now_s - self._worked_s >= self._timeout_s
        is_missing = is_due and source is not None and not self._is_heard
        if source is not None and is_missing and not self._is_told:
            _LOG.error(
                "no KV events: replica=%s works, and in %.0f s nothing came from %s; until it "
                "does, no prefix is known to be there. Are KV events on, and is this their port? "
                "(Prompts shorter than a page make none.)",
                self._replica,
                self._timeout_s,
                source.events,
            )
        elif self._is_told and not is_missing:
            _LOG.info("KV events arrive: replica=%s", self._replica)
        self._is_told = is_missing
        return is_missing

    def _works(self, metrics: EngineMetrics) -> bool:
        before, self._prompt_tokens = self._prompt_tokens, metrics.prompt_tokens
        now = metrics.prompt_tokens
        has_grown = before is not None and now is not None and now > before
        return has_grown or bool(metrics.load.running)
