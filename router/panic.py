"""When too few replicas of a model are left to be choosy. Pure: no clock, no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Count(NamedTuple):
    """The replicas of a model: all, those that pass their checks, and of these those not held."""

    all: int
    up: int
    available: int


class Panic:
    """The models that are short of replicas.

    A model enters below ``fraction`` and leaves when there has been enough for ``leave_s``, so that
    one replica at the edge does not switch it to and fro. Where no replica passes its checks there
    is no panic: nobody can be asked, and the answer is 503.
    """

    def __init__(self, fraction: float, leave_s: float) -> None:
        self._fraction = fraction
        self._leave_s = leave_s
        self.models: dict[str, float | None] = {}
        """Since when there has been enough again; None while there is not."""

    def adopt(self, fraction: float, leave_s: float) -> None:
        """Go by other thresholds from the next look on."""
        self._fraction, self._leave_s = fraction, leave_s

    def look(self, counts: Mapping[str, Count], now_s: float) -> list[tuple[str, bool]]:
        """Return which models entered (True) or left since the last look."""
        turns: list[tuple[str, bool]] = []
        for model, count in counts.items():
            is_short = count.up > 0 and count.available < self._fraction * count.all
            if is_short:
                if model not in self.models:
                    turns.append((model, True))
                self.models[model] = None
            elif model in self.models:
                since_s = self.models[model]
                if since_s is None:
                    since_s = self.models[model] = now_s
                if count.up == 0 or now_s - since_s >= self._leave_s:
                    del self.models[model]
                    turns.append((model, False))
        for model in [each for each in self.models if each not in counts]:
            del self.models[model]
            turns.append((model, False))
        return turns
