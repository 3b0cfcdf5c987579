"""Every policy on every workload, load, fleet and cache: what the table of docs/grid.md is made of.

All policies of a cell get the same requests at the same times (paired seeds), and so do its bounds:
*pooled*, the same replicas on one shared memory of their common size, and *infinite*, the same with
room for the whole trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

from policies.baselines.aibrix import AIBrix
from policies.baselines.bounded_hash import BoundedHash
from policies.baselines.dynamo import Dynamo
from policies.baselines.kthena import Kthena
from policies.baselines.least_work import LeastWork
from policies.baselines.llm_d import LlmD, LlmDPrecise
from policies.baselines.loadaware import LoadAware
from policies.baselines.mooncake import Mooncake
from policies.baselines.session_hash import SessionHash
from policies.baselines.smg import SmgEvent, SmgTree
from policies.expected_ttft import ExpectedTtft
from policies.hold import HoldSettings
from policies.least_loaded import LeastLoaded
from policies.power_of_two import PowerOfTwo
from policies.round_robin import RoundRobin
from policies.uniform import Uniform
from policies.weighted import Weighted
from replay.router import cost_at_speed_one
from replay.setting import Fault, FleetSettings
from replay.simulate import simulate
from state.model import BlockId  # noqa: TC001 - a field's type

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.model import Policy
    from policies.prefill import PrefillCost
    from replay.outcome import Outcome, ReplayRun
    from replay.trace import TraceRequest

LOADS: Final = {"light": 0.15, "middle": 0.3, "saturating": 0.45}
"""Prefill that even one endless cache would not save, as a share of the fleet's time."""
CACHES: Final = {"S": (440_000, 0), "M": (1_080_000, 0), "L": (440_000, 3_000_000)}
"""Tokens of device and host memory per replica."""
FLEETS: Final = (4, 8, 16)
POOLED: Final = "pooled"
INFINITE: Final = "infinite"
PULL_TOKEN_MS: Final = 1e3 * 327_680 / 12.5e9
"""A token of the 70B model's KV at 12.5 GB/s."""
BLOCKS: Final = 20
"""Parts of a run, by arrival, whose sums are kept for intervals."""
SLO_TTFT_S: Final = 2.0
SLO_TPOT_S: Final = 0.1


class Cell(Struct, frozen=True, kw_only=True):
    """One condition. ``scenario`` is what else is wrong with the fleet, "" for nothing."""

    workload: str
    load: str
    replicas: int
    cache: str
    scenario: str = ""

    @property
    def name(self) -> str:
        """The cell in a few words."""
        parts = [self.workload, self.load, f"{self.replicas} replicas", f"cache {self.cache}"]
        return ", ".join([*parts, self.scenario] if self.scenario else parts)


class Figures(Struct, frozen=True, kw_only=True):
    """What is kept of one run. ``block_sums_s`` are sums of TTFT, ``block_counts`` requests."""

    requests: int
    failed: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    tpot_s: float
    hit: float
    imbalance: float
    in_slo: float
    held_s: float
    block_sums_s: tuple[float, ...]
    block_counts: tuple[int, ...]


def contenders(cost: PrefillCost) -> dict[str, tuple[Policy, HoldSettings]]:
    """Return every policy by its name in the table, with its queue.

    Preble is not among them: too much of it is approximated to be judged here.
    """
    direct = HoldSettings(enabled=False)
    ours = ExpectedTtft(prefill=cost)
    queued = HoldSettings(enabled=True)
    named: dict[str, Policy] = {
        "expected_ttft": ours,
        "weighted": Weighted(),
        "mooncake": Mooncake(prefill=cost),
        "llm_d": LlmD(),
        "llm_d_precise": LlmDPrecise(),
        "aibrix": AIBrix(),
        "dynamo": Dynamo(),
        "smg_event": SmgEvent(),
        "smg_tree": SmgTree(),
        "loadaware": LoadAware(),
        "kthena": Kthena(),
        "bounded_hash": BoundedHash(),
        "session_hash": SessionHash(),
        "least_work": LeastWork(),
        "least_loaded": LeastLoaded(),
        "power_of_two": PowerOfTwo(),
        "random": Uniform(),
        "round_robin": RoundRobin(),
    }
    table = {name: (policy, direct) for name, policy in named.items()}
    table["expected_ttft+queue"] = (ours, queued)
    return table


def bounds(cost: PrefillCost) -> dict[str, tuple[Policy, HoldSettings]]:
    """Return the bounds by name: how each shares its work is that of the best policy."""
    ours = ExpectedTtft(prefill=cost)
    direct = HoldSettings(enabled=False)
    return {POOLED: (ours, direct), INFINITE: (ours, direct)}


def prefill_work_s(requests: Sequence[TraceRequest], block_tokens: int, cost: PrefillCost) -> float:
    """Return the prefill at speed 1 that one endless cache would not save."""
    seen: set[BlockId] = set()
    work_ms = 0.0
    for request in requests:
        known = 0
        for block in request.chain:
            if block not in seen:
                break
            known += 1
        seen.update(request.chain)
        held = min(known * block_tokens, request.prompt_tokens - 1)
        work_ms += cost.ms(request.prompt_tokens - held, held)
    return work_ms / 1e3


