"""Shares and credits stay shares, whatever engines report and however clocks move."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.diagnosis import Diagnoses
from router.trust import BookKey, Ground, Observation, Trust
from state.model import ReplicaId

TOKENS = st.integers(0, 2**31)
MAYBE = st.one_of(st.none(), TOKENS)
SEEN = st.builds(
    lambda certain, more, reported, tolerance, has_recall, has_length: Observation(
        certain, certain + more, reported, tolerance, max(1, tolerance), has_recall, has_length
    ),
    TOKENS,
    TOKENS,
    MAYBE,
    st.integers(0, 1024),
    st.booleans(),
    st.one_of(st.none(), st.booleans()),
)
KEYS = st.builds(
    BookKey,
    st.sampled_from([ReplicaId("a"), ReplicaId("b")]),
    st.just("m"),
    st.sampled_from(list(Ground)),
)
SECONDS = st.floats(0, 1e6)
STEPS = st.one_of(
    st.tuples(KEYS, st.lists(SEEN, min_size=1, max_size=40), SECONDS),
    st.tuples(st.none(), st.none(), SECONDS),
)


@given(st.lists(STEPS, max_size=20))
def test_every_share_and_credit_is_between_0_and_1(
    steps: list[tuple[BookKey | None, list[Observation] | None, float]],
) -> None:
    """And credits below 1 are exactly those of low precision; what is wrong has one finding."""
    trust, diagnoses = Trust(), Diagnoses(lambda: 0.0)
    for key, seen, now_s in steps:
        if key is None or seen is None:
            trust.tick(now_s)
            diagnoses.tick(trust.books(), now_s)
        else:
            for one in seen:
                book = trust.observe(key, one, now_s, "t")
                diagnoses.look(key, book, now_s)
        rows = [*trust.rows(now_s), *trust.tenant_rows(now_s)]
        for row in rows:
            shares = (row.precision, row.precision_by_request, row.recall, row.recall_by_request)
            assert all(share is None or 0.0 <= share <= 1.0 for share in shares)
            assert 0.0 <= row.credit <= 1.0
            assert row.matched_tokens <= min(row.predicted_tokens, row.reported_tokens)
        assert all(0.0 <= credit < 1.0 for credit in trust.credits.values())
        assert {k for k, book in trust.books().items() if book.credit < 1.0} == set(trust.credits)
        found = [(one.replica, one.ground) for one in diagnoses.active()]
        assert len(found) == len(set(found))
        troubled = {(k.replica, k.ground) for k, b in trust.books().items() if b.is_in_trouble}
        assert set(found) <= troubled
