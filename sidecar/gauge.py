"""The worker's ``/metrics``: the names, labels and meanings of vLLM, in Prometheus text format.

Rows whose names begin with ``warmroute_`` are what vLLM does not tell: KV pages tier by tier.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from sidecar.report import TierReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sidecar.report import KvReport, PeerReport
    from sidecar.scheduler import Scheduler

    Labels = dict[str, str]
    Sample = tuple[Labels, float]


def render_metrics(scheduler: Scheduler, model: str, started_unix_s: float) -> str:
    """Return the exposition of ``scheduler``'s state. Costs nothing between scrapes.

    The start time is how a sidecar tells a restarted process, with an empty cache, from a slow one.
    """
    labels = {"engine": "0", "model_name": model}
    lines: list[str] = []
    for name, kind, meaning, value in _rows(scheduler):
        lines += _family(f"vllm:{name}", kind, meaning, [(labels, value)])
    config = {
        "block_size": str(scheduler.cache.page_tokens),
        "enable_prefix_caching": "True",
        "engine": "0",
        "num_gpu_blocks": str(scheduler.cache.pool.total_pages),
    }
    lines += _family("vllm:cache_config_info", "gauge", "Shape of the KV cache.", [(config, 1)])
    lines += [
        "# HELP process_start_time_seconds Start time of the process since the Unix epoch.",
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {started_unix_s!r}",
    ]
    return "\n".join(lines) + "\n"


def _rows(scheduler: Scheduler) -> tuple[tuple[str, str, str, float], ...]:
    """Return name, kind, meaning and value of each metric."""
    pool = scheduler.cache.pool
    counters = scheduler.counters
    used = pool.held_pages / pool.total_pages
    queries, hits = counters.queried_tokens, counters.hit_tokens
    preemptions, generated = counters.preemptions, counters.generated_tokens
    return (
        ("num_requests_running", "gauge", "Requests that hold pages.", scheduler.running_sequences),
        ("num_requests_waiting", "gauge", "Requests without pages.", scheduler.waiting_sequences),
        ("kv_cache_usage_perc", "gauge", "Fraction of the pages held by requests.", used),
        ("prefix_cache_queries_total", "counter", "Prompt tokens looked up.", queries),
        ("prefix_cache_hits_total", "counter", "Prompt tokens found.", hits),
        ("num_preemptions_total", "counter", "Requests that lost their pages.", preemptions),
        ("prompt_tokens_total", "counter", "Prompt tokens admitted.", counters.prompt_tokens),
        ("generation_tokens_total", "counter", "Tokens generated.", generated),
    )


def render_kv(report: KvReport, refused_sources: int) -> str:
    """Return the exposition of all tiers; ``refused_sources`` could not be read as addresses."""
    tiers: list[TierReport] = report.tiers
    # In these counters other workers are one more place where pages come from.
    sources = tiers if report.peers is None else [*tiers, _as_tier(report.peers)]
    families: tuple[tuple[str, str, str, Iterable[Sample]], ...] = (
        ("pages", "gauge", "Pages by state; a tenant is a digest.", _pages(tiers)),
        ("bytes", "gauge", "Bytes of pages that are not free.", _each(tiers, _held_bytes)),
        ("hits_total", "counter", "Look-ups answered by a tier.", _each(sources, _hits)),
        (
            "moved_bytes_total",
            "counter",
            "KV bytes copied between tiers.",
            _moves(tiers, report.peers),
        ),
        ("saved_seconds_total", "counter", "Prefill not computed.", _each(sources, _saved_s)),
        ("spent_seconds_total", "counter", "Time of moving pages.", _each(sources, _spent_s)),
        ("latency_seconds", "gauge", "Measured latency of a fetch.", _known(sources, _latency_s)),
        (
            "bytes_per_second",
            "gauge",
            "Measured rate of fetches.",
            _known(sources, _bytes_per_s),
        ),
        (
            "largest_free_run_pages",
            "gauge",
            "Longest run of neighbouring free pages.",
            _each(tiers, lambda t: t.largest_free_run_pages),
        ),
        (
            "fragmentation_ratio",
            "gauge",
            "1 - longest free run / free pages.",
            _each(tiers, lambda t: t.fragmentation),
        ),
        (
            "refused_sources_total",
            "counter",
            "Addresses to fetch pages from that are none.",
            [({}, refused_sources)],
        ),
    )
    lines: list[str] = []
    for name, kind, meaning, samples in families:
        lines += _family(f"warmroute_kv_{name}", kind, meaning, samples)
    return "\n".join(lines) + "\n"


def _pages(tiers: Iterable[TierReport]) -> Iterator[Sample]:
    """Yield pages by tier, state and tenant; those of no tenant have an empty one."""
    for tier in tiers:
        for state, pages in tier.states.items():
            owned = {tenant: states.get(state, 0) for tenant, states in tier.tenants.items()}
            for tenant, count in {**owned, "": pages - sum(owned.values())}.items():
                yield {"tier": tier.tier, "state": state, "tenant": tenant}, count


def _hits(tier: TierReport) -> float:
    return tier.hits


def _saved_s(tier: TierReport) -> float:
    return tier.saved_ms / 1000.0


def _spent_s(tier: TierReport) -> float:
    return tier.spent_ms / 1000.0


def _held_bytes(tier: TierReport) -> float:
    return (tier.total_pages - tier.states.get("free", 0)) * tier.page_bytes


def _each(tiers: Iterable[TierReport], value: Callable[[TierReport], float]) -> Iterator[Sample]:
    return (({"tier": tier.tier}, value(tier)) for tier in tiers)


def _as_tier(peers: PeerReport) -> TierReport:
    return TierReport(
        tier="peer",
        page_bytes=0,
        total_pages=0,
        states={},
        hits=peers.hits,
        saved_ms=peers.saved_ms,
        spent_ms=peers.spent_ms,
        latency_ms=peers.latency_ms,
        bytes_per_s=peers.bytes_per_s,
    )


def _latency_s(tier: TierReport) -> float | None:
    return None if tier.latency_ms is None else tier.latency_ms / 1000.0


def _bytes_per_s(tier: TierReport) -> float | None:
    return tier.bytes_per_s


def _known(
    tiers: Iterable[TierReport], value: Callable[[TierReport], float | None]
) -> Iterator[Sample]:
    """Yield the values that there are: what was not measured has no row."""
    for tier in tiers:
        found = value(tier)
        if found is not None:
            yield {"tier": tier.tier}, found


def _moves(tiers: list[TierReport], peers: PeerReport | None) -> Iterator[Sample]:
    """Yield what came into each lower tier from the one above and went back to the device."""
    if peers is not None:
        yield {"from": "peer", "to": tiers[0].tier}, peers.moved_out_bytes
    for above, tier in pairwise(tiers):
        yield {"from": above.tier, "to": tier.tier}, tier.moved_in_bytes
        yield {"from": tier.tier, "to": tiers[0].tier}, tier.moved_out_bytes


def _family(name: str, kind: str, meaning: str, samples: Iterable[Sample]) -> list[str]:
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        lines.append(f"{name}{{{inner}}} {float(value)}" if inner else f"{name} {float(value)}")
    return lines


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
