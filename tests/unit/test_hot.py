from __future__ import annotations

import random
import time
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import pytest

from policies.hot import HeatMap, HotSettings
from policies.sketch import FORKS, PrefixSketch, SketchBounds
from state.model import BlockId, ReplicaId
from support.fleet_model import BLOCK_TOKENS, ModelPrompt, model_prompt

if TYPE_CHECKING:
    from policies.model import Heat

EIGHT = [ReplicaId(f"r{i}") for i in range(8)]
MANY = [ReplicaId(f"r{i}") for i in range(32)]


def observe(
    heat_map: HeatMap, prompt: ModelPrompt, now_s: float, replicas: list[ReplicaId] | None = None
) -> Heat | None:
    return heat_map.observe(prompt.chain, prompt.prompt_tokens, replicas or EIGHT, now_s).heat


def test_heat_sits_at_the_fork_behind_each_system_prompt_and_not_at_the_common_header() -> None:
    """All share 16 blocks; A has two thirds of the traffic, B the rest; tails are unique."""
    heat_map = HeatMap(HotSettings())
    last: dict[str, Heat | None] = {}
    for index in range(900):
        which = "B" if index % 3 == 2 else "A"
        prompt = model_prompt(("header", 16 * 64), (which, 80 * 64), (f"tail{index}", 640))
        last[which] = observe(heat_map, prompt, index / 9)
    a, b = last["A"], last["B"]
    assert a is not None
    assert b is not None
    assert a.prefix_tokens == b.prefix_tokens == 96 * BLOCK_TOKENS
    assert a.rate_per_s == pytest.approx(6.0, rel=0.1)
    assert b.rate_per_s == pytest.approx(3.0, rel=0.1)
    assert len(a.holders) >= len(b.holders) > 1


def test_a_header_alone_is_hot_only_where_its_traffic_forks_right_behind_it() -> None:
    heat_map = HeatMap(HotSettings())
    heat = None
    for index in range(200):
        prompt = model_prompt(("header", 16 * 64), (f"tail{index}", 5_000))
        heat = observe(heat_map, prompt, index / 20)
    assert heat is not None
    assert heat.prefix_tokens == 16 * 64
    assert heat.holders == set(EIGHT), "what everybody sends is held by everybody"


def test_heat_sits_at_the_end_of_a_shared_system_prompt() -> None:
    """A14: 3,000 shared tokens and unique tails."""
    heat_map = HeatMap(HotSettings())
    heats = [
        observe(heat_map, model_prompt(("system", 3_000), (f"user{i}", 300)), i / 20)
        for i in range(1_000)
    ]
    assert heats[:7] == [None] * 7
    assert all(heat is not None for heat in heats[8:])
    assert {heat.prefix_tokens for heat in heats if heat is not None} == {46 * BLOCK_TOKENS}


def test_a_small_common_step_behind_a_hot_prompt_is_no_unit_of_its_own() -> None:
    """Three greetings of 128 tokens each behind one system prompt: the prompt stays the unit."""
    heat_map = HeatMap(HotSettings())
    heat = None
    for index in range(300):
        greeting = (f"greeting{index % 3}", 128)
        prompt = model_prompt(("system", 3_008), greeting, (f"u{index}", 200))
        heat = observe(heat_map, prompt, index / 20)
    assert heat is not None
    assert heat.prefix_tokens == 3_008


def test_a_fork_inside_a_known_prompt_keeps_what_was_counted() -> None:
    heat_map = HeatMap(HotSettings())
    for index in range(40):
        observe(heat_map, model_prompt(("common", 4_096), ("first", 1_024)), index / 20)
    heat = observe(heat_map, model_prompt(("common", 4_096), ("second", 1_024)), 2.0)
    assert heat is not None
    assert heat.prefix_tokens == 4_096
    assert heat.rate_per_s == pytest.approx(41 / 5, rel=0.1)


