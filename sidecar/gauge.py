"""The worker's ``/metrics``: the names, labels and meanings of vLLM, in Prometheus text format."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidecar.scheduler import Scheduler


def render_metrics(scheduler: Scheduler, model: str) -> str:
    """Return the exposition of ``scheduler``'s state. Costs nothing between scrapes."""
    labels = f'engine="0",model_name="{_escaped(model)}"'
    pool = scheduler.cache.pool
    counters = scheduler.counters
    rows = (
        (
            "num_requests_running",
            "gauge",
            "Number of requests in model execution batches.",
            scheduler.running_sequences,
        ),
        (
            "num_requests_waiting",
            "gauge",
            "Number of requests waiting to be processed.",
            scheduler.waiting_sequences,
        ),
        (
            "kv_cache_usage_perc",
            "gauge",
            "Fraction of KV pages held by requests; cached pages without a request do not count.",
            pool.held_pages / pool.total_pages,
        ),
        (
            "prefix_cache_queries_total",
            "counter",
            "Prompt tokens looked up in the prefix cache.",
            counters.queried_tokens,
        ),
        (
            "prefix_cache_hits_total",
            "counter",
            "Prompt tokens found in the prefix cache.",
            counters.hit_tokens,
        ),
        (
            "num_preemptions_total",
            "counter",
            "Requests that gave their pages up to an older one.",
            counters.preemptions,
        ),
        ("prompt_tokens_total", "counter", "Prompt tokens admitted.", counters.prompt_tokens),
        ("generation_tokens_total", "counter", "Tokens generated.", counters.generated_tokens),
    )
    config = (
        f'block_size="{scheduler.cache.page_tokens}",enable_prefix_caching="True",engine="0",'
        f'num_gpu_blocks="{pool.total_pages}"'
    )
    lines = []
    for name, kind, meaning, value in rows:
        lines += [
            f"# HELP vllm:{name} {meaning}",
            f"# TYPE vllm:{name} {kind}",
            f"vllm:{name}{{{labels}}} {float(value)}",
        ]
    lines += [
        "# HELP vllm:cache_config_info Shape of the KV cache.",
        "# TYPE vllm:cache_config_info gauge",
        f"vllm:cache_config_info{{{config}}} 1.0",
    ]
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
