from __future__ import annotations

from collections import Counter

from policies.baselines.session_hash import SessionHash
from policies.model import Reason, RoutingRequest
from support.snapshot import asked, decide, drawn, scores, view

FOUR = tuple(view(name) for name in "abcd")


def owner(request: RoutingRequest, fleet: tuple[str, ...] | str = "abcd") -> str:
    return decide(SessionHash(), request, *(view(name) for name in fleet)).replica


def test_a_session_stays_whatever_the_load_and_whoever_holds_its_prompt() -> None:
    """The weakness of it: nothing bounds what a popular session brings its replica."""
    home = owner(asked(100, session="s1"))
    fleet = tuple(
        view(name, 500, backlog_tokens=10**6) if name == home else view(name, cached_tokens=99)
        for name in "abcd"
    )
    decision = decide(SessionHash(), asked(100, 9, session="s1"), *fleet)
    assert (decision.replica, decision.reason) == (home, Reason.RULE)


def test_every_router_has_the_same_owners() -> None:
    """Pinned: xxh3-64 of (session, replica), the highest wins; another hash moves all sessions."""
    assert [owner(asked(100, session=f"s{i}")) for i in range(8)] == list("bddcdbcb")
    decision = decide(SessionHash(), asked(100, session="s0"), *FOUR)
    assert scores(decision)[decision.replica] == min(scores(decision).values())


def test_sessions_are_spread_evenly() -> None:
    owners = Counter(owner(asked(100, session=f"s{i}")) for i in range(2_000))
    sigma = (2_000 * 0.25 * 0.75) ** 0.5
    assert all(abs(owners[name] - 500) <= 4 * sigma for name in "abcd")


def test_a_replica_that_leaves_moves_only_its_own_sessions() -> None:
    moved = 0
    for i in range(400):
        request = asked(100, session=f"s{i}")
        before, after = owner(request), owner(request, "abc")
        assert before in {after, "d"}
        moved += before == "d"
    assert 60 < moved < 140  # a quarter


def test_without_a_session_the_first_blocks_decide() -> None:
    # 1, 2, 3, 4 are the keys of the first 4 blocks; what follows does not matter.
    homes = {owner(asked(900, n, prefix_keys=(1, 2, 3, 4, 5 + n))) for n in range(32)}
    assert len(homes) == 1
    assert {owner(asked(900, n, prefix_keys=(1, 2, 3, 4 + n))) for n in range(64)} == set("abcd")


def test_a_prompt_of_fewer_blocks_goes_by_its_last_one() -> None:
    homes = {owner(asked(200, n, prefix_keys=(1, 2))) for n in range(32)}
    assert len(homes) == 1


def test_the_session_goes_before_the_prefix() -> None:
    same = {owner(asked(300, n, session="s1", prefix_keys=(n,))) for n in range(32)}
    assert same == {owner(asked(300, session="s1"))}


def test_a_prompt_without_any_name_goes_anywhere() -> None:
    assert drawn(SessionHash(), 10, *FOUR) == set("abcd")


def test_a_session_may_be_named_in_any_characters() -> None:
    assert owner(asked(100, session="\ud800 Sitzung")) in set("abcd")
    assert owner(asked(100, session="")) == owner(asked(100, 5, session=""))
