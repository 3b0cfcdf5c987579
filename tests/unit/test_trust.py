"""How far predictions come true: what is said of it, from which evidence on, and for how long."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from router.trust import (
    HALF_LIFE_S,
    MAX_BOOKS,
    MAX_TENANTS,
    MIN_REQUESTS,
    RECOVERY_HITS,
    Book,
    BookKey,
    Ground,
    Observation,
    Trust,
)
from state.model import ReplicaId

KEY = BookKey(ReplicaId("a"), "m", Ground.EVENTS)
HIT = Observation(640, 640, 640)
MISS = Observation(640, 640, 0)


def book_of(*seen: Observation) -> Book:
    """Return a book of these requests, one per second."""
    book = Book()
    for second, one in enumerate(seen):
        book.observe(one, float(second))
    return book


def counted(book: Book) -> tuple[float | None, float | None]:
    return book.precision.by_token, book.recall.by_token


def test_precision_is_of_what_was_predicted_and_recall_of_what_was_reported() -> None:
    """Half of the prediction was there; a quarter of what was there had been predicted."""
    assert counted(book_of(Observation(640, 640, 320))) == (0.5, 1.0)
    assert counted(book_of(Observation(160, 160, 640))) == (1.0, 0.25)


def test_tokens_and_requests_are_counted_apart() -> None:
    """A long prompt weighs more in tokens only."""
    book = book_of(Observation(6_400, 6_400, 6_400), Observation(64, 64, 0))
    assert book.precision.by_token == pytest.approx(0.99, abs=0.001)
    assert book.precision.by_request == pytest.approx(0.5, abs=0.01)


def test_what_the_engine_does_not_report_is_never_counted() -> None:
    """An absent count of cached tokens is unknown, and no zero."""
    book = book_of(*[Observation(640, 640, None)] * 100)
    assert counted(book) == (None, None)
    assert book.credit == 1.0
    assert (book.predicted_tokens, book.reported_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("seen", "precision"),
    [
        (Observation(640, 640, 576, tolerance_tokens=64, visible_tokens=64), 1.0),
        (Observation(640, 640, 560, tolerance_tokens=64, visible_tokens=64), 560 / 640),
        (Observation(64, 64, 0, tolerance_tokens=64, visible_tokens=64), 0.0),
        (Observation(640, 640, 576), 0.9),
    ],
)
def test_one_block_is_tolerated_and_a_whole_miss_never(seen: Observation, precision: float) -> None:
    """Where blocks are larger than pages; a prompt of one block that is not found is a miss."""
    assert book_of(seen).precision.by_token == precision


@pytest.mark.parametrize(
    ("seen", "recall"),
    [
        (Observation(640, 640, 704, tolerance_tokens=64, visible_tokens=64), 1.0),
        (Observation(0, 0, 48, tolerance_tokens=64, visible_tokens=64), 1.0),
        (Observation(0, 0, 64, tolerance_tokens=64, visible_tokens=64), 0.0),
        (Observation(640, 640, 720, tolerance_tokens=64, visible_tokens=64), 640 / 720),
        (Observation(0, 0, 640, has_recall=False), None),
    ],
)
def test_less_than_a_block_cannot_be_known_before(seen: Observation, recall: float | None) -> None:
    """A part of a block is in no index; a block that was not predicted is missing."""
    assert book_of(seen).recall.by_token == recall


@pytest.mark.parametrize("reported", [256, 400, 640])
def test_what_may_still_be_computed_or_fetched_is_right_either_way(reported: int) -> None:
    """Pending tokens and those of lower tiers count as far as they were found, up to there."""
    book = book_of(Observation(256, 640, reported))
    assert counted(book) == (1.0, 1.0)
    assert book.predicted_tokens == reported


def test_what_is_certain_counts_in_full() -> None:
    """Lower tiers excuse nothing of what was in GPU memory."""
    assert book_of(Observation(256, 640, 128)).precision.by_token == 0.5


def test_a_healthy_replica_with_ordinary_misses_raises_no_alarm_in_100_000_requests() -> None:
    """One prediction of a hundred fails, in whole or in part: the credit is never touched."""
    rng = random.Random(20)
    book, lows = Book(), 0
    for number in range(100_000):
        found = 640
        if rng.random() < 0.01:
            found = rng.choice((0, 64, 320))
        book.observe(Observation(640, 640, found), number * 0.05)
        lows += book.precision.is_low or book.recall.is_low
    assert lows == 0
    assert book.credit == 1.0
    assert book.precision.by_request == pytest.approx(0.99, abs=0.02)


def test_a_replica_that_never_hits_is_distrusted_at_the_ninth_request() -> None:
    """A77: predicted hits that the engine reports as 0 cost the replica its credit."""
    assert book_of(*[MISS] * int(MIN_REQUESTS)).credit == 1.0
    assert book_of(*[MISS] * int(MIN_REQUESTS + 1)).credit == 0.0


def test_a_replica_that_hit_for_long_is_distrusted_within_twenty_misses() -> None:
    """A77: 20 predicted hits that were none, after 10,000 that were."""
    book = book_of(*[HIT] * 10_000)
    misses = 0
    while book.credit == 1.0:
        book.observe(MISS, 10_000.0)
        misses += 1
    assert misses <= 20
    assert 0.7 < book.credit < 0.95


def test_credit_is_the_share_of_tokens_that_come_true() -> None:
    """Half of every prediction: half of it counts."""
    assert book_of(*[Observation(640, 640, 320)] * 50).credit == 0.5


def test_credit_is_of_tokens_where_long_prompts_fail_more_often() -> None:
    """Half of the requests, and nearly all of the tokens."""
    book = book_of(*[Observation(64, 64, 64), Observation(6_400, 6_400, 0)] * 40)
    assert book.precision.by_request == pytest.approx(0.5, abs=0.01)
    assert book.credit == pytest.approx(0.01, abs=0.001)


@pytest.mark.parametrize("misses", [8, 100, 10_000])
def test_a_repaired_replica_is_trusted_again_after_two_dozen_hits(misses: int) -> None:
    """However long it was wrong."""
    book = book_of(*[MISS] * (misses + 1))
    assert book.credit == 0.0
    hits = 0
    while book.precision.is_low:
        book.observe(HIT, misses + 1.0)
        hits += 1
    assert hits <= RECOVERY_HITS
    assert book.credit == 1.0
    for _ in range(1_000):  # and stays so
        book.observe(HIT, misses + 1.0)
        assert book.credit == 1.0


def test_what_nobody_asks_any_more_is_forgiven() -> None:
    """Evidence halves with time: a replica without requests is not distrusted for ever."""
    trust = Trust()
    for _ in range(200):
        trust.observe(KEY, MISS, 0.0)
    assert trust.credits == {KEY: 0.0}
    trust.tick(2 * HALF_LIFE_S)
    assert trust.credits == {KEY: 0.0}
    trust.tick(4 * HALF_LIFE_S)
    assert trust.credits == {}


@pytest.mark.parametrize(("hits", "misses"), [(7, 1), (17, 3), (90, 10), (3, 2)])
def test_a_few_misses_among_some_requests_say_nothing_yet(hits: int, misses: int) -> None:
    """Below what is healthy, but chance explains it."""
    book = book_of(*[HIT] * hits, *[MISS] * misses)
    assert book.precision.by_request is not None
    assert book.precision.by_request < 0.95
    assert book.credit == 1.0


def test_what_was_seen_long_ago_weighs_less() -> None:
    """After an hour without requests four new ones outweigh a hundred old ones."""
    book = Book()
    for _ in range(100):
        book.observe(Observation(640, 640, 320), 0.0)
    for _ in range(4):
        book.observe(HIT, 6 * HALF_LIFE_S)
    assert book.precision.by_token is not None
    assert 0.85 < book.precision.by_token < 0.92


def test_a_tenants_evidence_grows_old_too() -> None:
    """What is shown of it ends with the half-life."""
    trust = Trust()
    for _ in range(50):
        trust.observe(KEY, MISS, 0.0, "acme")
    assert trust.tenant_rows(0.0)[0].credit == 0.0
    trust.tick(4 * HALF_LIFE_S)
    assert trust.tenant_rows(4 * HALF_LIFE_S)[0].credit == 1.0


def test_events_placements_and_bytes_are_judged_apart() -> None:
    """What bytes predict says nothing about an engine's events."""
    trust = Trust()
    for _ in range(50):
        trust.observe(KEY._replace(ground=Ground.BYTES), MISS, 0.0)
        trust.observe(KEY._replace(model="other"), HIT, 0.0)
        trust.observe(KEY, HIT, 0.0)
    assert trust.credits == {KEY._replace(ground=Ground.BYTES): 0.0}
    credits_shown = {(row.ground, row.model): row.credit for row in trust.rows(0.0)}
    assert credits_shown == {
        (Ground.BYTES, "m"): 0.0,
        (Ground.EVENTS, "m"): 1.0,
        (Ground.EVENTS, "other"): 1.0,
    }


