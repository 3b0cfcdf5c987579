"""Requests of a canary without a router: conversations that differ, of many turns, on two sides."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from policies.least_loaded import LeastLoaded
from policies.model import Decision, Reason
from router.canary_setting import CanarySettings
from router.canary_sums import CanarySums, Counter
from router.split import CANDIDATE, Splitter
from router.trace import Attempt, DecisionRecord
from state.model import ReplicaId, Rung

if TYPE_CHECKING:
    from collections.abc import Iterator

REPLICAS: Final = 4
PROMPT_TOKENS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a candidate does to its requests: ``slower`` times as slow, and so on."""

    slower: float = 1.0
    errors: float = 0.0
    fewer_hits: float = 0.0
    all_to_one: float = 0.0


NONE: Final = Effect()


def record_of(  # noqa: PLR0913 - a request has so many ends
    *,
    ttft_s: float | None = 0.1,
    outcome: str = "done",
    status: int = 200,
    replica: str | None = "w0",
    cached_tokens: int | None = 0,
    side: str | None = None,
    duration_s: float | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
) -> DecisionRecord:
    """Return the record of a request that ended so."""
    attempts: tuple[Attempt, ...] = ()
    if replica is not None:
        attempts = (Attempt(Decision(ReplicaId(replica), Reason.LOAD, 0, ()), outcome),)
    return DecisionRecord(
        request_id="r", client_request_id=None, ordinal=1, seed=1, started_unix_s=0.0,
        path="/v1/chat/completions", model="m", policy="p", prompt_tokens=prompt_tokens,
        is_exact=True, unroutable=None, rung=Rung.LIVE, state_age_s=0.0, hot_prefix_tokens=None,
        hot_holders=(), attempts=attempts, status=status, outcome=outcome, ttft_s=ttft_s,
        duration_s=duration_s if duration_s is not None else (ttft_s or 0.0),
        reported_prompt_tokens=None if cached_tokens is None else PROMPT_TOKENS,
        reported_cached_tokens=cached_tokens, side=side,
    )  # fmt: skip


class Traffic:
    """Conversations come and go; each has a pace, a length and a replica of its own.

    The fleet's load goes up and down for both sides alike.
    """

    def __init__(self, seed: int, effect: Effect = NONE, percent: float = 25.0) -> None:
        self._rng = random.Random(seed)
        self._effect = effect
        self._splitter = Splitter(
            CanarySettings(
                id="c", started_unix_s=0.0, policy=LeastLoaded(), percent=percent, seed=seed
            )
        )
        self._open: list[tuple[bytes, float, int, int]] = []
        self.counter = Counter()
        self._swell = 1.0

    def pass_by(self, requests: int) -> CanarySums:
        """Count so many more requests, and return what they add up to."""
        for record, opening in self._records(requests):
            assigned = self._splitter.assign(opening, None)
            assert assigned is not None
            side = assigned.side
            self.counter.add(assigned, record(self._effect if side is CANDIDATE else NONE))
        return self.counter.sums

    def _records(self, requests: int) -> Iterator[tuple[_Drawn, bytes]]:
        rng = self._rng
        for _ in range(requests):
            self._swell *= rng.lognormvariate(0.0, 0.05)
            self._swell = min(4.0, max(0.25, self._swell))
            if len(self._open) < 40:
                pace, turns = rng.lognormvariate(0.0, 0.6), 1 + int(rng.expovariate(1 / 8))
                self._open.append((rng.randbytes(16), pace, turns, rng.randrange(REPLICAS)))
            at = rng.randrange(len(self._open))
            opening, pace, turns, replica = self._open[at]
            if turns > 1:
                self._open[at] = (opening, pace, turns - 1, replica)
            else:
                self._open[at] = self._open[-1]
                self._open.pop()
            tokens = int(1_000 * pace * rng.lognormvariate(0.0, 0.2))
            yield _Drawn(rng, 0.2 * pace * self._swell, replica, tokens), opening


@dataclass(slots=True)
class _Drawn:
    rng: random.Random
    pace_s: float
    replica: int
    prompt_tokens: int

    def __call__(self, effect: Effect) -> DecisionRecord:
        rng = self.rng
        ttft_s = self.pace_s * rng.lognormvariate(0.0, 0.7) * effect.slower
        has_failed = rng.random() < 0.01 + effect.errors
        share = max(0.0, rng.betavariate(4, 2) - effect.fewer_hits)
        replica = 0 if rng.random() < effect.all_to_one else self.replica
        return record_of(
            ttft_s=None if has_failed else ttft_s,
            outcome="failed" if has_failed else "done",
            status=502 if has_failed else 200,
            replica=f"w{replica}",
            prompt_tokens=self.prompt_tokens,
            cached_tokens=int(share * PROMPT_TOKENS),
        )
