"""How far a replica's predictions come true: precision and recall of cached tokens, decayed.

*Precision*: of the tokens that were predicted to be cached, the part that the engine reported.
*Recall*: of the tokens that it reported, the part that was predicted. Both are kept in tokens and
in requests, where a request counts by the part of it that was right.

What was seen counts half after ``HALF_LIFE_REQUESTS`` further requests and half after
``HALF_LIFE_S``: so nothing is held against a replica for ever, even if nobody asks it any more.

A share says something only with enough evidence. For n independent values within [0, 1] whose mean
is at least q, the probability that their mean is at most p < q is below exp(-n KL(p || q))
(Hoeffding 1963, theorem 1). A replica is distrusted once that is below ``FALSE_ALARM`` for the
precision that a healthy one has, and after ``MIN_REQUESTS`` at least. With these values a replica
that never hits is known after 9 requests, and one that stops to hit after 18, whatever it did
before. One of a hundred predictions that fails is far below all this.

Pure: clock values are passed in, in seconds.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from msgspec import Struct

from state.model import ReplicaId

if TYPE_CHECKING:
    from collections.abc import Iterable

_K = TypeVar("_K")

HALF_LIFE_REQUESTS: Final = 64.0
HALF_LIFE_S: Final = 600.0
FALSE_ALARM: Final = 1e-4
MIN_REQUESTS: Final = 8.0
HEALTHY_PRECISION: Final = 0.95
HEALTHY_RECALL: Final = 0.8
"""Lower: blocks that others computed a moment ago are not known yet."""
HEALTHY_LENGTHS: Final = 0.95
RECOVERY_HITS: Final = 24
"""So many right ones in a row, and what was before is forgotten: something was repaired."""
RECENT: Final = 16
MAX_BOOKS: Final = 4_096
MAX_TENANTS: Final = 256

_DECAY: Final = 0.5 ** (1.0 / HALF_LIFE_REQUESTS)
_NATS: Final = -math.log(FALSE_ALARM)


class Ground(enum.StrEnum):
    """What a prediction was made of."""

    EVENTS = "events"
    """The engine's own events, of exact tokens."""
    PLACEMENTS = "placements"
    """Exact tokens that were sent there: the engine tells nothing, or the state is away."""
    BYTES = "bytes"
    """Bytes that were sent there: the tokens are not known."""


class Observation(Struct, frozen=True, gc=False):
    """One completed request: what was predicted and what the engine reported, in tokens.

    ``certain_tokens`` should have been found. Up to ``reach_tokens`` it may as well: what was still
    being computed, or lies in lower tiers. ``reported_tokens`` is None where the engine does not
    tell. A difference of ``tolerance_tokens`` is none. ``visible_tokens``: fewer cannot be seen by
    an index of whole blocks. ``has_recall`` is False where more may be found than anybody could
    have predicted. ``has_length``: the prompt had the predicted length; None where unknown.
    """

    certain_tokens: int
    reach_tokens: int
    reported_tokens: int | None
    tolerance_tokens: int = 0
    visible_tokens: int = 1
    has_recall: bool = True
    has_length: bool | None = None