def test_tenants_have_books_of_their_own_that_cost_no_replica_credit() -> None:
    """Rows by tenant: one whose salt differs misses everywhere, the others do not."""
    trust = Trust()
    for number in range(400):
        is_other = number % 20 == 0
        trust.observe(KEY, MISS if is_other else HIT, 0.0, "other" if is_other else "acme")
    assert trust.credits == {}
    rows = {row.tenant: row for row in trust.tenant_rows(0.0)}
    assert rows["acme"].precision == 1.0
    assert (rows["other"].precision, rows["other"].replica) == (0.0, None)


def test_a_replica_that_left_is_forgotten() -> None:
    """A new life of it begins trusted."""
    trust = Trust()
    other = KEY._replace(replica=ReplicaId("b"))
    for key in (KEY, other):
        for _ in range(20):
            trust.observe(key, MISS, 0.0)
    trust.forget(KEY.replica)
    assert trust.credits == {other: 0.0}
    assert list(trust.books()) == [other]


def test_models_and_tenants_without_end_take_bounded_memory() -> None:
    """B51: adapters by the thousand: the books that were used last are kept, with their credit."""
    trust = Trust()
    for number in range(MAX_BOOKS + 500):
        if number % 1_000 == 0:
            trust.observe(KEY, MISS, 0.0, "acme")
        key = KEY._replace(model=f"adapter-{number}")
        for _ in range(10):
            trust.observe(key, MISS, 0.0, f"tenant-{number}")
    assert len(trust.books()) == MAX_BOOKS
    assert KEY in trust.books()
    assert trust.credits.keys() == trust.books().keys() - {KEY}
    assert len(trust.tenant_rows(0.0)) == MAX_TENANTS


def test_a_clock_that_stands_still_or_goes_back_changes_no_share() -> None:
    """Two requests may end within one tick."""
    book = Book()
    for now_s in (10.0, 10.0, 9.0, 10.0):
        book.observe(Observation(640, 640, 320), now_s)
    assert book.precision.by_token == 0.5
    assert book.precision.requests(10.0) == pytest.approx(4.0, rel=0.05)


def test_noise_of_an_unlucky_replica_lowers_its_credit_to_what_it_earns() -> None:
    """Every other prediction fails at random: the credit moves about one half."""
    rng = random.Random(7)
    book = Book()
    tenths: Counter[int] = Counter()
    for _ in range(5_000):
        book.observe(rng.choice((HIT, MISS)), 0.0)
        tenths[round(book.credit * 10)] += 1
    assert tenths.most_common(1)[0][0] == 5
    assert sum(tenths[near] for near in (3, 4, 5, 6, 7)) > 0.98 * 5_000
