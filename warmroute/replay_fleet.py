"""A trace in virtual time: the fleet that the flags describe, one replay for each policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, get_args

import msgspec
import yaml
from msgspec import structs

from policies.expected_ttft import ExpectedTtft
from policies.hold import HoldSettings
from replay.setting import FleetSettings
from replay.simulate import simulate
from router.expected import explained
from sidecar.clock import PresetName, preset_cost, preset_page_bytes
from warmroute.cli import UsageError
from warmroute.replay_input import count, not_negative, policies_of

if TYPE_CHECKING:
    import argparse

    from replay.outcome import ReplayRun
    from warmroute.progress import Progress
    from warmroute.replay_input import Feed

NAMES: Final = (
    "fleet",
    "replicas",
    "capacity_tokens",
    "cost",
    "routers",
    "event_delay_ms",
    "bounds",
)
"""What has no meaning with another mode."""
PRESETS: Final = get_args(PresetName)
POOLED, INFINITE = "pooled", "infinite"


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of virtual time."""
    group = parser.add_argument_group("in virtual time")
    group.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="KIND|YAML",
        help="a policy: its kind, or a mapping with it; repeatable (default: the router's own)",
    )
    group.add_argument("--fleet", metavar="FILE", help="YAML of the fleet; flags win over it")
    group.add_argument("--replicas", type=count, metavar="N", help="replicas (default: 8)")
    group.add_argument(
        "--capacity-tokens", type=count, metavar="N", help="KV cache of each (default: 440000)"
    )
    group.add_argument(
        "--cost",
        metavar="PRESET|FILE",
        help=f"their clock: {', '.join(PRESETS)}, or what 'warmroute calibrate' wrote "
        f"(default: {PRESETS[1]})",
    )
    group.add_argument("--routers", type=count, metavar="N", help="routers (default: 1)")
    group.add_argument(
        "--event-delay",
        type=not_negative,
        dest="event_delay_ms",
        metavar="MS",
        help="how late routers learn what caches hold (default: 0)",
    )
    group.add_argument(
        "--bounds",
        action="store_true",
        help="also two fleets that no policy can make: one cache for all, and one without end",
    )


def fleet_of(options: argparse.Namespace) -> FleetSettings:
    """Return the fleet of file and flags; raises UsageError."""
    raw = {} if options.fleet is None else _read("--fleet", options.fleet)
    for name in ("replicas", "capacity_tokens", "cost", "routers", "seed"):
        if getattr(options, name) is not None:
            raw[name] = getattr(options, name)
    if options.event_delay_ms is not None:
        raw["event_delay_s"] = options.event_delay_ms / 1_000
    preset = raw.get("cost")
    if isinstance(preset, str) and preset in PRESETS:
        name = cast("PresetName", preset)
        raw["cost"] = msgspec.to_builtins(preset_cost(name))
        raw.setdefault("kv_bytes_per_token", preset_page_bytes(name, 1))
    elif options.cost is not None:
        if not Path(options.cost).is_file():
            message = f"--cost: expected {', '.join(PRESETS)} or a file, got {options.cost!r}"
            raise UsageError(message)
        raw["cost"] = _read("--cost", options.cost)
    elif isinstance(preset, str):
        message = f"--fleet: {options.fleet}: cost: expected {', '.join(PRESETS)} or a mapping"
        raise UsageError(message)
    try:
        return msgspec.convert(raw, FleetSettings)
    except msgspec.ValidationError as error:
        files = {"--fleet": options.fleet, "--cost": options.cost}
        where = "".join(
            f"{flag}: {path}: " for flag, path in files.items() if path and path not in PRESETS
        )
        message = f"{where}{explained(error, FleetSettings, raw)}"
        raise UsageError(message) from None


def _read(flag: str, path: str) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{flag}: {path}: {error.strerror}"
        raise UsageError(message) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = f"{flag}: {path}: not YAML: {' '.join(str(error).split())}"
        raise UsageError(message) from None
    if not isinstance(raw, dict | None):
        message = f"{flag}: {path}: expected a mapping"
        raise UsageError(message)
    return raw or {}


def bounds_of(feed: Feed, settings: FleetSettings) -> dict[str, FleetSettings]:
    """Return fleets that no policy could make of the real one.

    ``POOLED``: every replica has the caches of all, at no cost. ``INFINITE``: and nothing is ever
    evicted from it.
    """
    whole_tokens = sum(one.prompt_tokens + one.output_tokens for one in feed.requests)
    whole_tokens += len(feed.requests) * feed.block_tokens
    pooled = structs.replace(
        settings,
        is_pooled=True,
        event_delay_s=0.0,
        event_loss=0.0,
        hold=HoldSettings(enabled=False),
    )
    capacity_tokens = max(settings.capacity_tokens, -(-whole_tokens // settings.replicas))
    return {POOLED: pooled, INFINITE: structs.replace(pooled, capacity_tokens=capacity_tokens)}


def replay_fleet(
    feed: Feed, options: argparse.Namespace, progress: Progress
) -> tuple[dict[str, ReplayRun], dict[str, ReplayRun]]:
    """Return the replays by policy, and those of bounds by name; raises UsageError."""
    settings, policies = fleet_of(options), policies_of(options.policy)
    runs, bounds = {}, {}
    for name, policy in policies.items():
        progress.begin(name)
        runs[name] = simulate(
            feed.requests, feed.block_tokens, policy, settings, trace_name=feed.name
        )
    if options.bounds:
        for name, bound in bounds_of(feed, settings).items():
            progress.begin(name)
            bounds[name] = simulate(
                feed.requests, feed.block_tokens, ExpectedTtft(), bound, trace_name=feed.name
            )
    return runs, bounds
