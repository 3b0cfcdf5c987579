"""A canary in one router and between several, without sockets: split, counted, judged, ended."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest

from policies.least_loaded import LeastLoaded
from policies.round_robin import RoundRobin
from policies.weighted import Weighted
from prompt.opening import opening_of
from replay.decision import replay_decisions
from router.app import App
from router.canary_keeper import AUTHOR
from router.canary_setting import CanarySettings
from router.config import decode_config
from router.setting_life import SettingLife
from router.split import CANDIDATE, CONTROL, Assigned, Splitter
from router.state_reader import build_mirror
from router.trial import Trial
from state.canary_store import MemoryCanaryStore
from state.setting_store import MemorySettingStore
from state.store import StateError
from support.canary_traffic import record_of
from support.logged import Logging, open_log
from support.logged import record_of as logged_record_of

if TYPE_CHECKING:
    from pathlib import Path

    from state.setting_book import SettingDocument

BROKEN_WINDOW: Final = 20


class Stand:
    """Routers on one store, whose keepers look when the test says."""

    def __init__(self) -> None:
        self.settings, self.sums = MemorySettingStore(), AwayStore()
        self.lives: list[SettingLife] = []
        self.apps: list[App] = []

    def router(self) -> tuple[App, SettingLife]:
        app = App(
            decode_config({"policy": {"kind": "round_robin"}, "tenants": []}),
            {},
            build_mirror("redis://127.0.0.1:1"),
        )
        life = SettingLife(app, "redis://127.0.0.1:1", self.settings, self.sums)
        self.apps.append(app)
        self.lives.append(life)
        return app, life

    async def close(self) -> None:
        for app in self.apps:
            await app.tokens.close()
            app.prompts.close()
            await app.pool.close()


class AwayStore(MemoryCanaryStore):
    """May be away."""

    is_away = False

    async def exchange(self, epoch: str, router: str, counted: bytes) -> list[bytes]:
        """Fail, or do as told."""
        if self.is_away:
            message = "no route"
            raise StateError(message)
        return await super().exchange(epoch, router, counted)


@pytest.fixture
async def stand() -> Any:
    made = Stand()
    yield made
    await made.close()


async def begin(life: SettingLife, **more: Any) -> SettingDocument:
    canary = {"id": "c1", "started_unix_s": 4e9, "policy": {"kind": "least_loaded"}, "percent": 50}
    return await life.book.write(
        {"canary": canary | more},
        author="a",
        reason="r",
        unix_s=1.0,
        expected_version=life.book.version,
    )


def pass_by(app: App, requests: int, **candidate: Any) -> None:
    """Let requests end; ``candidate``: how those of its side did."""
    trial = app.canary.trial
    assert trial is not None
    for number in range(requests):
        routed: Any = type("Routed", (), {})()
        routed.trial = trial
        side = CANDIDATE if number % 2 else CONTROL
        routed.assigned = Assigned(side, number // 2 % 32)
        told = candidate if side is CANDIDATE else {}
        app.canary.note(record_of(**told), routed)


async def test_a_request_is_decided_by_its_sides_policy_on_the_same_snapshot() -> None:
    logging = Logging(RoundRobin())
    choosing = logging.choosing
    settings = CanarySettings(
        id="c", started_unix_s=0.0, policy=LeastLoaded(), percent=50.0, seed=1
    )
    trial = Trial(settings, "e", 4)
    choosing.chooser.adopt(RoundRobin(), 4, trial)
    splitter, sides = Splitter(settings), set()
    for number in range(40):
        routed = choosing.chooser.route(logging.decide(range(number, number + 300))[1].prompt)
        routed.opening = str(number).encode()
        choice = choosing.chooser.choose(routed, logging.members())
        assert choice is not None
        assert choice.request is not None
        assigned = splitter.assign(routed.opening, None)
        assert assigned is not None
        policy = LeastLoaded() if assigned.side is CANDIDATE else RoundRobin()
        assert choice.decided_by == (policy, 4)
        assert choice.side is assigned.side
        assert choice.decision == policy.pick(choice.request, choice.views)
        sides.add(choice.side)
    assert sides == {CONTROL, CANDIDATE}


async def test_a_decision_log_of_a_canary_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    logging = Logging(Weighted())
    candidate = CanarySettings(
        id="c", started_unix_s=0.0, policy=Weighted(w_queue=5.0), percent=50.0, seed=2
    )
    log, chooser = open_log(tmp_path / "d.jsonl", Weighted()), logging.choosing.chooser
    chooser.adopt(Weighted(), 1, Trial(candidate, "e", 1))
    for number in range(300):
        if number == 150:
            chooser.adopt(Weighted(), 2)  # it ended
        prompt = logging.decide(range(number % 9 * 1_000, number % 9 * 1_000 + 700))[1].prompt
        routed = chooser.route(prompt)
        routed.opening = str(number).encode()
        choice = chooser.choose(routed, logging.members())
        assert choice is not None
        log.add(logged_record_of([choice], routed), [choice], routed)
    await log.close()

    told = replay_decisions(tmp_path / "d.jsonl")

    assert (told.decisions, told.is_exact) == (300, True)
    assert len(told.logged_policies) == 2
    lines = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    sides = [line["side"] for line in lines if "side" in line]
    assert set(sides[:150]) == {"control", "candidate"}
    assert set(sides[150:]) == {None}


async def test_what_two_routers_counted_is_judged_together_and_one_rolls_back_for_both(
    stand: Stand,
) -> None:
    (one, first), (two, second) = stand.router(), stand.router()
    rails = {"ttft_mean": {"min_requests": 300}}
    await begin(first, guardrails=rails)
    await second.book.exchange()
    keepers = [life._open_desk()[2] for life in stand.lives]
    for app in (one, two):
        pass_by(app, 400, ttft_s=0.3)
    await keepers[0].tick()
    assert one.canary.is_splitting, "one alone has too few"
    await keepers[1].tick()
    assert not two.canary.is_splitting
    await first.book.exchange()
    assert not one.canary.is_splitting
    document = first.book.document
    assert document is not None
    assert (document.author, document.settings) == (AUTHOR, {})
    assert "rolled back: mean TTFT 3.000 times the control's" in document.reason
    assert document.verdict is not None
    assert document.verdict["candidate_requests"] == 400


async def test_a_burst_of_errors_ends_it_with_the_request_that_makes_it_one(stand: Stand) -> None:
    app, life = stand.router()
    await begin(life)
    pass_by(app, 39, outcome="failed", status=502, ttft_s=None)
    assert not app.canary.is_splitting
    assert app.canary._chooser.trial is None
    await life._open_desk()[2].tick()
    document = life.book.document
    assert document is not None
    assert "of the candidate failed, and 0 of" in document.reason
    assert app.canary.trial is None


@pytest.mark.parametrize(("split", "is_burst"), [("tenant", True), ("hash", False)])
def test_a_tenant_alone_ends_it_where_tenants_are_split_and_a_conversation_does_not(
    split: str,
    is_burst: bool,  # noqa: FBT001 - a case
) -> None:
    told = {"id": "c", "started_unix_s": 0.0, "percent": 50, "policy": {"kind": "least_loaded"}}
    trial = Trial(msgspec.convert(told | {"split": split}, CanarySettings), "e", 1)
    made = [trial.burst.add(7, is_candidate=True, has_failed=True) for _ in range(100)]
    assert any(made) is is_burst


async def test_one_that_is_cut_off_judges_its_own_and_tells_the_others_later(stand: Stand) -> None:
    app, life = stand.router()
    await begin(life)
    keeper = life._open_desk()[2]
    stand.sums.is_away = True
    real = stand.settings.read

    async def away() -> bytes | None:
        message = "no route"
        raise StateError(message)

    stand.settings.read = away  # type: ignore[method-assign]
    pass_by(app, 800, ttft_s=0.3)
    await keeper.tick()
    assert not app.canary.is_splitting
    assert life._open_desk()[1].view().state == "ending"
    assert keeper.fault == "no route"
    assert life.book.version == 1
    stand.settings.read = real  # type: ignore[method-assign]
    stand.sums.is_away = False
    await keeper.tick()
    assert life.book.version == 2
    assert life._open_desk()[1].view().state == "none"


@pytest.mark.parametrize(
    ("ttft_s", "at_end", "policy", "words"),
    [
        (0.1, "promote", "least_loaded", "promoted"),
        (0.1, "wait", "round_robin", "ended"),
        (0.109, "promote", "round_robin", "not promoted: not sure of"),
    ],
)
async def test_at_its_end_it_is_promoted_where_it_is_surely_within_all_guardrails_or_waits(
    stand: Stand, ttft_s: float, at_end: str, policy: str, words: str
) -> None:
    app, life = stand.router()
    rails: dict[str, Any] = {"imbalance": {"enabled": False}, "errors": {"limit": 0.1}}
    if "not sure" in words:
        rails["errors"]["min_requests"] = 10_000
    await begin(life, at_end=at_end, guardrails=rails, max_requests=2_000)
    pass_by(app, 2_000, ttft_s=ttft_s)
    await life._open_desk()[2].tick()
    document = life.book.document
    assert document is not None
    assert words in document.reason
    assert msgspec.to_builtins(life.live.policy)["kind"] == policy
    assert not app.canary.is_splitting
    assert life._open_desk()[1].view().state == ("none" if words == "promoted" else "waiting")


async def test_a_canary_whose_time_is_over_splits_no_more_without_anybody_telling(
    stand: Stand,
) -> None:
    app, life = stand.router()
    await begin(life, started_unix_s=0.0)
    assert not app.canary.is_splitting


async def test_another_change_of_the_settings_leaves_what_was_counted_and_a_policy_does_not(
    stand: Stand,
) -> None:
    app, life = stand.router()
    document = await begin(life)
    pass_by(app, 10)
    for settings, left in (({"health": {"fall": 9}}, 10), ({"policy": {"kind": "weighted"}}, 0)):
        await life.book.write(
            document.settings | settings,
            author="a", reason="r", unix_s=1.0, expected_version=life.book.version,
        )  # fmt: skip
        assert app.canary.trial is not None
        assert app.canary.trial.counter.sums.total == left
        assert app.canary.trial.decided_by.settings_version == life.book.version


def test_a_conversation_begins_with_the_same_in_each_turn() -> None:
    system, first = {"role": "system", "content": "s"}, {"role": "user", "content": "one"}
    later = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "two"}]

    def opening(**body: Any) -> bytes | None:
        return opening_of(json.dumps(body).encode())

    one = opening(model="m", messages=[system, first])
    assert one is not None
    assert one == opening(messages=[system, first, *later], stream=True)
    assert one != opening(messages=[system, {"role": "user", "content": "uno"}])
    assert opening(input=[first]) == opening(input=[first, *later])
    long = "x" * 5_000
    assert opening(prompt=long + "a") == opening(prompt=long + "b")
    assert opening(prompt="a") != opening(prompt="b")
    assert opening(prompt=[1, 2]) is not None
    assert opening(file="a") is None
    for bad in (b"", b"[]", b'{"messages": 1', b"\xff"):
        assert opening_of(bad) is None
