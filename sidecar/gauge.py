"""The worker's ``/metrics``: the names, labels and meanings of vLLM, in Prometheus text format."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidecar.scheduler import Scheduler


def render_metrics(scheduler: Scheduler, model: str, started_unix_s: float) -> str:
    """Return the exposition of ``scheduler``'s state. Costs nothing between scrapes.

    The start time is how a sidecar tells a restarted process, with an empty cache, from a slow one.
    """
    labels = f'engine="0",model_name="{_escaped(model)}"'
    pool = scheduler.cache.pool
    lines = []
    for name, kind, meaning, value in _rows(scheduler):
        lines += [
            f"# HELP vllm:{name} {meaning}",
            f"# TYPE vllm:{name} {kind}",
            f"vllm:{name}{{{labels}}} {float(value)}",
        ]
    config = (
        f'block_size="{scheduler.cache.page_tokens}",enable_prefix_caching="True",engine="0",'
        f'num_gpu_blocks="{pool.total_pages}"'
    )
    lines += [
        "# HELP vllm:cache_config_info Shape of the KV cache.",
        "# TYPE vllm:cache_config_info gauge",
        f"vllm:cache_config_info{{{config}}} 1.0",
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


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
