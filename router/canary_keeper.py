"""Watches a canary beside the requests: adds up what all routers counted, judges, and ends it.

What routers counted meets in the state store, once a second. A store that is away costs nothing but
that: each router then judges its own requests, and one that ends the canary ends it at once for
itself, and for the others as soon as the store takes it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from router.canary_setting import without_canary
from router.canary_sums import merged, pack, unpack
from router.canary_verdict import judge
from router.canary_words import reason_of
from router.error import RouterError
from router.settings import CANARY
from state.store import StateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.canary import Canary
    from router.canary_setting import CanarySettings
    from router.canary_sums import CanarySums
    from router.canary_verdict import CanaryVerdict
    from router.setting_change import SettingChanges
    from router.settings import SettingRules
    from router.trial import Trial
    from state.canary_store import CanaryStore
    from state.setting_book import SettingBook

_log = logging.getLogger(__name__)

TICK_S: Final = 1.0
SHARED_ALPHA: Final = 0.04
"""Of the 5 % that may be wrong: for what all routers counted together."""
OWN_ALPHA: Final = 0.01
"""The rest, for all routers that judge their own requests while the store is away."""
ROUTERS_MOST: Final = 256
AUTHOR: Final = "warmroute"
ROLLED_BACK: Final = "rolled_back"
ENDED: Final = "ended"
PROMOTED: Final = "promoted"


class Ending(NamedTuple):
    """How a canary ends by itself, and why. The author is the router."""

    kind: str
    reason: str
    author: str = AUTHOR


class CanaryKeeper:
    """Runs beside one router's requests."""

    def __init__(
        self,
        canary: Canary,
        store: CanaryStore,
        book: SettingBook,
        rules: SettingRules,
        changes: SettingChanges,
        *,
        routers: Callable[[], int],
        unix_clock: Callable[[], float],
    ) -> None:
        self._canary = canary
        self._store = store
        self._book = book
        self._rules = rules
        self._changes = changes
        self._routers = routers
        self._unix_clock = unix_clock
        self._name = secrets.token_hex(6)
        self._others: tuple[str, list[CanarySums]] = ("", [])
        self._wakes = asyncio.Event()
        self._write_fault = ""
        self.fault = ""
        """Why this router judges its own requests only; empty where it does not."""
        canary.on_burst = self._wakes.set

    @property
    def counted_by(self) -> int:
        """Of how many lives of routers the figures are."""
        trial = self._canary.trial
        return 1 + (len(self._others[1]) if trial and self._others[0] == trial.epoch else 0)

    async def run(self) -> None:
        """Look every ``TICK_S``, and at once where errors burst, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wakes.wait()
            self._wakes.clear()
            await self.tick()

    async def tick(self) -> None:
        """Look once."""
        trial = self._canary.trial
        if trial is None or trial.settings.ended_unix_s is not None:
            return
        if trial.settings.is_over(self._unix_clock()):
            self._canary.end()
        await self._exchange(trial)
        if trial is not self._canary.trial:  # the settings changed meanwhile
            return
        verdict = self.judged(trial)
        ending = self._ending(trial, verdict)
        if ending is not None:
            self._canary.end()
            await self._write(trial.settings, ending, verdict)

    def judged(self, trial: Trial) -> CanaryVerdict:
        """Return what can be said by now: by all routers' requests, or by this one's alone."""
        alpha = OWN_ALPHA / max(1, self._routers()) if self.fault else SHARED_ALPHA
        return judge(self._whole(trial), trial.settings.guardrails, alpha)

    def _whole(self, trial: Trial) -> CanarySums:
        epoch, others = self._others
        return merged([trial.counter.sums, *(others if epoch == trial.epoch else [])])

    async def _exchange(self, trial: Trial) -> None:
        try:
            counted = pack(trial.counter.sums)
            values = await self._store.exchange(trial.epoch, self._name, counted)
        except StateError as error:
            self._others = (trial.epoch, [])
            if not self.fault:
                _log.warning("canary: %s; this router judges its own requests", error)
            self.fault = str(error)
            return
        if self.fault:
            _log.info("canary: the state store answers again")
        self.fault = ""
        told = [unpack(value) for value in values[:ROUTERS_MOST]]
        self._others = (trial.epoch, [one for one in told if one is not None])

    def _ending(self, trial: Trial, verdict: CanaryVerdict) -> Ending | None:
        settings, burst = trial.settings, trial.burst.words
        if burst or verdict.broken:
            words = burst or reason_of(verdict.broken)
            return Ending(ROLLED_BACK, f"canary {settings.id} rolled back: {words}"[:500])
        most = settings.max_requests
        is_full = most is not None and self._whole(trial).total >= most
        if not is_full and not settings.is_over(self._unix_clock()):
            return None
        what = f"{most} requests" if is_full else f"{settings.duration_s:g} s"
        if settings.at_end == "promote":
            if not verdict.unsure:
                reason = f"canary {settings.id} promoted after {what}: within every guardrail"
                return Ending(PROMOTED, reason)
            words = reason_of(verdict.unsure)
            reason = f"canary {settings.id} ended after {what}, not promoted: not sure of {words}"
            return Ending(ENDED, reason[:500])
        return Ending(ENDED, f"canary {settings.id} ended after {what}: {verdict.word.value}")

    async def _write(
        self, settings: CanarySettings, ending: Ending, verdict: CanaryVerdict
    ) -> None:
        """Tell all routers; what goes wrong is one line of the log, and tried again."""
        document = self._changes.document()
        if document.get(CANARY, {}).get("id") != settings.id:
            return
        told = msgspec.to_builtins(verdict)
        after = settings_after(self._rules, document, ending.kind, self._unix_clock())
        try:
            await self._changes.make(
                f"canary_{ending.kind}", after, ending, self._book.stored_version, told
            )
        except RouterError as error:
            if str(error) != self._write_fault:
                _log.warning("canary: its end is not written yet: %s", error)
            self._write_fault = str(error)
            return
        self._write_fault = ""
        self._canary.ends.add(1, (ending.kind,))
        _log.info("%s", ending.reason)


def settings_after(
    rules: SettingRules, document: dict[str, Any], kind: str, unix_s: float
) -> dict[str, Any]:
    """Return the document without its canary, or with the canary's policy, or its end, in it."""
    if kind == ENDED:
        return {**document, CANARY: {**document[CANARY], "ended_unix_s": unix_s}}
    after = without_canary(document)
    if kind == PROMOTED:
        after = rules.patched(after, {"policy": document[CANARY]["policy"]})
    return after
