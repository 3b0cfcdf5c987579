from __future__ import annotations

from policies.baselines.dynamo import Dynamo
from policies.model import Reason
from support.snapshot import asked, decide, drawn, scores, terms, view


def test_the_fewest_blocks_to_prefill_and_to_decode_win() -> None:
    # 640 tokens, blocks of 64. a: (640 - 320) / 64 + (128 + 640) / 64 = 5 + 12.  b: 10 + 10.
    fleet = (view("a", 1, cached_tokens=320, held_tokens=128), view("b"))
    decision = decide(Dynamo(), asked(640), *fleet)
    assert terms(decision, "a") == {"prefill": 5.0, "decode": 12.0, "active": 0.0}
    assert scores(decision) == {"a": 17.0, "b": 20.0}
    assert (decision.replica, decision.reason) == ("a", Reason.PREFIX)


def test_a_context_that_decodes_drives_its_own_prefix_away() -> None:
    """The weakness of it: a block that decodes weighs as much as one to prefill."""
    # a: (640 - 576) / 64 + (640 + 640) / 64 = 1 + 20.  b: 10 + 10.
    fleet = (view("a", 1, cached_tokens=576, held_tokens=640), view("b"))
    decision = decide(Dynamo(), asked(640), *fleet)
    assert scores(decision) == {"a": 21.0, "b": 20.0}
    assert (decision.replica, decision.reason) == ("b", Reason.SPILL)


def test_prefill_under_way_counts_and_the_block_is_the_requests() -> None:
    # Blocks of 16. a: (160 + 320) / 16 + 320 / 16 = 30 + 20.
    decision = decide(Dynamo(), asked(320, block_tokens=16), view("a", backlog_tokens=160))
    assert scores(decision) == {"a": 50.0}


def test_the_credit_does_not_go_below_nothing() -> None:
    decision = decide(Dynamo(overlap_credit=2.0), asked(640), view("a", cached_tokens=576))
    assert terms(decision, "a")["prefill"] == 0.0


def test_a_lower_tier_counts_three_quarters_and_what_is_pending_not_at_all() -> None:
    # a: 640 - 128 - 0.75 * 256 = 320.  b: 640 - (384 - 256) = 512, and the rest is behind a gap.
    fleet = (
        view("a", cached_tokens=128, lower_tier_tokens=256),
        view("b", cached_tokens=384, pending_tokens=256, lower_tier_tokens=128),
    )
    decision = decide(Dynamo(), asked(640), *fleet)
    assert terms(decision, "a")["prefill"] == 5.0
    assert terms(decision, "b")["prefill"] == 8.0


def test_the_weights_scale_their_terms() -> None:
    policy = Dynamo(prefill_load_scale=0.5, active_request_weight=2.0)
    decision = decide(policy, asked(640), view("a", 3))
    assert terms(decision, "a") == {"prefill": 5.0, "decode": 10.0, "active": 6.0}


def test_equal_costs_are_drawn_and_a_silent_engine_changes_nothing() -> None:
    fleet = (view("a", 7, queued=None), view("b", queued=3), view("c", held_tokens=1))
    assert drawn(Dynamo(), 640, *fleet) == {"a", "b"}
    assert decide(Dynamo(), asked(640), *fleet).reason is Reason.LOAD
