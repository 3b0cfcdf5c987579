"""A trial in virtual time: a part of a trace, thinned by the seed, at the cell's load.

Each seed keeps another random share of the sessions (of the requests, where the trace names none)
and time runs faster by as much, so that the load is what was asked for. So seeds differ in more
than the draws between equal replicas: a setting that suits one interleaving only does not shine.

The held-out part begins with caches as they would be: what came before it is replayed too, as much
as it is long itself, and not counted.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import xxhash
from msgspec import Meta, Struct

from replay.caution import ttft_growth
from replay.score import imbalance, percentile, replica_shares, token_hit_ratio
from replay.setting import FleetSettings
from replay.simulate import simulate
from replay.trace import TraceRequest
from replay.trial import Figures, TrialError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from policies.union import AnyPolicy
    from replay.outcome import ReplayRun
    from replay.trial import Cell

_HASHES: Final = 2**64
_SLACK_S: Final = 1e-9


class TrialSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How trials are cut out of a trace.

    ``hold_out`` is the last part of its time. ``kept`` is each seed's share of the sessions.
    """

    fleet: FleetSettings = FleetSettings()
    hold_out: Annotated[float, Meta(ge=0.05, le=0.9)] = 0.3
    kept: Annotated[float, Meta(gt=0, le=1)] = 0.8


class Loaded(Struct, frozen=True, kw_only=True):
    """A trace in memory."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]


class Excerpt(Struct, frozen=True, kw_only=True):
    """What one trial replays; what arrives before ``counted_from_s`` only warms the caches."""

    requests: tuple[TraceRequest, ...]
    counted_from_s: float


class ReplayTrials:
    """Evaluates trials of one loaded trace."""

    def __init__(
        self,
        loaded: Loaded,
        settings: TrialSettings,
        run: Callable[..., ReplayRun] = simulate,
    ) -> None:
        self._loaded = loaded
        self._settings = settings
        self._run = run

    def __call__(self, policy: AnyPolicy, cell: Cell) -> Figures:
        """Return the figures of ``policy``; raises TrialError where there are none."""
        loaded, settings = self._loaded, self._settings
        cut = excerpt(loaded.requests, settings, cell)
        fleet = msgspec.structs.replace(settings.fleet, seed=settings.fleet.seed + cell.seed)
        run = self._run(cut.requests, loaded.block_tokens, policy, fleet, trace_name=loaded.name)
        return _figures(run, cut.counted_from_s, cell)


def excerpt(requests: Sequence[TraceRequest], settings: TrialSettings, cell: Cell) -> Excerpt:
    """Return what the cell replays, from 0 s on; raises TrialError where it is nothing."""
    end_s = requests[-1].arrival_s if requests else 0.0
    held_out_s = end_s * settings.hold_out
    split_s = end_s - held_out_s
    if cell.part == "tuning":
        start_s, counted_s = 0.0, 0.0
        part = [one for one in requests if one.arrival_s < split_s]
    else:
        start_s, counted_s = max(0.0, split_s - held_out_s), split_s
        part = [one for one in requests if one.arrival_s >= start_s]
    kept = _kept(part, settings.kept, cell.seed)
    if not any(one.arrival_s >= counted_s for one in kept):
        message = f"the {cell.part.replace('_', '-')} part has no requests: the trace is too short"
        raise TrialError(message)
    share = sum(one.prompt_tokens for one in kept) / sum(one.prompt_tokens for one in part)
    pace = share / cell.load
    return Excerpt(
        requests=tuple(
            msgspec.structs.replace(one, arrival_s=(one.arrival_s - start_s) * pace) for one in kept
        ),
        counted_from_s=(counted_s - start_s) * pace,
    )


def trace_digest(loaded: Loaded) -> str:
    """Return a name for the trace's content: that of equal requests is equal."""
    digest = hashlib.sha256(f"{loaded.block_tokens}\n".encode())
    for request in loaded.requests:
        digest.update(msgspec.msgpack.encode(request))
    return digest.hexdigest()


def _kept(part: Iterable[TraceRequest], share: float, seed: int) -> list[TraceRequest]:
    if share >= 1:
        return list(part)
    limit = int(share * _HASHES)
    return [
        one
        for one in part
        if xxhash.xxh3_64_intdigest((one.session or str(one.line)).encode(), seed) < limit
    ]


def _figures(run: ReplayRun, counted_from_s: float, cell: Cell) -> Figures:
    counted = tuple(o for o in run.outcomes if o.arrival_s >= counted_from_s - _SLACK_S)
    good = [outcome for outcome in counted if outcome.error is None]
    times_s = sorted(outcome.ttft_s for outcome in good if outcome.ttft_s is not None)
    p99_s = percentile(times_s, 0.99)
    if p99_s is None or times_s[0] <= 0:
        what = "no request got a first token" if p99_s is None else "first tokens took no time"
        message = f"{what} at load {cell.load:g}: nothing to compare"
        raise TrialError(message)
    counted_run = msgspec.structs.replace(run, outcomes=counted)
    shares = replica_shares(counted_run)
    return Figures(
        ttft_mean_s=sum(times_s) / len(times_s),
        ttft_p99_s=p99_s,
        hit_ratio=token_hit_ratio(good) or 0.0,
        imbalance=imbalance([share.uncached_tokens for share in shares], len(shares)) or 1.0,
        requests=len(counted),
        failed=len(counted) - len(good),
        ttft_growth=ttft_growth(counted_run),
    )
