"""What became of one replayed request, in virtual time or live: the input of every report."""

from __future__ import annotations

from msgspec import Struct


class Outcome(Struct, frozen=True, kw_only=True):
    """One request that ended. Times are seconds; those of day are since the replay's start.

    ``cached_tokens`` is what the engine did not compute, None where it does not tell;
    ``fetched_tokens`` of them came from host memory, disk or another replica. ``held_s`` was spent
    in the router's queue and is part of ``ttft_s``. ``ttft_s`` is None without a first token;
    ``error`` says why. ``prefix`` is the id (hex) at which the prompt's traffic is counted: its
    deepest block that another request shares, "" for none. ``line`` is its place in the trace.
    """

    ordinal: int
    line: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    replica: str
    reason: str = ""
    predicted_cached_tokens: int | None = None
    cached_tokens: int | None = None
    fetched_tokens: int = 0
    held_s: float = 0.0
    ttft_s: float | None = None
    duration_s: float = 0.0
    preemptions: int = 0
    session: str = ""
    tenant: str = ""
    prefix: str = ""
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two, or no answer."""
        if self.ttft_s is None or self.output_tokens < 2:  # noqa: PLR2004 - after the first
            return None
        return (self.duration_s - self.ttft_s) / (self.output_tokens - 1)


class ReplayRun(Struct, frozen=True, kw_only=True):
    """A whole replay: what was replayed on what, and every outcome by ordinal.

    ``replicas`` are all that could be chosen, used or not. ``spills`` counts decisions per reason.
    ``resident_tokens_s`` is the integral of tokens held in caches over time, all replicas together;
    None where nobody measured it. ``kv_bytes_per_token`` turns it into bytes.
    """

    trace: str
    policy: str
    replicas: tuple[str, ...]
    outcomes: tuple[Outcome, ...]
    span_s: float
    token_ms: float = 0.0
    """Prefill time per token without attention, for what hits saved; 0 where it is not known."""
    attention_pair_ms: float = 0.0
    kv_bytes_per_token: int | None = None
    resident_tokens_s: float | None = None
    evictions: int | None = None
    seed: int = 0