def test_a_growing_agent_session_is_not_a_hot_prefix() -> None:
    heat_map = HeatMap(HotSettings())
    for turn in range(300):
        prompt = model_prompt(("session", 10_000 + 320 * turn))
        assert observe(heat_map, prompt, turn * 0.5) is None


def test_many_sessions_heat_their_common_prompt_and_not_themselves() -> None:
    heat_map = HeatMap(HotSettings())
    heat = None
    for turn in range(60):
        for session in range(20):
            prompt = model_prompt(("system", 2_048), (f"s{session}", 1_000 + 320 * turn))
            heat = observe(heat_map, prompt, turn * 2.0 + session * 0.1)
    assert heat is not None
    assert heat.prefix_tokens == 2_048


def test_a_prompt_repeated_by_many_is_hot_to_its_end() -> None:
    heat_map = HeatMap(HotSettings())
    prompt = model_prompt(("same", 4_096))
    heats = [observe(heat_map, prompt, i * 0.1) for i in range(100)]
    last = heats[-1]
    assert last is not None
    assert last.prefix_tokens == 4_096


def test_cold_uniform_traffic_is_never_hot() -> None:
    heat_map = HeatMap(HotSettings())
    for index in range(3_000):
        prompt = model_prompt(("template", 64), (f"p{index}", 3_000))
        assert observe(heat_map, prompt, index / 50) is None


def test_many_lukewarm_prefixes_are_not_hot() -> None:
    heat_map = HeatMap(HotSettings())
    draws = random.Random(4)
    for index in range(3_000):
        prompt = model_prompt((f"p{draws.randrange(400)}", 2_000), (f"u{index}", 200))
        assert observe(heat_map, prompt, index / 20) is None


@pytest.mark.parametrize(("rate_per_s", "holders"), [(0.5, 0), (3.0, 3), (6.0, 6), (60.0, 32)])
def test_the_number_of_holders_follows_rate_times_cost(rate_per_s: float, holders: int) -> None:
    """4,096 tokens at 8,000 tokens/s and half a replica's share: about rate x 1.02 replicas."""
    heat_map = HeatMap(HotSettings())
    heat = None
    other = 0
    for index in range(int(rate_per_s * 120)):
        now_s = index / rate_per_s
        for _ in range(max(1, int(600 / rate_per_s))):
            other += 1
            observe(heat_map, model_prompt((f"other{other % 997}", 64)), now_s, MANY)
        prompt = model_prompt(("hot", 4_096), (f"u{index}", 128))
        heat = observe(heat_map, prompt, now_s, MANY)
    if holders == 0:
        assert heat is None
    else:
        assert heat is not None
        assert abs(len(heat.holders) - holders) <= 1


def test_a_quarter_of_the_traffic_gets_a_quarter_of_a_large_fleet() -> None:
    """A07: the holders of a prefix with 25 % of all requests carry no more than their part."""
    heat_map = HeatMap(HotSettings())
    fleet = [ReplicaId(f"r{i}") for i in range(300)]
    heat = None
    for index in range(1_200):
        is_hot = index % 4 == 0
        prompt = model_prompt(("hot", 2_000) if is_hot else (f"p{index}", 640), (f"u{index}", 100))
        answer = observe(heat_map, prompt, index / 20, fleet)
        heat = answer if is_hot else heat
    assert heat is not None
    assert 70 <= len(heat.holders) <= 100


def test_holders_are_stable_when_a_replica_leaves() -> None:
    heat_map = HeatMap(HotSettings(prefill_tokens_per_s=40_000.0))
    heat = None
    for index in range(200):
        observe(heat_map, model_prompt((f"other{index}", 640)), index / 8)
        prompt = model_prompt(("hot", 4_096), (f"u{index}", 128))
        heat = observe(heat_map, prompt, index / 8)
    assert heat is not None
    assert 1 < len(heat.holders) < 8
    gone = min(heat.holders)
    rest = [replica for replica in EIGHT if replica != gone]
    after = observe(heat_map, model_prompt(("hot", 4_096), ("last", 128)), 25.0, rest)
    assert after is not None
    assert len(heat.holders - after.holders) == 1


