"""A policy that is asked and not followed: what is told of it, and that it costs no request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry

from policies.contrast import predicted_ttft_ms
from policies.expected_ttft import ExpectedTtft
from policies.least_loaded import LeastLoaded
from policies.model import ReplicaView
from policies.prefill import PrefillCost
from policies.round_robin import RoundRobin
from policies.weighted import Weighted
from router.config import ConfigError, decode_config
from router.error import NotFoundError
from router.running_mean import BATCH, MIN_BATCHES
from router.shadow_policy import QUEUED, ShadowDesk, ShadowSettings, open_shadow
from state.model import ReplicaId
from support.fleet import until
from support.logged import Logging
from warmroute.shadow import lines_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from policies.union import AnyPolicy
    from router.chooser import Choice
    from router.request import Request
    from router.shadow_policy import ShadowPolicy

FOREVER_S = 1e9


class Rig:
    """A chooser whose decisions a shadow policy is told of; time passes by ``step_s``."""

    def __init__(self, policy: AnyPolicy, active: AnyPolicy | None = None, **settings: Any) -> None:
        self.logging = Logging(active or ExpectedTtft())
        self.registry = CollectorRegistry()
        self.now_s = 0.0
        self.step_s = 0.0
        shadow = open_shadow(
            ShadowSettings(policy=policy, **settings),
            lambda: self.logging.choosing.chooser.decided_by,
            self.registry,
            self._clock,
        )
        self.shadow: ShadowPolicy = shadow
        self.choices: list[Choice] = []

    def _clock(self) -> float:
        self.now_s += self.step_s
        return self.now_s

    def decide(self, count: int) -> None:
        """Decide so many requests, of which the shadow policy is told when they end."""
        for _ in range(count):
            choices, routed = self.logging.decide_any()
            self.choices.append(choices[0])
            self.shadow.note(f"r{routed.ordinal}", choices[0])

    def count(self, answer: str) -> float:
        labels = {"answer": answer}
        return self.registry.get_sample_value("warmroute_shadow_decisions_total", labels) or 0.0


def ttft_change_ms(choice: Choice, policy: AnyPolicy) -> float:
    """Return by how much another policy's choice would change the predicted TTFT."""
    assert choice.request is not None
    made = policy.pick(choice.request, choice.views)
    assert made is not None
    tokens, cost = choice.request.prompt_tokens, ExpectedTtft().prefill
    by_name = {view.replica: view for view in choice.views}
    before, after = by_name[choice.decision.replica], by_name[made.replica]
    return predicted_ttft_ms(after, tokens, cost) - predicted_ttft_ms(before, tokens, cost)