def at_load(
    requests: Sequence[TraceRequest], block_tokens: int, replicas: int, share: float
) -> list[TraceRequest]:
    """Return the requests at such a pace that unavoidable prefill takes ``share`` of the fleet."""
    cost = cost_at_speed_one(FleetSettings())
    work_s = prefill_work_s(requests, block_tokens, cost)
    span_s = max(requests[-1].arrival_s - requests[0].arrival_s, 1e-9)
    slower = work_s / (span_s * replicas * share)
    first_s = requests[0].arrival_s
    return [
        structs.replace(request, arrival_s=(request.arrival_s - first_s) * slower)
        for request in requests
    ]


def scenario_settings(base: FleetSettings, scenario: str, span_s: float) -> FleetSettings:
    """Return ``base`` with what ``scenario`` does to a fleet; raises ValueError for no such one."""
    replicas = base.replicas
    changes: dict[str, dict[str, object]] = {
        "": {},
        "view 50 ms late": {"event_delay_s": 0.05, "load_delay_s": 0.05},
        "view 200 ms late": {"event_delay_s": 0.2, "load_delay_s": 0.2},
        "view 500 ms late": {"event_delay_s": 0.5, "load_delay_s": 0.5},
        "5 % of events lost": {"event_loss": 0.05},
        "2 routers": {"routers": 2},
        "8 routers": {"routers": 8},
        "8 routers, 1 s apart": {"routers": 8, "lease_interval_s": 1.0},
        "a replica loses its cache": {
            "faults": (Fault(at_s=span_s / 2, replica=0, down_s=min(10.0, span_s / 20)),)
        },
        "half at half speed": {
            "speeds": tuple(0.5 if place % 2 else 1.0 for place in range(replicas))
        },
        "one at 0.3": {"speeds": (0.3,)},
        "pull at 12.5 GB/s": {"pull_token_ms": PULL_TOKEN_MS},
        "short prompts": {},
    }
    if scenario not in changes:
        message = f"scenario: expected one of {', '.join(filter(None, changes))}"
        raise ValueError(message)
    return structs.replace(base, **changes[scenario])


def shortened(
    requests: Sequence[TraceRequest], block_tokens: int, most_tokens: int
) -> list[TraceRequest]:
    """Return the requests with prompts of at most ``most_tokens``."""
    return [
        structs.replace(
            request,
            prompt_tokens=min(request.prompt_tokens, most_tokens),
            chain=request.chain[: most_tokens // block_tokens],
        )
        for request in requests
    ]


def run_one(
    cell: Cell, requests: Sequence[TraceRequest], block_tokens: int, policy_name: str, seed: int
) -> Figures:
    """Run one policy, or bound, in one cell; ``requests`` have their load already."""
    capacity, host = CACHES[cell.cache]
    base = FleetSettings(
        replicas=cell.replicas, capacity_tokens=capacity, host_tokens=host, seed=seed
    )
    cost = cost_at_speed_one(base)
    settings = scenario_settings(base, cell.scenario, requests[-1].arrival_s)
    policy, hold = (contenders(cost) | bounds(cost))[policy_name]
    if settings.pull_token_ms is not None and isinstance(policy, ExpectedTtft):
        policy = structs.replace(policy, pull_token_ms=settings.pull_token_ms)
    if settings.pull_token_ms is not None and isinstance(policy, Mooncake):
        policy = structs.replace(policy, transfer_token_ms=settings.pull_token_ms)
    if isinstance(policy, ExpectedTtft):
        policy = structs.replace(policy, fetch_token_ms=settings.fetch_token_ms)
    settings = structs.replace(settings, hold=hold)
    if policy_name in (POOLED, INFINITE):
        settings = structs.replace(
            base, is_pooled=True, speeds=settings.speeds, host_tokens=base.host_tokens
        )
    if policy_name == INFINITE:
        tokens = sum(one.prompt_tokens + one.output_tokens for one in requests)
        room = tokens // cell.replicas + 4 * block_tokens
        settings = structs.replace(settings, capacity_tokens=max(room, capacity), host_tokens=0)
    return figures_of(simulate(requests, block_tokens, policy, settings))


def figures_of(run: ReplayRun) -> Figures:
    """Return what is kept of a run."""
    done = [one for one in run.outcomes if one.ttft_s is not None]
    times = sorted([one.ttft_s for one in done if one.ttft_s is not None])
    per_token = [one.tpot_s for one in done if one.tpot_s is not None]
    shares: dict[str, int] = {}
    sums, counts = [0.0] * BLOCKS, [0] * BLOCKS
    for place, one in enumerate(done):
        shares[one.replica] = shares.get(one.replica, 0) + 1
        part = place * BLOCKS // len(done)
        sums[part] += one.ttft_s or 0.0
        counts[part] += 1
    prompt_tokens = sum(one.prompt_tokens for one in done)
    return Figures(
        requests=len(run.outcomes),
        failed=len(run.outcomes) - len(done),
        mean_s=sum(times) / len(times),
        p50_s=_rank(times, 0.5),
        p90_s=_rank(times, 0.9),
        p99_s=_rank(times, 0.99),
        tpot_s=sum(per_token) / max(1, len(per_token)),
        hit=sum(one.cached_tokens or 0 for one in done) / prompt_tokens,
        imbalance=len(run.replicas) * max(shares.values()) / len(done),
        in_slo=sum(map(_is_in_slo, done)) / len(run.outcomes),
        held_s=sum(one.held_s for one in done) / len(done),
        block_sums_s=tuple(sums),
        block_counts=tuple(counts),
    )


def _rank(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _is_in_slo(one: Outcome) -> bool:
    per_token_s = one.tpot_s
    is_fast = one.ttft_s is not None and one.ttft_s <= SLO_TTFT_S
    return is_fast and (per_token_s is None or per_token_s <= SLO_TPOT_S)
