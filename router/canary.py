"""A canary in one router: a candidate policy decides for a share of the requests.

Its candidate decides on the same snapshots as the policy in force, and takes the same leases: only
the choice is another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from router.canary_setting import epoch_of
from router.canary_sums import has_failed
from router.split import CANDIDATE
from router.tally import Tally
from router.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import CollectorRegistry, Metric

    from router.chooser import Chooser, Routed
    from router.settings import LiveSettings
    from router.trace import DecisionRecord

EPOCHS_ENDED: Final = 64


class Canary(Collector):
    """Splits and counts as the settings say, until the trial is over or is ended here.

    ``on_burst`` is called when errors burst, after the split was ended.
    """

    def __init__(self, chooser: Chooser, unix_clock: Callable[[], float]) -> None:
        self._chooser = chooser
        self._unix_clock = unix_clock
        self._ended: list[str] = []
        self.trial: Trial | None = None
        """The comparison of the canary in the settings, also after it was ended here."""
        self.on_burst: Callable[[], None] = lambda: None
        self._requests = Tally(
            "warmroute_canary_requests",
            "Requests of a canary by side and how they ended.",
            ["side", "outcome"],
        )
        self._first_bytes = Tally(
            "warmroute_canary_first_bytes", "Answers of a canary that began, by side.", ["side"]
        )
        self._ttft = Tally(
            "warmroute_canary_ttft_seconds",
            "From their requests' arrival to their first bytes, added up, by side.",
            ["side"],
        )
        self.ends = Tally(
            "warmroute_canary_ends", "Canaries that this router ended by itself.", ["end"]
        )

    @property
    def is_splitting(self) -> bool:
        """Whether the candidate gets requests now."""
        return self._chooser.trial is not None

    def adopt(self, live: LiveSettings, version: int) -> None:
        """Go by the settings from the next request on."""
        trial, settings = self.trial, live.canary
        if settings is None:
            trial = None
        else:
            epoch = epoch_of(settings, live.policy)
            if trial is None or trial.epoch != epoch:
                trial = Trial(settings, epoch, version)
            trial.follow(settings, version)
        self.trial = trial
        is_on = trial is not None and not self._is_over(trial)
        self._chooser.adopt(live.policy, version, trial if is_on else None)

    def end(self) -> None:
        """Give all requests to the control from the next one on, whatever the settings say."""
        if self.trial is not None and self.trial.epoch not in self._ended:
            self._ended = [*self._ended[1 - EPOCHS_ENDED :], self.trial.epoch]
        self._chooser.split(None)

    def note(self, record: DecisionRecord, routed: Routed) -> None:
        """Count a request that has ended."""
        trial, assigned = routed.trial, routed.assigned
        if trial is None or assigned is None or trial is not self.trial:
            return
        trial.counter.add(assigned, record)
        side = assigned.side.value
        self._requests.add(1, (side, record.outcome))
        if record.ttft_s is not None:
            self._first_bytes.add(1, (side,))
            self._ttft.add(record.ttft_s, (side,))
        failed = has_failed(record)
        if failed is None:
            return
        is_candidate, group = assigned.side is CANDIDATE, assigned.group
        is_burst = trial.burst.add(group, is_candidate=is_candidate, has_failed=failed)
        if is_burst and self.is_splitting:
            self.end()
            self.on_burst()

    def collect(self) -> Iterable[Metric]:
        """Yield what is counted, and whether a candidate gets requests."""
        text = "1 while a candidate policy decides for a part of the requests."
        yield GaugeMetricFamily("warmroute_canary_active", text, value=float(self.is_splitting))
        for tally in (self._requests, self._first_bytes, self._ttft, self.ends):
            yield tally.metric()

    def _is_over(self, trial: Trial) -> bool:
        return trial.epoch in self._ended or trial.settings.is_over(self._unix_clock())


def open_canary(
    chooser: Chooser, registry: CollectorRegistry, unix_clock: Callable[[], float]
) -> Canary:
    """Return what splits the requests of a chooser, where the settings say so."""
    canary = Canary(chooser, unix_clock)
    registry.register(canary)
    return canary
