"""A replay of logged decisions in words, for people; ``decision_json`` for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from policies.contrast import Weighed
    from policies.model import Candidate
    from replay.decision import DecisionComparison
    from replay.decision_side import Side
    from replay.decision_worst import Disagreement

SNAPSHOTS: Final = (
    "Every decision was made on the snapshot that the logged policy led to: what another choice\n"
    "would have done to queues and caches is not in these figures. `warmroute replay LOG`, on a\n"
    "log with chains, replays the requests in virtual time and answers that."
)
SAMPLED: Final = "The log is a sample of the requests."


def decision_json(comparison: DecisionComparison) -> bytes:
    """Return all figures as one JSON object, with ``is_exact`` and what they cannot tell."""
    fields = msgspec.to_builtins(comparison)
    return msgspec.json.encode({**fields, "is_exact": comparison.is_exact, "note": SNAPSHOTS})


def decision_text(comparison: DecisionComparison) -> str:
    """Return the report: whether the log repeats, or where another policy chooses otherwise."""
    return "\n".join(_lines(comparison)) + "\n"


def _lines(comparison: DecisionComparison) -> Iterator[str]:
    yield (
        f"{comparison.log}: {comparison.decisions} decisions on {comparison.requests} requests"
        f" by {' and '.join(map(policy_label, comparison.logged_policies)) or 'no policy'}"
    )
    if comparison.torn_lines:
        yield f"{comparison.torn_lines} torn lines left out: a router did not end in order there."
    if comparison.sample < 1:
        yield f"{SAMPLED[:-1]}: {comparison.sample:.3g} of them."
    if comparison.policy is None:
        yield from _repeated(comparison)
    else:
        yield f"against {policy_label(comparison.policy)}{_changes(comparison)}"
        yield from _compared(comparison)


def _repeated(comparison: DecisionComparison) -> Iterator[str]:
    if comparison.is_exact:
        yield f"All {comparison.decisions} came out again bit for bit."
        return
    differing = comparison.decisions - comparison.equal
    yield f"{differing} of {comparison.decisions} came out otherwise."
    first = comparison.first_difference
    if first is not None:
        yield f"The first: {first.file}, line {first.line}, request {first.id}, {first.field}:"
        yield f"  logged {first.logged!r}, now {first.replayed!r}"


def _compared(comparison: DecisionComparison) -> Iterator[str]:
    yield ""
    same, total = comparison.same_replica, comparison.decisions
    yield f"same replica    {_share(same, total)}"
    for one in comparison.reasons:
        yield f"  by {one.reason:<12} {_share(one.same_replica, one.decisions)}"
    yield f"moved           {comparison.moved}"
    if comparison.unanswered:
        yield f"not decided     {comparison.unanswered}"
    yield ""
    yield from _sides(comparison.logged, comparison.replayed)
    if comparison.wait_change_ms is not None:
        yield (
            f"Where both predict a wait ({comparison.waits_compared}), it changes by "
            f"{comparison.wait_change_ms:+.1f} ms in the mean."
        )
    yield ""
    yield SNAPSHOTS
    if comparison.worst:
        yield ""
        yield "Disagreements, most predicted cached tokens apart first:"
        for worst in comparison.worst:
            yield from _disagreement(worst)


def _sides(logged: Side, replayed: Side) -> Iterator[str]:
    rows = [
        ("predicted cached tokens", *(f"{side.cached_tokens}" for side in (logged, replayed))),
        ("in lower tiers", *(f"{side.lower_tier_tokens}" for side in (logged, replayed))),
        ("predicted wait, ms", *(_figure(side.wait_ms) for side in (logged, replayed))),
        ("requests, most / mean", *(_figure(s.imbalance_requests) for s in (logged, replayed))),
        ("prefill, most / mean", *(_figure(s.imbalance_prefill) for s in (logged, replayed))),
    ]
    for reason in sorted(logged.reasons | replayed.reasons):
        counts = (str(side.reasons.get(reason, 0)) for side in (logged, replayed))
        rows.append((f"by {reason}", *counts))
    yield f"{'':<26}{'logged':>14}{'now':>14}"
    for name, before, after in rows:
        yield f"{name:<26}{before:>14}{after:>14}"


def _disagreement(one: Disagreement) -> Iterator[str]:
    yield (
        f"- {one.file}, line {one.line}: request {one.id}, ordinal {one.ordinal}, "
        f"{one.prompt_tokens} tokens"
    )
    yield from _weighed("logged", one.logged, one.replayed.replica)
    yield from _weighed("now", one.replayed, one.logged.replica)


def _weighed(side: str, one: Weighed, other: str) -> Iterator[str]:
    wait = f", wait {one.wait_ms:.1f} ms" if one.wait_ms is not None else ""
    yield f"    {side:<7}{one.replica} by {one.reason}, {one.cached_tokens} tokens cached{wait}"
    yield f"           {one.replica}: {_terms(one.own)}"
    yield f"           {other}: {_terms(one.other)}"


def _terms(candidate: Candidate | None) -> str:
    if candidate is None:
        return "not scored"
    terms = ", ".join(f"{name} {value:.4g}" for name, value in candidate.terms.items())
    return f"score {candidate.score:.4g}" + (f" ({terms})" if terms else "")


def policy_label(policy: Mapping[str, Any]) -> str:
    """Return the policy's kind, as its configuration calls it."""
    return str(policy.get("kind", "unknown"))


def _changes(comparison: DecisionComparison) -> str:
    """Return the settings in which a policy differs from the one of its kind that was logged."""
    policy = comparison.policy or {}
    for logged in comparison.logged_policies:
        if policy_label(logged) == policy_label(policy):
            changes = [
                f"{name} {value} for {logged.get(name)}"
                for name, value in policy.items()
                if value != logged.get(name)
            ]
            return f" with {', '.join(changes)}" if changes else ", unchanged"
    return ""


def _share(part: int, whole: int) -> str:
    share = f" ({part / whole:.1%})" if whole else ""
    return f"{part} of {whole}{share}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
