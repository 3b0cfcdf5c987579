"""The epochs that one router knows, and how they stay the same as those of the other routers.

``exchange`` is one round with the store. A later epoch there is learned; an earlier one, or none,
is replaced by ours: what a flushed store lost is back after one round of any router. Rounds come
before a router reads anything else of the store, so that a router which was cut off knows of a
deletion before its view counts as live again. Between changes a round is one GET.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from state.client import read_value, refuses_writes
from state.rhythm import Signal
from state.scope_epoch import EPOCH_TTL_S, NO_EPOCH, VERSION_KEY, settled, unsettled_epoch
from state.script import Script, try_scripts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from state.client import Client
    from state.scope_epoch import EpochCodec, ScopeEpoch

    OnChange = Callable[[str, ScopeEpoch, ScopeEpoch], None]

FULL_ROUND_S: Final = 30.0
"""So often all epochs are read although none changed: it keeps them alive in the store."""
_CHUNK: Final = 256
_TTL_MS: Final = round(EPOCH_TTL_S * 1000)
_VERSION_BYTES: Final = 8


def _nobody(scope: str, before: ScopeEpoch, now: ScopeEpoch) -> None:
    """Do nothing about a change."""


class EpochBook:
    """The newest known epoch of each scope. Reading it is a dict lookup.

    ``known`` is what was kept from the last run. A scope of which nothing is known has an epoch of
    this router's own until the store is heard, where ``opens_new``, and the nameless one else.
    ``on_change`` is called with the scope, the epoch before and the one now.
    """

    def __init__(
        self,
        codec: EpochCodec,
        scopes: Iterable[str],
        known: Mapping[str, ScopeEpoch],
        *,
        opens_new: bool,
        clock: Callable[[], float],
    ) -> None:
        self._codec = codec
        self._opens_new = opens_new
        self._clock = clock
        self._epochs: dict[str, ScopeEpoch] = dict(known)
        self._names = {scope: epoch.name for scope, epoch in known.items()}
        self._begun: dict[str, bool] = {}
        """Scopes whose new epoch the store has not confirmed; whether the one before lives on."""
        self._version: bytes | None = None
        self._full_due_s = float("-inf")
        self._put = Script("scope_put")
        self._progress = Signal()
        self.on_change: OnChange = _nobody
        self.rounds = 0
        self.malformed_values = 0
        for scope in scopes:
            self.of(scope)

    def of(self, scope: str) -> str:
        """Return the name of the present epoch of ``scope``."""
        name = self._names.get(scope)
        if name is None:
            epoch = unsettled_epoch() if self._opens_new else NO_EPOCH
            self._epochs[scope] = epoch
            name = self._names[scope] = epoch.name
            self._full_due_s = float("-inf")
        return name

    def epoch(self, scope: str) -> ScopeEpoch:
        """Return the present epoch of ``scope``."""
        self.of(scope)
        return self._epochs[scope]

    def __contains__(self, scope: str) -> bool:
        return scope in self._epochs

    def epochs(self) -> dict[str, ScopeEpoch]:
        """Return all that is known."""
        return dict(self._epochs)

    def begin(self, scope: str, *, keeps_previous: bool) -> ScopeEpoch:
        """Begin a new epoch of ``scope``, here at once and with the next round everywhere."""
        before = self.epoch(scope)
        now = before.following(keeps_previous=keeps_previous)
        self._begun[scope] = keeps_previous
        self._note(scope, before, now)
        return now

    async def shared(self, scope: str) -> None:
        """Wait until the store has the epoch that was begun last."""
        await self._progress.until(lambda: scope not in self._begun)

    async def heard(self) -> None:
        """Wait until the store was heard once."""
        await self._progress.until(lambda: self.rounds > 0)

    async def exchange(self, client: Client) -> None:
        """Do one round; raises what the store raises, unless it only refuses to be written."""
        pipeline = client.pipeline(transaction=False)
        pipeline.execute_command("GET", VERSION_KEY)
        [reply] = await pipeline.execute(raise_on_error=False)
        version, now_s = read_value(reply), self._clock()
        if version == self._version and not self._begun and now_s < self._full_due_s:
            return
        self._full_due_s = now_s + FULL_ROUND_S
        scopes, agreed = list(self._epochs), True
        for start in range(0, len(scopes), _CHUNK):
            chunk = scopes[start : start + _CHUNK]
            values = await self._read(client, chunk)
            for scope, value in zip(chunk, values, strict=True):
                agreed &= await self._reconcile(client, scope, value)
        if agreed:
            self._version = version
        else:
            self._full_due_s = float("-inf")
        self.rounds += 1
        self._progress.send()

    async def _read(self, client: Client, scopes: Sequence[str]) -> list[bytes | None]:
        """Return what the store has for ``scopes``, and let it live on."""
        pipeline = client.pipeline(transaction=False)
        keys = [self._codec.key(scope) for scope in scopes]
        for key in keys:
            pipeline.execute_command("GET", key)
        for key in (*keys, VERSION_KEY):
            pipeline.execute_command("PEXPIRE", key, _TTL_MS)
        replies = await pipeline.execute(raise_on_error=False)
        return [read_value(reply) for reply in replies[: len(keys)]]

    async def _reconcile(self, client: Client, scope: str, value: bytes | None) -> bool:
        """Learn the epoch that the store has, or give it ours; False when that has to be redone."""
        held = self._codec.decode(scope, value) if value else None
        self.malformed_values += value is not None and held is None
        theirs, ours = held or NO_EPOCH, self._epochs[scope]
        if theirs == ours:
            self._begun.pop(scope, None)
            return True
        if theirs.is_later(ours):
            if scope not in self._begun:
                self._note(scope, ours, theirs)
                return True
            # Begun here while the others were further: what they have since must end, too.
            now = theirs.following(keeps_previous=self._begun[scope])
            self._note(scope, theirs, now)
            ours = now
        if not ours.nonce:
            return True
        wanted = settled(ours)
        encoded = self._codec.encode(scope, wanted)
        version = secrets.token_bytes(_VERSION_BYTES)
        names = [self._codec.key(scope), VERSION_KEY]
        call = self._put.call(names, [value or b"", encoded, version, _TTL_MS])
        [answer] = await try_scripts(client, [call])
        if isinstance(answer, Exception):
            if refuses_writes(answer):
                return False
            raise answer
        if answer != encoded or self._epochs[scope] != ours:
            return False
        self._begun.pop(scope, None)
        self._note(scope, ours, wanted)
        return True

    def _note(self, scope: str, before: ScopeEpoch, now: ScopeEpoch) -> None:
        self._epochs[scope] = now
        self._names[scope] = now.name
        self.on_change(scope, before, now)


def ended_names(before: ScopeEpoch, now: ScopeEpoch) -> tuple[str, ...]:
    """Return the names of the epochs that lived before a change and do not live after it."""
    return tuple(name for name in before.live_names if name not in now.live_names)
