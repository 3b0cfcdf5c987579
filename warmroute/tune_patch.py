"""A found setting as a piece of router configuration, with its evidence as comments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from replay.space import kind_of, policy_at
from warmroute.cli import version
from warmroute.tune_report import VERDICTS, ratio_text, setting_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replay.tune import Judged, TuneReport
    from warmroute.tune_report import TuneRun


def patch_text(about: TuneRun, report: TuneReport) -> str:
    """Return YAML with the policy that won; ``report`` has a winner and a held-out part."""
    if report.best is None:
        message = "nothing won"
        raise ValueError(message)
    policy = policy_at(about.policy, about.space, report.best)
    varied = {dimension.name for dimension in about.space}
    changed: dict[str, Any] = {"kind": kind_of(policy)}
    defaults = msgspec.to_builtins(type(policy)())
    for name, value in msgspec.to_builtins(policy).items():
        if name in varied or value != defaults.get(name):
            changed.setdefault(name, value)
    comments = "\n".join(f"# {_plain(line)}" for line in _evidence(about, report))
    return f"{comments}\n{yaml.safe_dump({'policy': changed}, sort_keys=False)}"


def _plain(line: str) -> str:
    """Return the line as a comment can have it: a file's name may have a line's end."""
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def _evidence(about: TuneRun, report: TuneReport) -> Iterator[str]:
    plan = about.plan
    loads = ", ".join(f"{load:g}" for load in plan.loads)
    names = ", ".join(f"{d.name} {d.low:g}-{d.high:g}" for d in about.space)
    yield f"warmroute {version()} tune, by replay in virtual time. {VERDICTS[report.verdict]}"
    if report.reason:
        yield f"NOT CONFIRMED: {report.reason}"
    yield f"trace: {about.trace}, {about.requests} requests; loads {loads}"
    yield f"present: {setting_text(about.space, report.present)}"
    yield f"tried: {len(report.tried) - 1} settings of {names}"
    first = plan.seed + plan.seeds - 1
    yield f"seeds of the search: {plan.seed} to {first}; objective {plan.objective}"
    yield "ratios to the present setting, 95 % by Student's t on their logarithms, over seeds"
    if report.check is not None:
        yield from _judged("tuning part", report.check)
    if report.held_out is not None:
        yield from _judged(f"held-out part (last {about.hold_out:.0%})", report.held_out)


def _judged(part: str, judged: Judged) -> Iterator[str]:
    effect = judged.effect
    seeds = [cell.seed for cell in judged.cells]
    yield f"{part}, seeds {min(seeds)} to {max(seeds)}:"
    yield f"  mean TTFT x {ratio_text(effect.ttft_mean)}, p99 x {ratio_text(effect.ttft_p99)}"
    hits, imbalance = ratio_text(effect.hit_ratio), ratio_text(effect.imbalance)
    yield f"  token hits x {hits}, imbalance x {imbalance}"
    for one in effect.loads:
        mean, p99 = ratio_text(one.ttft_mean), ratio_text(one.ttft_p99)
        yield f"  at load {one.load:g}: mean TTFT x {mean}, p99 x {p99}"