def test_different_prefixes_get_different_holders() -> None:
    heat_map = HeatMap(HotSettings(prefill_tokens_per_s=20_000.0))
    holders: Counter[ReplicaId] = Counter()
    for index in range(3_200):
        which = index % 16
        prompt = model_prompt((f"hot{which}", 4_096), (f"u{index}", 128))
        heat = observe(heat_map, prompt, index / 80)
        if index >= 3_184:
            assert heat is not None
            holders.update(heat.holders)
    assert len(holders) == 8


def test_alternating_hotspots_do_not_grow_their_holder_sets() -> None:
    """A17: A and B alternate every 10 s for 5 min; holders change at most twice in 30 s."""
    heat_map = HeatMap(HotSettings())
    sizes: dict[str, list[tuple[float, int]]] = {"A": [], "B": []}
    for index in range(300 * 8):
        now_s = index / 8
        which = "AB"[int(now_s // 10) % 2]
        prompt = model_prompt((which, 2_000), (f"u{index}", 50))
        heat = observe(heat_map, prompt, now_s, MANY)
        sizes[which].append((now_s, len(heat.holders) if heat is not None else 1))
    for seen in sizes.values():
        settled = [(now_s, size) for now_s, size in seen if now_s >= 30.0]
        changes = [now_s for (_, before), (now_s, after) in pairwise(settled) if before != after]
        assert max(size for _, size in settled) == settled[0][1], "never more than at first"
        assert all(sum(start <= at < start + 30 for at in changes) <= 2 for start in changes)
        assert settled[-1][1] < settled[0][1]


def test_noise_of_an_even_rate_does_not_move_holders() -> None:
    """Arrivals at random, on average 5 a second: about 5 holders, seldom changed."""
    draws = random.Random(8)
    heat_map = HeatMap(HotSettings())
    now_s, sizes = 0.0, []
    for index in range(6_000):
        now_s += draws.expovariate(30.0)
        if draws.random() >= 1 / 6:
            observe(heat_map, model_prompt((f"p{index}", 64)), now_s, MANY)
            continue
        heat = observe(heat_map, model_prompt(("hot", 4_096), (f"u{index}", 64)), now_s, MANY)
        if now_s > 60:
            assert heat is not None
            sizes.append(len(heat.holders))
    assert 4 <= min(sizes) <= max(sizes) <= 9
    assert sum(before != after for before, after in pairwise(sizes)) <= 4


def test_holders_stay_when_the_rate_falls_a_little_and_go_when_it_halves() -> None:
    heat_map = HeatMap(HotSettings())
    now_s, index, sizes = 0.0, 0, []
    for rate_per_s in (6.0, 5.0, 2.5):
        end_s = now_s + 150.0
        heat = None
        while now_s < end_s:
            index += 1
            now_s += 1 / rate_per_s
            for other in range(8):
                observe(heat_map, model_prompt((f"p{index % 100}/{other}", 64)), now_s, MANY)
            heat = observe(heat_map, model_prompt(("hot", 4_096), (f"u{index}", 64)), now_s, MANY)
        assert heat is not None
        sizes.append(len(heat.holders))
    assert sizes[0] == sizes[1] == 7
    assert sizes[2] < 6


def test_a_hot_prefix_cools_down_slowly_and_is_forgotten_after_silence() -> None:
    heat_map = HeatMap(HotSettings())
    prompt = model_prompt(("hot", 4_096))
    for index in range(400):
        observe(heat_map, prompt, index / 20)
    full = observe(heat_map, prompt, 20.1)
    soon = observe(heat_map, prompt, 40.0)
    assert full is not None
    assert soon is not None
    assert soon.holders == full.holders
    assert observe(heat_map, prompt, 1_000.0) is None


def test_a_flash_crowd_gets_holders_within_a_second() -> None:
    heat_map = HeatMap(HotSettings())
    for index in range(2_000):
        observe(heat_map, model_prompt((f"p{index}", 1_000)), index / 20)
    crowd = model_prompt(("new", 30_000))
    heats = [observe(heat_map, crowd, 100.0 + index / 20) for index in range(20)]
    last = heats[-1]
    assert last is not None
    assert len(last.holders) == 8


def test_one_replica_has_nobody_to_share_with() -> None:
    heat_map = HeatMap(HotSettings())
    prompt = model_prompt(("hot", 4_096))
    assert all(observe(heat_map, prompt, i / 50, EIGHT[:1]) is None for i in range(100))


def test_a_prompt_without_a_full_block_has_no_heat() -> None:
    heat_map = HeatMap(HotSettings())
    assert all(heat_map.observe((), 10, EIGHT, i / 50).heat is None for i in range(100))


def test_a_coarser_granularity_is_told_and_not_guessed() -> None:
    heat_map = HeatMap(HotSettings())
    chain = model_prompt(("hot", 1_024)).chain
    arrivals = [heat_map.observe(chain, 4_200, EIGHT, i / 20, 256) for i in range(50)]
    heats = [arrival.heat for arrival in arrivals]
    last = heats[-1]
    assert last is not None
    assert last.prefix_tokens == 4_096


def test_prompts_that_fork_at_every_block_cost_a_bounded_number_of_steps() -> None:
    bounds = SketchBounds(
        half_life_s=30.0, settled_arrivals=8.0, max_nodes=4_096, max_blocks=100_000
    )
    sketch = PrefixSketch(bounds, 0.0)
    chain = model_prompt(("p", 500 * 64)).chain
    sketch.count(chain, 0.0)
    for length in range(499, 0, -1):
        assert len(sketch.count(chain[:length], 0.0)) <= FORKS
    assert len(sketch.count(chain, 0.0)) <= FORKS


def test_the_sketch_stays_within_its_bounds_and_keeps_what_is_hot() -> None:
    heat_map = HeatMap(HotSettings(max_nodes=64, max_blocks=4_096))
    hot = 0
    for index in range(2_000):
        if index % 10 == 0:
            prompt = model_prompt(("hot", 2_048), (f"u{index}", 640))
            hot += observe(heat_map, prompt, index / 50) is not None
        else:
            assert observe(heat_map, model_prompt((f"p{index}", 3_200)), index / 50) is None
    assert hot >= 180


def test_prompts_that_come_back_outlive_prompts_that_do_not() -> None:
    bounds = SketchBounds(half_life_s=30.0, settled_arrivals=8.0, max_nodes=64, max_blocks=4_096)
    sketch = PrefixSketch(bounds, 0.0)
    arrivals: list[float] = []
    for index in range(400):
        sketch.count(model_prompt((f"once{index}", 640)).chain, index / 100)
        path = sketch.count(model_prompt((f"again{index % 20}", 640)).chain, index / 100)
        arrivals.append(path[-1].arrivals)
    assert min(arrivals[-20:]) > 15


def test_a_long_prompt_costs_little() -> None:
    """Measured 6 to 19 us for 500 blocks; the bound leaves room for a busy machine."""
    draws = random.Random(1)
    system = tuple(BlockId(draws.randbytes(16)) for _ in range(46))
    prompts = [
        system + tuple(BlockId(draws.randbytes(16)) for _ in range(454)) for _ in range(1_000)
    ]
    heat_map = HeatMap(HotSettings())
    best_s = float("inf")
    for batch in range(10):
        start_s = time.thread_time()
        for index in range(batch * 100, batch * 100 + 100):
            heat_map.observe(prompts[index], 32_000, EIGHT, index / 30)
        best_s = min(best_s, (time.thread_time() - start_s) / 100)
    assert best_s < 100e-6


@pytest.mark.parametrize(
    "settings",
    [{"share": 0}, {"share": 1.5}, {"half_life_s": 0}, {"max_nodes": 1}, {"min_arrivals": 1}],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(settings, type=HotSettings)
