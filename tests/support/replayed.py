"""Outcomes of replays that never happened."""

from __future__ import annotations

from random import Random
from typing import Any

from replay.outcome import Outcome, ReplayRun


def outcome(ordinal: int = 0, **changes: Any) -> Outcome:
    """Return an answered request: 100 tokens in, 11 out, the first at 1 s, then 0.1 s each."""
    values: dict[str, Any] = {
        "ordinal": ordinal,
        "line": ordinal + 1,
        "arrival_s": float(ordinal),
        "prompt_tokens": 100,
        "output_tokens": 11,
        "replica": "a",
        "reason": "prefix",
        "cached_tokens": 0,
        "ttft_s": 1.0,
        "duration_s": 2.0,
    }
    return Outcome(**(values | changes))


def replayed(*outcomes: Outcome, **changes: Any) -> ReplayRun:
    """Return a run of ``outcomes`` on replicas a and b in 100 s, at 1 ms per token."""
    values: dict[str, Any] = {
        "trace": "trace.jsonl",
        "policy": "expected_ttft",
        "replicas": ("a", "b"),
        "outcomes": outcomes,
        "span_s": 100.0,
        "token_ms": 1.0,
    }
    return ReplayRun(**(values | changes))


def random_run(requests: int, seed: int = 0, **changes: Any) -> ReplayRun:
    """Return a plausible run: a shared prefix each, hits, tenants and a few failures."""
    random = Random(seed)
    outcomes = []
    for ordinal in range(requests):
        prompt_tokens = random.randrange(100, 20_000)
        cached_tokens = random.randrange(prompt_tokens)
        ttft_s = 0.02 + (prompt_tokens - cached_tokens) * 1e-4 * random.uniform(0.9, 2)
        has_failed = random.random() < 0.01
        outcomes.append(
            outcome(
                ordinal,
                arrival_s=ordinal / 10,
                prompt_tokens=prompt_tokens,
                output_tokens=random.randrange(1, 300),
                replica=random.choice("ab"),
                reason=random.choice(("prefix", "spill", "load")),
                cached_tokens=None if has_failed else cached_tokens,
                ttft_s=None if has_failed else ttft_s,
                duration_s=ttft_s + 5,
                tenant=f"tenant-{random.randrange(30)}",
                prefix=f"{random.randrange(300):032x}",
                error="refused" if has_failed else None,
            )
        )
    return replayed(*outcomes, **({"span_s": requests / 10, "evictions": 5} | changes))
