"""Why predictions fail: one finding per replica and model, told once when it begins and ends.

The causes are told apart by what requests show:

``prompt_mismatch``  the engine counts other lengths of prompts than the router: another tokenizer
                     or chat template
``no_hits``          it reports nothing of what is predicted, ever
``constant_ratio``   it reports the same multiple of what is predicted, whatever the length
``low_precision``    it reports less than is predicted, in no simple way
``missing_events``   it reports more than is predicted, and what is predicted is right

A finding begins and ends with the significance of ``router.trust``, which is far apart for both. It
changes while it lasts only from one that says little to one that says more.

``GET /admin/diagnoses`` answers a ``DiagnosisReport``. No text of a finding holds a prompt.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct, structs

from router.trust import MIN_REQUESTS, RECENT, Book, BookKey, Ground, Recent
from state.model import ReplicaId

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_log = logging.getLogger(__name__)

ENDED_KEPT: Final = 64
PAST_KEPT: Final = 4_096
LOG_PAUSE_S: Final = 60.0
"""What begins again so soon after it ended is shown and not logged."""
NEWEST: Final = 12
"""Of the recent requests, those whose ratios are compared: older ones may have been right."""
NEARLY: Final = 0.9
"""What is no more than a page or a block short of a prediction is not what broke."""
EVEN_OCTAVES: Final = 0.25
"""How far ratios may spread, as a standard deviation, and be one constant."""
RATIO_OCTAVES: Final = 0.5
"""How far a ratio is from 1 at least: page sizes differ by factors of 2."""
VARIED_OCTAVES: Final = 0.5
"""How far lengths spread at least: of equal prompts every ratio is constant."""


class Kind(enum.StrEnum):
    """What is wrong; see the module. Also the label of ``warmroute_diagnosis``."""

    PROMPT_MISMATCH = "prompt_mismatch"
    NO_HITS = "no_hits"
    CONSTANT_RATIO = "constant_ratio"
    LOW_PRECISION = "low_precision"
    MISSING_EVENTS = "missing_events"


ADVICE: Final = {
    Kind.PROMPT_MISMATCH: (
        "Give models[].tokenizer the tokenizer.json and the chat template that this engine uses, "
        "or leave it out so that the engine is asked for tokens."
    ),
    Kind.NO_HITS: (
        "Check that prefix caching is on in this engine, that the sidecar follows the events of "
        "this engine and of no other, that nothing between router and engine changes cache_salt, "
        "and that the engine was not restarted or reset unseen."
    ),
    Kind.CONSTANT_RATIO: (
        "Check the page size: --page-tokens, --block-tokens and --events of the sidecar against "
        "the block size of this engine, and that cached_tokens counts tokens."
    ),
    Kind.LOW_PRECISION: (
        "Either the cache is too small for the load, so that blocks go between a decision and its "
        "prefill, or evictions are not told: check for lost removal events, and that the engine "
        "has the --capacity-pages that the sidecar announces."
    ),
    Kind.MISSING_EVENTS: (
        "Check that the sidecar still hears this engine (gaps, replay endpoint, high-water mark). "
        "Blocks that were cached before the sidecar began are learned from reports meanwhile."
    ),
}
_GENERAL: Final = frozenset({Kind.LOW_PRECISION, Kind.MISSING_EVENTS})


class Evidence(Struct, frozen=True, kw_only=True):
    """The numbers behind a diagnosis as it began; ``/admin/trust`` has those of now.

    ``requests`` and ``hits`` are decayed numbers of requests: with a prediction, with cached tokens
    reported. ``precision`` and ``recall`` are shares of tokens, ``other_lengths`` is the share of
    requests whose prompt had another length than predicted; None is unknown. ``recent_*`` are sums
    over the last ``recent_requests``; ``ratio`` is reported to predicted over these.
    """

    requests: float
    hits: float
    precision: float | None
    recall: float | None
    other_lengths: float | None
    recent_requests: int
    recent_predicted_tokens: int
    recent_reported_tokens: int
    ratio: float | None


class Diagnosis(Struct, frozen=True, kw_only=True):
    """One finding. ``finding`` and ``advice`` are sentences for people.

    ``times`` counts how often it began for this replica, model and ground. ``ended_unix_s`` and
    ``ended_because`` are None while it lasts.
    """

    kind: Kind
    replica: ReplicaId
    model: str
    ground: Ground
    since_unix_s: float
    finding: str
    advice: str
    evidence: Evidence
    times: int = 1
    ended_unix_s: float | None = None
    ended_because: str | None = None


class DiagnosisReport(Struct, frozen=True, kw_only=True):
    """What ``/admin/diagnoses`` answers: what lasts, and what ended lately, newest first."""

    active: tuple[Diagnosis, ...] = ()
    ended: tuple[Diagnosis, ...] = ()


class _Past(NamedTuple):
    ended_unix_s: float
    times: int


class Diagnoses:
    """The findings of one router."""

    def __init__(self, unix_clock: Callable[[], float]) -> None:
        self._unix_clock = unix_clock
        self._active: dict[BookKey, Diagnosis] = {}
        self._ended: deque[Diagnosis] = deque(maxlen=ENDED_KEPT)
        self._past: dict[tuple[BookKey, Kind], _Past] = {}

    def look(self, key: BookKey, book: Book, now_s: float) -> None:
        """Begin, change or end the finding about ``key``, as its book says now."""
        active = self._active.get(key) if self._active else None
        if active is None and not book.is_in_trouble:
            return
        kind = kind_of(key.ground, book)
        if active is not None:
            is_better = kind is not None and kind not in _GENERAL and active.kind in _GENERAL
            if _lasts(active.kind, book) and not is_better:
                return
            self._end(key, "predictions are right again" if kind is None else f"it is {kind}")
        if kind is not None:
            self._begin(key, kind, evidence_of(book, now_s))

    def tick(self, books: Mapping[BookKey, Book], now_s: float) -> None:
        """End what is too old to be said."""
        for key in list(self._active):
            book = books.get(key)
            if book is None:
                self._end(key, "nobody asks for it any more")
            else:
                self.look(key, book, now_s)

    def forget(self, replica: ReplicaId, why: str) -> None:
        """End what is said of ``replica``."""
        for key in [key for key in self._active if key.replica == replica]:
            self._end(key, why)

    def active(self) -> tuple[Diagnosis, ...]:
        """Return what lasts."""
        return tuple(self._active.values())

    def report(self) -> DiagnosisReport:
        """Return what lasts and what ended."""
        return DiagnosisReport(active=self.active(), ended=tuple(reversed(self._ended)))

    def _begin(self, key: BookKey, kind: Kind, evidence: Evidence) -> None:
        now_s = self._unix_clock()
        past = self._past.get((key, kind))
        diagnosis = Diagnosis(
            kind=kind,
            replica=key.replica,
            model=key.model,
            ground=key.ground,
            since_unix_s=now_s,
            finding=_finding(kind, evidence),
            advice=ADVICE[kind],
            evidence=evidence,
            times=1 if past is None else past.times + 1,
        )
        self._active[key] = diagnosis
        if past is None or now_s - past.ended_unix_s >= LOG_PAUSE_S:
            _log.warning(
                "diagnosis begins: replica=%s model=%s kind=%s %s %s",
                key.replica, key.model, kind.value, diagnosis.finding, diagnosis.advice,
            )  # fmt: skip

    def _end(self, key: BookKey, why: str) -> None:
        now_s = self._unix_clock()
        diagnosis = structs.replace(self._active.pop(key), ended_unix_s=now_s, ended_because=why)
        self._ended.append(diagnosis)
        past = self._past.get((key, diagnosis.kind))
        was_logged = past is None or diagnosis.since_unix_s - past.ended_unix_s >= LOG_PAUSE_S
        self._past[(key, diagnosis.kind)] = _Past(now_s, diagnosis.times)
        if len(self._past) > PAST_KEPT:
            del self._past[next(iter(self._past))]
        if was_logged:
            _log.info(
                "diagnosis ends: replica=%s model=%s kind=%s after %.0f s: %s",
                key.replica, key.model, diagnosis.kind.value, now_s - diagnosis.since_unix_s, why,
            )  # fmt: skip


def kind_of(ground: Ground, book: Book) -> Kind | None:
    """Return what is wrong by what the requests show; None where nothing is.

    What is known by placements alone may well be evicted unseen, and found where others sent it:
    that is no fault.
    """
    if book.lengths.is_low:
        return Kind.PROMPT_MISMATCH
    if book.precision.is_low and _never_hits(book.recent):
        return Kind.NO_HITS
    if ground is not Ground.EVENTS or not book.is_in_trouble:
        return None
    if _is_constant(book.recent):
        return Kind.CONSTANT_RATIO
    if len(book.recent) < RECENT or _has_just_broken(book.recent):
        return None  # a few more may say what it is
    return Kind.LOW_PRECISION if book.precision.is_low else Kind.MISSING_EVENTS


def evidence_of(book: Book, now_s: float) -> Evidence:
    """Return the numbers of a book."""
    lengths = book.lengths.by_request
    predicted = sum(one.reach_tokens for one in book.recent)
    reported = sum(one.reported_tokens for one in book.recent)
    return Evidence(
        requests=round(book.precision.requests(now_s), 1),
        hits=round(book.recall.requests(now_s), 1),
        precision=book.precision.by_token,
        recall=book.recall.by_token,
        other_lengths=None if lengths is None else 1.0 - lengths,
        recent_requests=len(book.recent),
        recent_predicted_tokens=predicted,
        recent_reported_tokens=reported,
        ratio=reported / predicted if predicted else None,
    )


def _lasts(kind: Kind, book: Book) -> bool:
    if kind is Kind.PROMPT_MISMATCH:
        return book.lengths.is_low
    if book.lengths.is_low:
        return False  # what explains the rest
    if kind is Kind.CONSTANT_RATIO:
        return book.precision.is_low or book.recall.is_low
    if kind is Kind.MISSING_EVENTS:
        return book.recall.is_low and not book.precision.is_low
    return book.precision.is_low


def _never_hits(recent: Sequence[Recent]) -> bool:
    """Return whether the last reports of predicted tokens were all 0."""
    told = [one.reported_tokens for one in recent if one.certain_tokens]
    return len(told) >= MIN_REQUESTS and not any(told[-int(MIN_REQUESTS) :])


def _has_just_broken(recent: Sequence[Recent]) -> bool:
    """Return whether all went wrong from some point on, and only a few requests did since."""
    wrong = [
        one.reported_tokens < NEARLY * one.certain_tokens for one in recent if one.certain_tokens
    ]
    return 0 < sum(wrong) < NEWEST and all(wrong[-sum(wrong) :])


def _is_constant(recent: Sequence[Recent]) -> bool:
    """Return whether reports are one multiple of predictions that differ among themselves."""
    pairs = [
        (math.log2(one.reach_tokens), math.log2(one.reported_tokens))
        for one in recent
        if one.reach_tokens and one.reported_tokens
    ][-NEWEST:]
    if len(pairs) < MIN_REQUESTS:
        return False
    mean, spread = _mean_and_spread([reported - predicted for predicted, reported in pairs])
    _, variety = _mean_and_spread([predicted for predicted, _ in pairs])
    return spread <= EVEN_OCTAVES and abs(mean) >= RATIO_OCTAVES and variety >= VARIED_OCTAVES


def _mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _finding(kind: Kind, evidence: Evidence) -> str:
    if kind is Kind.PROMPT_MISMATCH:
        share = 100.0 * (evidence.other_lengths or 0.0)
        return f"The engine counts another number of prompt tokens in {share:.0f} % of requests."
    told = f"{evidence.recent_reported_tokens} of {evidence.recent_predicted_tokens}"
    last = f"in the last {evidence.recent_requests} requests"
    if kind is Kind.CONSTANT_RATIO:
        ratio = evidence.ratio or 0.0
        return f"The engine reports {ratio:.2f} times the predicted cached tokens {last}: {told}."
    if kind is Kind.MISSING_EVENTS:
        share = 100.0 * (evidence.recall or 0.0)
        return f"Of the cached tokens that the engine reports, {share:.0f} % were known before."
    return f"The engine reports {told} predicted cached tokens {last}."
