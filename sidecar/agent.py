"""The sidecar: registers one replica and keeps the shared state true about it.

Three tasks run beside each other. *Follow* reads the engine's events and folds them. *Watch* asks
for health and load. The announcer writes. They meet in ``SidecarAgent``, which decides when the
engine began a new life: everything announced before is then void, and the next generation starts.

An engine whose health checks fail is deregistered (its cache may be gone, and routers must not
wait for it); folding goes on, so that an engine that was only slow comes back with all its blocks.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import zmq

from sidecar.adapter import AdapterBook, has_nameless_pages
from sidecar.announce import FencedError
from sidecar.deed import DeedWatch, Loss
from sidecar.event import ClearedPages, MalformedError, decode_batch
from sidecar.facts import FactBook
from sidecar.fold import PageFolder, PageSizeError
from sidecar.leave import drain
from sidecar.life import RENEWAL_OF_RESET, CacheLife
from sidecar.metrics import RenewalReason, SidecarMetrics
from sidecar.profile import (
    SettingsError,
    await_engine,
    chain_keys,
    discover,
    is_same_life,
    record_of,
    replica_name,
    with_page,
    with_weights,
)
from sidecar.scrape import EngineError
from sidecar.silence import Silence
from sidecar.subscriber import EventSubscriber, Reset, ResetReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.announce import Announcer
    from sidecar.profile import EngineProfile, SidecarSettings
    from sidecar.scrape import EngineClient, EngineMetrics
    from sidecar.sequence import Batch
    from state.model import ReplicaId

_SOCKET_RETRY_S: Final = 5.0
_LOST_LINK_POLL_S: Final = 0.25
_MOST_TURN_S: Final = 0.002
_MAX_PAGE_CHANGES: Final = 3
_LOG = logging.getLogger("warmroute.sidecar")


class SidecarAgent:
    """One engine, one replica, one run."""

    def __init__(
        self,
        settings: SidecarSettings,
        client: EngineClient,
        announcer: Announcer,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._client = client
        self._announcer = announcer
        self._clock = clock
        self._replica: ReplicaId = replica_name(settings, client)
        self._sidecar = secrets.token_hex(8)
        self._adapters = AdapterBook()
        self._has_nameless_pages = False
        self._profile: EngineProfile | None = None
        self._folder: PageFolder | None = None
        self._subscriber: EventSubscriber | None = None
        self._failed_checks = 0
        self._page_changes = 0
        self._is_awaiting_reset = False
        self._must_discover = False
        self._source_changed = asyncio.Event()
        self._link_lost = asyncio.Event()
        self._silence = Silence(self._replica, settings.event_silence_s)
        self._deeds = DeedWatch()
        self._life = CacheLife()
        self.metrics = SidecarMetrics(self._replica, lambda: self._announcer.failed_writes)
        self._keys = chain_keys(settings)
        self._facts = FactBook(self._keys, self.metrics)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop``, then drain and deregister; raises FencedError."""
        profile = await await_engine(self._settings, self._client, self._replica, stop)
        if profile is None:
            return
        self.metrics.is_engine_up = True
        if profile.source is None:
            self._begin_life(profile, RenewalReason.START)
        self._profile = profile
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._announcer.run()),
                    tasks.create_task(self._follow()),
                    tasks.create_task(self._watch()),
                ]
                await stop.wait()
                await drain(
                    self._announcer, self._client, self._replica, self._settings.drain_grace_s
                )
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as group:
            expected = group.subgroup((FencedError, SettingsError))
            if expected is None:
                raise
            raise expected.exceptions[0] from None

    def _begin_life(self, profile: EngineProfile, reason: RenewalReason) -> None:
        """Start from an empty cache under a new generation."""
        self._profile = profile
        self._life.begin(profile, reason, is_known=not self._must_discover)
        self._folder = PageFolder(
            profile.identity,
            profile.page_tokens,
            keys=self._keys,
            capacity_pages=profile.capacity_pages,
            adapter_keys=self._adapters.keys,
        )
        self.metrics.follow_folder(self._folder, reason)
        self._facts.begin(profile, self._folder, reason)
        self.metrics.has_unfit_pages = False
        self._announce()

    def _announce(self) -> None:
        """Announce the folder under a new generation, unless the engine is down."""
        profile, folder = self._profile, self._folder
        if profile is None or folder is None or self._is_down():
            return
        settings, client = self._settings, self._client
        record = record_of(profile, settings, client, self._sidecar, self._life.name)
        self._announcer.renew(record, folder)

    def _is_down(self) -> bool:
        return self._failed_checks >= self._settings.failed_checks

    async def _follow(self) -> None:
        """Read and fold events for as long as the engine publishes any."""
        while True:
            source = self._profile.source if self._profile is not None else None
            self._source_changed.clear()
            self._is_awaiting_reset = self._is_awaiting_reset and source is not None
            self._silence.begin()
            self.metrics.is_following = source is not None
            if source is None:
                _LOG.warning("no events to follow: replica=%s is known by load", self._replica)
                await self._source_changed.wait()
                continue
            self._subscriber = EventSubscriber(source, on_loss=self._link_lost.set)
            self.metrics.follow_subscriber(self._subscriber)
            reading = asyncio.create_task(self._read(self._subscriber))
            changed = asyncio.create_task(self._source_changed.wait())
            try:
                await asyncio.wait({reading, changed}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    reading.result()
            except zmq.ZMQError as error:
                _LOG.warning("event socket failed: replica=%s %s", self._replica, error)
                if self._folder is None and self._profile is not None:
                    self._begin_life(self._profile, RenewalReason.START)
                await asyncio.sleep(_SOCKET_RETRY_S)
            finally:
                self._subscriber = None
                for task in (reading, changed):
                    task.cancel()
                await asyncio.gather(reading, changed, return_exceptions=True)

    async def _read(self, subscriber: EventSubscriber) -> None:
        turn_s = self._clock()
        async for delivery in subscriber.deliveries():
            if isinstance(delivery, Reset):
                self._reset(delivery)
            elif not self._is_awaiting_reset:
                self._fold(delivery)
            if self._clock() - turn_s > _MOST_TURN_S:
                await asyncio.sleep(0)  # a long replay must not hold up the heartbeats
                turn_s = self._clock()

    def _reset(self, reset: Reset) -> None:
        if reset.reason is ResetReason.RESTARTED:
            self._must_discover = True
        if self._is_awaiting_reset:
            self._is_awaiting_reset = False  # the new life began before the replay was asked for
            self.metrics.has_unfit_pages = False  # what comes now says whether it still is so
        elif self._profile is not None:
            if reset.reason is not ResetReason.CONNECTED:
                _LOG.info("new generation: replica=%s reason=%s", self._replica, reset.reason)
            self._begin_life(self._profile, RENEWAL_OF_RESET[reset.reason])

    def _begin_again(self, profile: EngineProfile, reason: RenewalReason) -> None:
        """Void everything at once, then learn again what the engine holds."""
        self._begin_life(profile, reason)
        if self._subscriber is not None:
            self._is_awaiting_reset = True
            self._subscriber.resync()

    def _fold(self, batch: Batch) -> None:
        folder = self._folder
        if folder is None:
            return
        counts = self.metrics
        counts.batches += 1
        self._silence.hear()
        try:
            decoded = decode_batch(batch.payload)
        except MalformedError:
            counts.malformed_events += 1
            return
        self._facts.wire.look(batch, decoded)
        self._deeds.hear(batch.sequence, decoded.events)
        if decoded.malformed_events and not counts.malformed_events:
            _LOG.warning("events that no known engine sends: replica=%s", self._replica)
        counts.malformed_events += decoded.malformed_events
        counts.unknown_events += decoded.unknown_events
        try:
            self._announcer.add(folder.apply(decoded.events))
        except PageSizeError as error:
            self._change_page_size(error.page_tokens)

    def _change_page_size(self, page_tokens: int) -> None:
        """Believe the events, but not an engine that keeps changing its mind."""
        profile = self._profile
        if profile is None:
            return
        self._page_changes += 1
        changed = with_page(profile, page_tokens, self._settings)
        does_fit = changed.identity.block_tokens % page_tokens == 0
        if does_fit and self._page_changes <= _MAX_PAGE_CHANGES:
            _LOG.warning("page size is %d: replica=%s", page_tokens, self._replica)
            self._begin_again(changed, RenewalReason.PAGE_SIZE)
            return
        _LOG.error(
            "pages of %d tokens do not fit blocks of %d: replica=%s is known by load only",
            page_tokens,
            profile.identity.block_tokens,
            self._replica,
        )
        self._is_awaiting_reset = True  # until the engine begins another life
        self._begin_life(profile, RenewalReason.PAGE_SIZE)
        self.metrics.has_unfit_pages = True

    async def _watch(self) -> None:
        """Ask for health and load, each ``scrape_interval_s``.

        A lost event link is most likely a dead engine, and soon another life of it: then more
        often, because until it is noticed routers count on a cache that is gone.
        """
        while True:
            self._link_lost.clear()
            if await self._client.is_healthy():
                await self._pass_check()
            else:
                self._fail_check()
            pause_s = self._settings.scrape_interval_s
            if self._has_lost_link():
                pause_s = min(pause_s, _LOST_LINK_POLL_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._link_lost.wait()

    async def _pass_check(self) -> None:
        metrics = await self._metrics()
        self._announcer.report(metrics.load if metrics else None)
        self.metrics.is_engine_up = True
        if metrics is not None and await self._is_resting(metrics):
            return
        source = self._profile.source if self._profile is not None else None
        self.metrics.is_missing_events = self._silence.look(source, metrics, self._clock())
        await self._facts.identify(self._client)
        self._announcer.tell(self._facts.gather())
        was_down, self._failed_checks = self._is_down(), 0
        started_at_s = metrics.started_at_s if metrics else None
        is_doubtful = self._must_discover or self._has_lost_link()
        if was_down or is_doubtful or self._is_new_process(started_at_s):
            await self._rediscover(is_back=was_down)
        await self._look_at_adapters()

    async def _is_resting(self, metrics: EngineMetrics) -> bool:
        """Void what the engine lost without telling; return whether it sleeps.

        Then it is off: requests would wait until somebody wakes it.
        """
        loss = self._deeds.look(metrics.deeds, metrics.load)
        if loss is Loss.WEIGHTS:
            await self._change_weights()
        elif loss is Loss.CACHE and self._folder is not None and self._folder.known_pages():
            _LOG.info("a cache was dropped and no event told: replica=%s", self._replica)
            self.metrics.untold_drops += 1
            self._announcer.add(self._folder.apply((ClearedPages(),)))
        self.metrics.is_engine_asleep = metrics.deeds.is_asleep
        if metrics.deeds.is_asleep and not self._is_down():
            _LOG.info("engine sleeps, deregistering: replica=%s", self._replica)
            self._failed_checks = self._settings.failed_checks
            self._announcer.withdraw()
        return metrics.deeds.is_asleep

    async def _change_weights(self) -> None:
        """Begin again with nothing: what is replayed was computed with other weights."""
        try:
            self._profile = await discover(self._settings, self._client)
        except EngineError:
            self._must_discover = True  # what the weights are called is not known yet
        self.renew(RenewalReason.WEIGHTS)

    def renew(self, reason: RenewalReason, weights_revision: str | None = None) -> None:
        """Void everything, and learn only what is stored from now on."""
        if weights_revision is not None:
            self._settings = msgspec.structs.replace(
                self._settings, weights_revision=weights_revision
            )
        profile = self._profile
        if profile is not None:
            _LOG.info("new generation: replica=%s reason=%s", self._replica, reason)
            revision = self._settings.weights_revision or profile.identity.weights_revision
            self._begin_life(with_weights(profile, revision), reason)

    async def _look_at_adapters(self) -> None:
        """Follow which adapters the engine has; what other weights had computed is void."""
        try:
            cards = await self._client.models()
        except EngineError:
            return
        for name in self._adapters.look(cards):
            _LOG.info("an adapter has other weights: replica=%s", self._replica)
            if self._folder is not None:
                self._announcer.add(self._folder.drop_adapter(name))
        self._announcer.list_adapters(self._adapters.listed)
        is_nameless = has_nameless_pages(cards)
        if is_nameless is not self._has_nameless_pages:
            self._has_nameless_pages = is_nameless
            await self._rediscover(is_back=False)

    def _has_lost_link(self) -> bool:
        return self._subscriber is not None and self._subscriber.is_lost

    def _fail_check(self) -> None:
        self._announcer.report(None)
        self._failed_checks += 1
        if self._is_down() and self.metrics.is_engine_up:
            self.metrics.is_engine_up = self.metrics.is_engine_asleep = False
            _LOG.warning("engine is down, deregistering: replica=%s", self._replica)
            self._announcer.withdraw()

    def _is_new_process(self, started_at_s: float | None) -> bool:
        known_s = self._profile.started_at_s if self._profile is not None else None
        return None not in (known_s, started_at_s) and known_s != started_at_s

    async def _rediscover(self, *, is_back: bool) -> None:
        """Learn what the engine is now; a new life of it begins empty."""
        known = self._profile
        try:
            found = await discover(self._settings, self._client)
        except EngineError:
            if is_back:
                self._failed_checks = self._settings.failed_checks
            return
        is_told = self._must_discover  # the events showed the restart, and its new life began
        self._must_discover = False
        if known is not None and is_same_life(found, known, is_told=is_told):
            self._profile = found
            self._announcer.name_life(self._life.settled(found))
            if is_back or found.gifts() != known.gifts():
                self._announce()
            return
        self._page_changes = 0
        self._begin_again(found, RenewalReason.RESTARTED)
        if known is None or found.source != known.source:
            self._source_changed.set()

    async def _metrics(self) -> EngineMetrics | None:
        try:
            return await self._client.metrics()
        except EngineError:
            return None
