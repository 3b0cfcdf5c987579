"""A router's decision log, replayed: every decision once more on the snapshot it was made on.

By the logged policy each must come out bit for bit; another policy shows where it would have
chosen otherwise. The snapshots are those that the logged policy led to: had another one chosen,
queues and caches would have become others. That question is one for a replay in virtual time,
for which the log is a trace, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from replay.decision_file import DecisionLogReader, LoggedLine, SeenDecision
from replay.decision_side import Side, SideTally
from replay.decision_trace import LoggedTrace, trace_requests
from replay.decision_worst import Disagreement, WorstDisagreements

if TYPE_CHECKING:
    from pathlib import Path

    from policies.model import Decision
    from policies.union import AnyPolicy

__all__ = [
    "DecisionComparison",
    "Difference",
    "LoggedTrace",
    "ReasonAgreement",
    "replay_decisions",
    "trace_requests",
]

WORST_KEPT = 10


class Difference(Struct, frozen=True, kw_only=True):
    """The first decision that came out otherwise, and the first of its fields."""

    file: str
    line: int
    id: str
    field: str
    logged: Any
    replayed: Any


class ReasonAgreement(Struct, frozen=True, kw_only=True):
    """The decisions with one logged reason, and how many chose the same replica again."""

    reason: str
    decisions: int
    same_replica: int


class DecisionComparison(Struct, frozen=True, kw_only=True):
    """What a replay of decisions came to.

    ``policy`` is None where the logged policy itself was replayed; then all of ``decisions`` have
    to be ``equal``: replica, reason, every candidate with its terms, bit for bit. ``unanswered``
    are those that the policy did not make. ``wait_change_ms`` is the mean over the
    ``waits_compared`` decisions of which both sides predict a wait.
    """

    log: str
    requests: int
    decisions: int
    torn_lines: int
    sample: float
    logged_policies: tuple[dict[str, Any], ...]
    policy: dict[str, Any] | None
    equal: int
    first_difference: Difference | None
    same_replica: int
    moved: int
    unanswered: int
    reasons: tuple[ReasonAgreement, ...]
    logged: Side
    replayed: Side
    waits_compared: int
    wait_change_ms: float | None
    worst: tuple[Disagreement, ...]

    @property
    def is_exact(self) -> bool:
        """Whether every decision came out bit for bit."""
        return self.equal == self.decisions


def replay_decisions(
    path: Path, policy: AnyPolicy | None = None, *, worst: int = WORST_KEPT
) -> DecisionComparison:
    """Decide again all that was logged at ``path``: by the logged policy, or by ``policy``.

    The ``worst`` disagreements are kept. Raises TraceError for a log that cannot be used.
    """
    reader = DecisionLogReader(path)
    tally = _Tally(policy, worst)
    for line in reader:
        tally.add(line)
    return tally.comparison(path.name, reader.torn_lines)


class _Tally:
    """Counts over the decisions of one log."""

    def __init__(self, policy: AnyPolicy | None, worst: int) -> None:
        self._policy = policy
        self._policies: list[dict[str, Any]] = []
        self._sample = 1.0
        self._requests = 0
        self._decisions = 0
        self._equal = 0
        self._difference: Difference | None = None
        self._unanswered = 0
        self._reasons: dict[str, list[int]] = {}
        self._logged = SideTally()
        self._replayed = SideTally()
        self._wait_changes = 0
        self._wait_change_ms = 0.0
        self._worst = WorstDisagreements(worst)

    def add(self, line: LoggedLine) -> None:
        """Decide once more what ``line`` tells of."""
        record, header = line.decision, line.header
        if header.policy not in self._policies:
            self._policies.append(header.policy)
        self._sample = min(self._sample, header.sample)
        self._decisions += 1
        self._requests += record.attempt == 1
        made = (self._policy or line.policy).pick(record.request, record.views)
        logged = record.decision
        answers = self._reasons.setdefault(logged.reason.value, [0, 0])
        answers[0] += 1
        self._logged.add(record.request, record.views, logged)
        if made is None:
            self._unanswered += 1
            self._note(line, logged, None)
            return
        self._replayed.add(record.request, record.views, made)
        self._note(line, logged, made)
        if made.replica == logged.replica:
            answers[1] += 1
        else:
            self._worst.add(line, made)
        if made.predicted_wait_ms is not None and logged.predicted_wait_ms is not None:
            self._wait_changes += 1
            self._wait_change_ms += made.predicted_wait_ms - logged.predicted_wait_ms

    def _note(self, line: LoggedLine, logged: SeenDecision, made: Decision | None) -> None:
        before, after = msgspec.json.encode(logged), msgspec.json.encode(as_logged(made))
        if before == after:
            self._equal += 1
        elif self._difference is None:
            found = first_difference(msgspec.json.decode(before), msgspec.json.decode(after))
            field, old, new = found or ("", logged.replica, None)
            self._difference = Difference(
                file=line.place.file,
                line=line.place.line,
                id=line.decision.id,
                field=field.lstrip(".") or "decision",
                logged=old,
                replayed=new,
            )

    def comparison(self, log: str, torn_lines: int) -> DecisionComparison:
        """Return what it came to."""
        same = sum(answers[1] for answers in self._reasons.values())
        changes = self._wait_changes
        return DecisionComparison(
            log=log,
            requests=self._requests,
            decisions=self._decisions,
            torn_lines=torn_lines,
            sample=self._sample,
            logged_policies=tuple(self._policies),
            policy=msgspec.to_builtins(self._policy) if self._policy is not None else None,
            equal=self._equal,
            first_difference=self._difference,
            same_replica=same,
            moved=self._decisions - same - self._unanswered,
            unanswered=self._unanswered,
            reasons=tuple(
                ReasonAgreement(reason=reason, decisions=answers[0], same_replica=answers[1])
                for reason, answers in sorted(self._reasons.items())
            ),
            logged=self._logged.side(),
            replayed=self._replayed.side(),
            waits_compared=changes,
            wait_change_ms=self._wait_change_ms / changes if changes else None,
            worst=self._worst.kept(),
        )


def as_logged(made: Decision | None) -> SeenDecision | None:
    """Return a decision as a log would give it back: a whole number is a float where it may be."""
    if made is None:
        return None
    return msgspec.json.decode(msgspec.json.encode(made), type=SeenDecision)


def first_difference(before: Any, after: Any) -> tuple[str, Any, Any] | None:
    """Return the path of the first field that differs (``.a[1].b``) and its values, else None.

    Told apart is what is written differently: 0.0 and -0.0 are two.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        pairs = [(f".{key}", before.get(key), after.get(key)) for key in before | after]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(f"[{n}]", *both) for n, both in enumerate(zip(before, after, strict=True))]
    elif msgspec.json.encode(before) == msgspec.json.encode(after):
        return None
    else:
        return "", before, after
    for step, old, new in pairs:
        found = first_difference(old, new)
        if found is not None:
            return step + found[0], found[1], found[2]
    return None