def asked(rig: Rig, requests: int) -> None:
    for _ in range(requests // 100):
        rig.decide(100)
        rig.shadow.ask(FOREVER_S)


def test_the_same_policy_agrees_with_itself_always() -> None:
    rig = Rig(ExpectedTtft())
    asked(rig, 400)
    report = rig.shadow.report()
    assert (report.policy, report.active) == ("expected_ttft", "expected_ttft")
    assert (report.overall.decisions, report.overall.same_replica) == (400, 400)
    assert (report.overall.ttft_change_ms.mean, report.overall.ttft_change_ms.high) == (0.0, 0.0)
    assert report.worst == ()
    assert (rig.count("same"), rig.count("moved")) == (400.0, 0.0)


@pytest.mark.parametrize("policy", [RoundRobin(), LeastLoaded(), Weighted()])
def test_another_policy_is_told_apart_by_what_its_choices_would_cost(policy: AnyPolicy) -> None:
    rig = Rig(policy)
    asked(rig, 400)
    same, ttft_ms, hits = 0, 0.0, 0.0
    for choice in rig.choices:
        assert choice.request is not None
        made = policy.pick(choice.request, choice.views)
        assert made is not None
        by_name = {view.replica: view for view in choice.views}
        before, after = by_name[choice.decision.replica], by_name[made.replica]
        tokens = choice.request.prompt_tokens
        same += before is after
        ttft_ms += ttft_change_ms(choice, policy)
        hits += (after.cached_tokens - before.cached_tokens) / tokens
    report = rig.shadow.report()
    assert 0 < report.overall.same_replica == same < 400
    assert report.overall.ttft_change_ms.mean == pytest.approx(ttft_ms / 400)
    assert report.overall.hit_change_ratio.mean == pytest.approx(hits / 400)
    assert report.overall.ttft_change_ms.low is not None
    assert sum(side.decisions for side in report.reasons.values()) == 400
    assert sum(side.same_replica for side in report.reasons.values()) == same
    assert len(report.reasons) > 1
    assert rig.count("moved") == 400 - same


def test_the_worst_are_those_that_it_slows_most_with_the_terms_of_both() -> None:
    rig = Rig(RoundRobin())
    asked(rig, 300)
    worst = rig.shadow.report().worst
    changes = [one.ttft_change_ms for one in worst]
    every = [ttft_change_ms(choice, RoundRobin()) for choice in rig.choices]
    assert changes == sorted(every, reverse=True)[:10]
    assert changes[-1] > 0
    for one in worst:
        assert one.active.replica != one.shadow.replica
        assert one.active.own is not None
        assert one.active.other is not None
        assert one.active.other.replica == one.shadow.replica
        assert sum(one.active.own.terms.values()) == pytest.approx(one.active.own.score)
    text = "\n".join(lines_of(rig.shadow.report()))
    assert worst[0].request_id in text
    assert "round_robin beside expected_ttft (settings 0): 300 decisions" in text
    assert " to " not in next(line for line in text.splitlines() if line.startswith("all "))
    assert f"from {BATCH * MIN_BATCHES} decisions of a row on, are 95 % intervals" in text
    asked(rig, 100)
    text = "\n".join(lines_of(rig.shadow.report()))
    assert " to " in next(line for line in text.splitlines() if line.startswith("all "))


def test_the_yardstick_is_the_queue_and_the_prefill_at_the_replicas_speed() -> None:
    cost = PrefillCost(token_ms=1.0, attention_pair_ms=0.0)
    view = ReplicaView(ReplicaId("a"), cached_tokens=100, lower_tier_tokens=50, backlog_ms=30.0)
    assert predicted_ttft_ms(view, 400, cost) == 280.0
    fast = ReplicaView(ReplicaId("a"), backlog_ms=30.0, speed=2.0)
    assert predicted_ttft_ms(fast, 400, cost) == 215.0
    assert predicted_ttft_ms(view, 150, cost) == 31.0


def test_other_settings_begin_the_comparison_anew_and_older_decisions_are_left_out() -> None:
    rig = Rig(LeastLoaded())
    rig.decide(50)
    rig.shadow.ask(FOREVER_S)
    late, _ = rig.logging.decide_any()
    rig.logging.choosing.chooser.adopt(LeastLoaded(), 3)
    rig.shadow.note("late", late[0])
    rig.decide(20)
    rig.shadow.note("late", late[0])
    rig.shadow.ask(FOREVER_S)
    report = rig.shadow.report()
    assert (report.settings_version, report.active) == (3, "least_loaded")
    assert (report.overall.decisions, report.overall.same_replica) == (20, 20)
    rig.logging.choosing.chooser.adopt(ExpectedTtft(), 0)  # the store's settings went away
    rig.decide(10)
    rig.shadow.ask(FOREVER_S)
    assert rig.shadow.report().overall.decisions == 10


def test_a_policy_is_started_replaced_and_stopped_while_requests_come() -> None:
    rig = Rig(LeastLoaded())
    rig.decide(5)
    rig.shadow.adopt(ShadowSettings(policy=RoundRobin()))
    rig.decide(7)
    rig.shadow.ask(FOREVER_S)
    assert (rig.shadow.report().policy, rig.shadow.report().overall.decisions) == ("round_robin", 7)
    rig.shadow.adopt(ShadowSettings(policy=RoundRobin(), sample=0.5))  # the comparison goes on
    assert rig.shadow.report().overall.decisions == 7
    rig.decide(5)
    rig.shadow.adopt(ShadowSettings(policy=RoundRobin(), enabled=False))
    rig.decide(5)
    rig.shadow.ask(FOREVER_S)
    with pytest.raises(NotFoundError, match="warmroute shadow start"):
        rig.shadow.report()
    rig.shadow.adopt(ShadowSettings(policy=RoundRobin()))
    assert rig.shadow.report().overall.decisions == 0


async def test_the_task_of_a_shadow_that_was_off_asks_as_soon_as_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.shadow_policy.TICK_S", 0.001)
    rig = Rig(LeastLoaded(), enabled=False)
    task = asyncio.create_task(rig.shadow.run())
    await asyncio.sleep(0)
    rig.shadow.adopt(ShadowSettings(policy=LeastLoaded()))
    rig.decide(3)

    async def are_asked() -> bool:
        return rig.shadow.report().overall.decisions == 3

    await until(are_asked, "three answers", 30)
    task.cancel()


def test_it_takes_no_more_time_than_it_may_and_what_it_has_none_for_is_counted() -> None:
    rig = Rig(LeastLoaded())
    rig.decide(QUEUED + 30)
    rig.step_s = 0.001
    rig.shadow.ask(0.0045)
    assert rig.shadow.report().overall.decisions == 5
    rig.shadow.ask(0.0)
    assert rig.shadow.report().overall.decisions == 6
    assert rig.shadow.report().skipped == 30
    assert rig.count("skipped") == 30
    rig.shadow.ask(FOREVER_S)
    assert rig.shadow.report().overall.decisions == QUEUED


def test_a_sample_is_about_as_large_as_asked() -> None:
    rig = Rig(LeastLoaded(), sample=0.25)
    asked(rig, 1_000)
    assert 200 <= rig.shadow.report().overall.decisions <= 300
    assert rig.shadow.report().skipped == 0


async def test_without_a_policy_there_is_no_shadow_and_operators_are_told(
    anything: Request,
) -> None:
    registry = CollectorRegistry()
    decided_by: Callable[[], Any] = Rig(LeastLoaded()).logging.choosing.chooser.__class__
    shadow = open_shadow(ShadowSettings(), decided_by, registry, lambda: 0.0)
    [family] = registry.collect()
    assert {sample.value for sample in family.samples} == {0.0}
    with pytest.raises(NotFoundError, match=r"shadow\.policy"):
        await ShadowDesk(shadow).answer(anything)


@pytest.fixture
def anything() -> Request:
    return None  # type: ignore[return-value] # what is asked is not looked at


@pytest.mark.parametrize(
    ("shadow", "key"),
    [
        ({"policy": {"kind": "smg_tree"}}, r"shadow\.policy"),
        ({"policy": {"kind": "session_hash"}}, r"shadow\.policy"),
        ({"policy": {"kind": "what"}}, r"shadow\.policy"),
        ({"sample": 1.5}, r"shadow\.sample"),
        ({"cpu_fraction": 0}, r"shadow\.cpu_fraction"),
    ],
)
def test_wrong_settings_are_refused_with_the_key(shadow: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        decode_config({"shadow": shadow})


def test_a_policy_that_needs_notes_is_asked_beside_one_that_has_them_made() -> None:
    raw = {"policy": {"kind": "smg_tree"}, "shadow": {"policy": {"kind": "preble"}}}
    assert decode_config(raw).shadow.policy is not None