class Share:
    """A decayed share of what was right, with the evidence for it.

    ``is_low`` is set once the share is significantly below ``healthy``. It ends when the share has
    reached that again, after ``RECOVERY_HITS`` right ones in a row, or when the evidence is old.
    """

    __slots__ = (
        "_healthy",
        "_of",
        "_right",
        "_right_of",
        "_seen_s",
        "_streak",
        "_weight",
        "is_low",
    )

    def __init__(self, healthy: float) -> None:
        self._healthy = healthy
        self._seen_s = 0.0
        self._streak = 0
        self.is_low = False
        """Judged with every wrong one, and with time: right ones alone lower nothing."""
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._weight = self._right = self._of = self._right_of = 0.0

    def add(self, right_tokens: float, of_tokens: float, now_s: float) -> None:
        """Count one request of which ``right_tokens`` of ``of_tokens`` > 0 were right."""
        decay, age_s = _DECAY, now_s - self._seen_s
        if age_s > 0.0:
            decay *= 0.5 ** (age_s / HALF_LIFE_S)
            self._seen_s = now_s
        self._weight = self._weight * decay + 1.0
        self._right = self._right * decay + right_tokens / of_tokens
        self._of = self._of * decay + of_tokens
        self._right_of = self._right_of * decay + right_tokens
        if right_tokens < of_tokens:
            self._streak = 0
            self.judge(now_s)
        elif self.is_low:
            self._streak += 1
            if self._streak >= RECOVERY_HITS:
                self._start_afresh()
            self.judge(now_s)

    def judge(self, now_s: float) -> None:
        """Set ``is_low`` as the evidence says."""
        requests, share = self.requests(now_s), self.by_request
        if requests < MIN_REQUESTS or share is None or share >= self._healthy:
            self.is_low, self._streak = False, 0
        elif not self.is_low:
            self.is_low = requests * divergence(share, self._healthy) > _NATS

    def requests(self, now_s: float) -> float:
        """Return how many requests the share stands for."""
        return self._weight * self._aged(now_s)

    @property
    def by_request(self) -> float | None:
        """The mean over requests, in [0, 1]; None before the first."""
        return self._right / self._weight if self._weight else None

    @property
    def by_token(self) -> float | None:
        """The share of tokens, in [0, 1]; None before the first."""
        return self._right_of / self._of if self._of else None

    def _aged(self, now_s: float) -> float:
        return 0.5 ** (max(0.0, now_s - self._seen_s) / HALF_LIFE_S) if self._weight else 1.0


class Recent(Struct, frozen=True, gc=False):
    """Tokens of one of the last requests; see ``Observation``."""

    certain_tokens: int
    reach_tokens: int
    reported_tokens: int


class Book:
    """What is known of the predictions of one kind for one replica and model, or for a tenant.

    ``predicted_tokens``, ``reported_tokens`` and ``matched_tokens`` are totals since the beginning.
    """

    __slots__ = (
        "lengths",
        "matched_tokens",
        "precision",
        "predicted_tokens",
        "recall",
        "recent",
        "reported_tokens",
    )

    def __init__(self) -> None:
        self.precision = Share(HEALTHY_PRECISION)
        self.recall = Share(HEALTHY_RECALL)
        self.lengths = Share(HEALTHY_LENGTHS)
        self.recent: deque[Recent] = deque(maxlen=RECENT)
        self.predicted_tokens = 0
        self.reported_tokens = 0
        self.matched_tokens = 0

    def observe(self, seen: Observation, now_s: float) -> None:
        """Count one request. A whole miss is one, however short the prompt is."""
        if seen.has_length is not None:
            self.lengths.add(float(seen.has_length), 1.0, now_s)
        reported = seen.reported_tokens
        if reported is None:
            return
        predicted = min(max(reported, seen.certain_tokens), seen.reach_tokens)
        matched = min(predicted, reported)
        self.predicted_tokens += predicted
        self.reported_tokens += reported
        self.matched_tokens += matched
        tolerance = seen.tolerance_tokens
        if predicted:
            is_right = matched > 0 and predicted - reported <= tolerance
            self.precision.add(predicted if is_right else matched, predicted, now_s)
        if reported and seen.has_recall:
            is_near = reported - predicted <= tolerance and predicted > 0
            is_right = is_near or reported - predicted < seen.visible_tokens
            self.recall.add(reported if is_right else matched, reported, now_s)
        if predicted or (reported and seen.has_recall):
            self.recent.append(Recent(seen.certain_tokens, seen.reach_tokens, reported))

    def judge(self, now_s: float) -> None:
        """Let evidence grow old."""
        for share in (self.precision, self.recall, self.lengths):
            share.judge(now_s)

    @property
    def is_in_trouble(self) -> bool:
        """Whether anything is significantly low."""
        return self.precision.is_low or self.recall.is_low or self.lengths.is_low

    @property
    def credit(self) -> float:
        """The part of a prediction that counts, in [0, 1]."""
        if not self.precision.is_low:
            return 1.0
        return min(1.0, self.precision.by_token or 0.0)


class BookKey(NamedTuple):
    """Whose predictions a book is about."""

    replica: ReplicaId
    model: str
    ground: Ground


