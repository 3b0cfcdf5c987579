"""What was done to an engine behind its events' back, as its metrics tell.

An engine that is idle says nothing: vLLM announces a reset of its cache with its next step, and has
none while it sleeps. But it counts the HTTP calls that it answered, by path, and it shows that it
sleeps. So a drop of the cache that was counted, and that no event told of, is believed while the
engine has nothing to do; a busy one tells by itself, at once, and what failed there is no drop.

Weights that change in place are seen in the same way. No event ever tells of them.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from sidecar.event import ClearedPages

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sidecar.event import KvEvent
    from state.model import ReplicaLoad

HTTP_REQUESTS: Final = "http_requests_total"
SLEEP_STATE: Final = "vllm:engine_sleep_state"
ANSWERS: Final = "http_response_size_bytes_count"
ANSWERED_BYTES: Final = "http_response_size_bytes_sum"
_RESET: Final = "/reset_prefix_cache"
_DONE_BYTES: Final = len('{"success":true}')
"""What a reset answers; one that was refused, because requests hold pages, has one byte more."""
_DROPPING: Final = frozenset({_RESET, "/pause", "/release_kv_cache_memory"})
_SLEEPING: Final = frozenset({"/sleep"})
_CHANGING: Final = frozenset(
    {"/update_weights", "/finish_weight_update", "/update_weight_version", "/collective_rpc"}
)
"""The last one may be anything; ``reload_weights`` is one of its methods."""


class Deeds(Struct, frozen=True, kw_only=True):
    """Calls that an engine answered with success since its start, and whether it sleeps.

    ``keeps_memory``: it sleeps at level 0, and what it holds stays.
    """

    cache_drops: int = 0
    sleeps: int = 0
    weight_changes: int = 0
    is_asleep: bool = False
    keeps_memory: bool = False


class Loss(enum.Enum):
    """What is void of all that is known of an engine's pages."""

    NOTHING = "nothing"
    CACHE = "cache"
    WEIGHTS = "weights"


def deeds_of(
    requests: Iterable[tuple[Mapping[str, str], float]],
    sleep_states: Iterable[tuple[Mapping[str, str], float]] = (),
    answers: Iterable[tuple[Mapping[str, str], float]] = (),
    answered_bytes: Iterable[tuple[Mapping[str, str], float]] = (),
) -> Deeds:
    """Return what samples of the four names above show: labels and values."""
    counts = {_DROPPING: 0.0, _SLEEPING: 0.0, _CHANGING: 0.0}
    for labels, value in requests:
        is_done = labels.get("method") == "POST" and labels.get("status", "").startswith("2")
        for handlers in counts:
            if is_done and labels.get("handler") in handlers:
                counts[handlers] += value
    states = {labels.get("sleep_state"): value for labels, value in sleep_states}
    is_asleep = states.get("awake") == 0
    return Deeds(
        cache_drops=int(counts[_DROPPING]) - _refused(answers, answered_bytes),
        sleeps=int(counts[_SLEEPING]),
        weight_changes=int(counts[_CHANGING]),
        is_asleep=is_asleep,
        keeps_memory=is_asleep and not any(states.values()),
    )


def _refused(
    answers: Iterable[tuple[Mapping[str, str], float]],
    answered_bytes: Iterable[tuple[Mapping[str, str], float]],
) -> int:
    """Return how many resets were refused under a 200, which those who ask for them try again."""
    count, size_bytes = (
        int(sum(value for labels, value in samples if labels.get("handler") == _RESET))
        for samples in (answers, answered_bytes)
    )
    longer = size_bytes - count * _DONE_BYTES
    return longer if 0 <= longer <= count else 0


class DeedWatch:
    """Compares what an engine's events told with what its metrics count, look by look."""

    def __init__(self) -> None:
        self._known: Deeds | None = None
        self._heard = 0
        self._heard_before = 0
        self._last_sequence = -1
        self._owed_after: int | None = None
        """The last batch when a drop was found of which nothing was told yet."""

    def hear(self, sequence: int, events: Sequence[KvEvent]) -> None:
        """Note what one batch of events tells, live or replayed."""
        self._last_sequence = sequence
        if self._owed_after is not None and sequence > self._owed_after:
            self._owed_after = None  # it made a step, and told first of all what it had dropped
            return
        self._heard += sum(isinstance(event, ClearedPages) for event in events)

    def look(self, deeds: Deeds, load: ReplicaLoad) -> Loss:
        """Return what is lost by now; nothing at the first look at a process.

        A drop counts until the engine makes a step: a replay may bring back what was before it.
        A clear that was heard shortly before its call was counted is no reason to drop twice.
        """
        known, self._known = self._known, deeds
        if known is None or _began_anew(deeds, known):
            self._owed_after = None
            self._heard = self._heard_before = 0
            return Loss.NOTHING
        is_silent = deeds.is_asleep or not (load.running or load.queued)
        drops = deeds.cache_drops - known.cache_drops
        if not deeds.keeps_memory:
            drops += deeds.sleeps - known.sleeps
        if self._has_untold(drops) and is_silent:
            self._owed_after = self._last_sequence
        if deeds.weight_changes > known.weight_changes:
            return Loss.WEIGHTS
        return Loss.CACHE if is_silent and self._owed_after is not None else Loss.NOTHING

    def _has_untold(self, drops: int) -> bool:
        """Pay for ``drops`` with the clears that were heard since the look before the last one."""
        drops -= min(drops, self._heard_before)
        paid = min(drops, self._heard)
        self._heard_before, self._heard = self._heard - paid, 0
        return drops > paid


def _began_anew(deeds: Deeds, known: Deeds) -> bool:
    return deeds.cache_drops < known.cache_drops or deeds.sleeps < known.sleeps