class TrustRow(Struct, frozen=True, kw_only=True):
    """One book for people to read. Shares are None without evidence; tokens are totals.

    ``requests`` is the decayed number of requests behind the precision, ``hits`` that behind the
    recall. ``credit`` is the part of a prediction that counts in decisions.
    """

    ground: Ground
    replica: ReplicaId | None = None
    model: str | None = None
    tenant: str | None = None
    precision: float | None
    precision_by_request: float | None
    recall: float | None
    recall_by_request: float | None
    requests: float
    hits: float
    credit: float
    predicted_tokens: int
    reported_tokens: int
    matched_tokens: int


class TrustReport(Struct, frozen=True, kw_only=True):
    """What ``/admin/trust`` answers."""

    replicas: tuple[TrustRow, ...]
    tenants: tuple[TrustRow, ...]


class Trust:
    """All books of one router. ``credits`` holds those below 1, and is empty on a healthy fleet."""

    def __init__(self) -> None:
        self._books: OrderedDict[BookKey, Book] = OrderedDict()  # by last use
        self._tenants: OrderedDict[tuple[str, Ground], Book] = OrderedDict()
        self.credits: dict[BookKey, float] = {}

    def observe(
        self, key: BookKey, seen: Observation, now_s: float, tenant: str | None = None
    ) -> Book:
        """Count one request; return its replica's book."""
        book = _opened(self._books, key)
        book.observe(seen, now_s)
        if len(self._books) > MAX_BOOKS:
            dropped, _ = self._books.popitem(last=False)
            self.credits.pop(dropped, None)
        if self.credits or book.precision.is_low:
            self._credit(key, book)
        if tenant is not None:
            _opened(self._tenants, (tenant, key.ground)).observe(seen, now_s)
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        return book

    def tick(self, now_s: float) -> None:
        """Let evidence grow old: that can only end what was said."""
        for key, book in self._books.items():
            if book.is_in_trouble:
                book.judge(now_s)
                self._credit(key, book)
        for book in self._tenants.values():
            if book.is_in_trouble:
                book.judge(now_s)

    def forget(self, replica: ReplicaId) -> None:
        """Drop what is known of ``replica``: it left, or began another life."""
        for key in [key for key in self._books if key.replica == replica]:
            del self._books[key]
            self.credits.pop(key, None)

    def books(self) -> OrderedDict[BookKey, Book]:
        """Return every replica's books, those that were used last at the end."""
        return self._books

    def rows(self, now_s: float) -> list[TrustRow]:
        """Return every replica's books for people to read."""
        return [
            _row(book, now_s, ground=key.ground, replica=key.replica, model=key.model)
            for key, book in self._books.items()
        ]

    def tenant_rows(self, now_s: float) -> list[TrustRow]:
        """Return the same by tenant."""
        return [
            _row(book, now_s, ground=ground, tenant=tenant)
            for (tenant, ground), book in self._tenants.items()
        ]

    def _credit(self, key: BookKey, book: Book) -> None:
        credit = book.credit
        if credit < 1.0:
            self.credits[key] = credit
        elif self.credits:
            self.credits.pop(key, None)


def divergence(share: float, expected: float) -> float:
    """Return KL(share || expected) of two Bernoulli means in nats; ``expected`` within (0, 1)."""
    parts: Iterable[tuple[float, float]] = (share, expected), (1.0 - share, 1.0 - expected)
    return sum(p * math.log(p / q) for p, q in parts if p > 0.0)


def _opened(books: OrderedDict[_K, Book], key: _K) -> Book:
    """Return the book of ``key``, the newest one now."""
    book = books.get(key)
    if book is None:
        book = books[key] = Book()
    else:
        books.move_to_end(key)
    return book


def _row(
    book: Book,
    now_s: float,
    *,
    ground: Ground,
    replica: ReplicaId | None = None,
    model: str | None = None,
    tenant: str | None = None,
) -> TrustRow:
    return TrustRow(
        ground=ground,
        replica=replica,
        model=model,
        tenant=tenant,
        precision=book.precision.by_token,
        precision_by_request=book.precision.by_request,
        recall=book.recall.by_token,
        recall_by_request=book.recall.by_request,
        requests=round(book.precision.requests(now_s), 1),
        hits=round(book.recall.requests(now_s), 1),
        credit=book.credit,
        predicted_tokens=book.predicted_tokens,
        reported_tokens=book.reported_tokens,
        matched_tokens=book.matched_tokens,
    )
