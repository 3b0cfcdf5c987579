"""What a sidecar found out about its engine, gathered for people to read.

Most of it the sidecar knows anyway. What only the raw payloads show (encoding, kind of hashes, the
engine's own names of media) is read from a few of them a second time: the first ones, those that
show a tier or group not seen before, and one now and then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import structs

from sidecar.event import MEDIA, ClearedPages
from sidecar.scrape import EngineError
from state.facts import key_check
from state.model import EngineKind, EventCounts, ReplicaFacts

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.event import EventBatch
    from sidecar.fold import PageFolder
    from sidecar.metrics import RenewalReason, SidecarMetrics
    from sidecar.profile import EngineProfile
    from sidecar.scrape import EngineClient
    from sidecar.sequence import Batch
    from state.model import ReplicaRecord
    from state.secret import ChainKeys

FIRST_LOOKS: Final = 8
LOOK_EVERY: Final = 64
MOST_ODD_LOOKS: Final = 256
TELL_HEARTBEATS: Final = 5
"""Facts without news go with one of so many heartbeats."""
_MOST_NAMES: Final = 16
_MOST_NUMBERS: Final = 64
_MOST_CHARS: Final = 128
_MOST_IDENTIFY: Final = 3
_PRINTABLE: Final = range(0x20, 0x7F)
_STORED: Final = "BlockStored"
_MEDIUM_SLOTS: Final = {_STORED: 6, "BlockRemoved": 2}
_DEFAULT_MEDIUM: Final = "GPU"
_NO_COUNTS: Final = EventCounts()


def printable(text: str) -> str:
    """Return ``text`` as it may be shown in a terminal: short, without control characters."""
    return "".join(c if ord(c) in _PRINTABLE else "?" for c in text[:_MOST_CHARS])


class WireFacts:
    """What the events of one life of an engine look like."""

    def __init__(self) -> None:
        self.last_sequence: int | None = None
        self.encodings: dict[str, None] = {}
        self.hash_kinds: dict[str, None] = {}
        self.media: dict[str, None] = {}
        self.ranks: set[int] = set()
        self.groups: set[int] = set()
        self._pairs: set[tuple[object, int | None]] = set()
        self._batches = 0
        self._odd_looks = 0

    def look(self, batch: Batch, decoded: EventBatch) -> None:
        """Note what a batch shows; ``decoded`` is its payload."""
        self.last_sequence = batch.sequence
        if decoded.dp_rank is not None:
            _note(self.ranks, decoded.dp_rank)
        pairs = {
            (event.tier, event.group)
            for event in decoded.events
            if not isinstance(event, ClearedPages)
        }
        is_news = not pairs <= self._pairs and len(self._pairs) < _MOST_NUMBERS
        is_odd = any(tier is None for tier, _ in pairs) and self._odd_looks < MOST_ODD_LOOKS
        self._odd_looks += is_odd
        if is_news:
            self._pairs |= pairs
            for _, group in pairs:
                if group is not None:
                    _note(self.groups, group)
        if is_news or is_odd or self._batches < FIRST_LOOKS or not self._batches % LOOK_EVERY:
            self._read(batch.payload)
        self._batches += 1

    def _read(self, payload: bytes) -> None:
        match msgspec.msgpack.decode(payload):
            case [_, list(events), *_]:
                for event in events:
                    self._read_event(event)

    def _read_event(self, event: object) -> None:
        match event:
            case {"type": ("BlockStored" | "BlockRemoved"), **fields}:
                self._keep(self.encodings, "map")
                self._read_fields(fields.get("block_hashes"), fields.get("medium"))
            case [("BlockStored" | "BlockRemoved") as tag, *slots]:
                self._keep(self.encodings, "array")
                place = _MEDIUM_SLOTS[str(tag)] - 1
                medium = slots[place] if place < len(slots) else None
                self._read_fields(slots[0] if slots else None, medium)

    def _read_fields(self, hashes: object, medium: object) -> None:
        for value in hashes if isinstance(hashes, list) else ():
            self._note_hash(value)
        if medium is None or isinstance(medium, str):
            self._keep(self.media, printable(medium or _DEFAULT_MEDIUM))

    def _note_hash(self, value: object) -> None:
        kinds = self.hash_kinds
        if isinstance(value, bytes):
            self._keep(kinds, f"bytes of {len(value)}")
        elif isinstance(value, int):
            if value < 0 and "signed int" not in kinds:
                kinds.pop("int", None)  # they were the positive ones of signed hashes
                self._keep(kinds, "signed int")
            elif "signed int" not in kinds:
                self._keep(kinds, "int")

    @staticmethod
    def _keep(names: dict[str, None], name: str) -> None:
        if len(names) < _MOST_NAMES:
            names[name] = None


def _note(numbers: set[int], number: int) -> None:
    if number >= 0 and len(numbers) < _MOST_NUMBERS:
        numbers.add(number)


class FactBook:
    """Gathers the facts of one replica; all but ``identify`` is synchronous."""

    def __init__(self, keys: ChainKeys, metrics: SidecarMetrics) -> None:
        self._key_check = key_check(keys)
        self._metrics = metrics
        self._profile: EngineProfile | None = None
        self._folder: PageFolder | None = None
        self._reason = ""
        self._kind = EngineKind.UNKNOWN
        self._version: str | None = None
        self._identify_left = _MOST_IDENTIFY
        self.wire = WireFacts()

    def begin(self, profile: EngineProfile, folder: PageFolder, reason: RenewalReason) -> None:
        """Start over: another life of the engine, which may be another version of it."""
        self._profile, self._folder, self._reason = profile, folder, reason.value
        self._identify_left = _MOST_IDENTIFY
        self.wire = WireFacts()

    async def identify(self, client: EngineClient) -> None:
        """Ask the engine which program it is, until it was told, a few times in each life."""
        if self._identify_left:
            self._identify_left -= 1
            self._kind, self._version = await identify(client)
            if self._kind is not EngineKind.UNKNOWN:
                self._identify_left = 0

    def gather(self) -> ReplicaFacts | None:
        """Return what is known now; None before the first life of the engine."""
        profile, folder, metrics, wire = self._profile, self._folder, self._metrics, self.wire
        if profile is None or folder is None:
            return None
        source = profile.source
        return ReplicaFacts(
            engine=self._kind,
            engine_version=self._version,
            events=None if source is None else printable(source.events),
            has_replay=source is not None and source.replay is not None,
            encodings=tuple(wire.encodings),
            hash_kinds=tuple(wire.hash_kinds),
            media=tuple(wire.media),
            unknown_media=tuple(name for name in wire.media if name not in MEDIA),
            ranks=tuple(sorted(wire.ranks)),
            groups=tuple(sorted(wire.groups)),
            followed_group=folder.group,
            page_tokens=profile.page_tokens,
            block_tokens=profile.identity.block_tokens,
            capacity_pages=profile.capacity_pages,
            is_engine_up=metrics.is_engine_up,
            is_silent=metrics.is_missing_events,
            has_unfit_pages=metrics.has_unfit_pages,
            key_check=self._key_check,
            reason=self._reason,
            counts=self._counts(folder),
        )

    def _counts(self, folder: PageFolder) -> EventCounts:
        metrics = self._metrics
        totals = metrics.totals()
        plain_pages, salted_pages = folder.pages_by_salt()
        return EventCounts(
            last_sequence=self.wire.last_sequence,
            batches=metrics.batches,
            gaps=totals["gaps"],
            missed_batches=totals["missed_batches"],
            dropped_batches=totals["dropped_batches"],
            malformed_events=metrics.malformed_events,
            unknown_events=metrics.unknown_events,
            stored_pages=totals["stored_pages"],
            removed_pages=totals["removed_pages"],
            returned_pages=totals["returned_pages"],
            held_pages=folder.held_pages(),
            plain_pages=plain_pages,
            salted_pages=salted_pages,
            generations=metrics.generations,
        )


async def identify(client: EngineClient) -> tuple[EngineKind, str | None]:
    """Return which program an engine is, and its version where it tells."""
    told = await _version(client)
    if told == EngineKind.WORKER.value:
        return EngineKind.WORKER, None
    try:
        owners = {card.owned_by for card in await client.models()}
    except EngineError:
        owners = set()
    if EngineKind.VLLM.value in owners:
        return EngineKind.VLLM, told
    info = await client.sglang_info()
    if info is not None or EngineKind.SGLANG.value in owners:
        version = info.version if info is not None else None
        return EngineKind.SGLANG, printable(version) if version else told
    return EngineKind.UNKNOWN, told


async def _version(client: EngineClient) -> str | None:
    try:
        answer: Any = msgspec.json.decode(await client.get("/version"))
    except (EngineError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    version = answer.get("version") if isinstance(answer, dict) else None
    return printable(version) if isinstance(version, str) else None


class FactPace:
    """Says which heartbeats carry facts: a generation's first, those with news, a few besides."""

    def __init__(self, clock: Callable[[], float], heartbeat_interval_s: float) -> None:
        self._clock = clock
        self._interval_s = TELL_HEARTBEATS * heartbeat_interval_s
        self._facts: ReplicaFacts | None = None
        self._told: ReplicaFacts | None = None
        self._due_s = 0.0

    def tell(self, facts: ReplicaFacts | None) -> None:
        """Let the next heartbeat that is to carry facts carry these."""
        self._facts = facts

    def due(self, record: ReplicaRecord) -> ReplicaFacts | None:
        """Return what a heartbeat of ``record`` shall carry; None for nothing.

        Counts change all the time and are no news.
        """
        if self._facts is None:
            return None
        facts = structs.replace(self._facts, generation=record.generation)
        lasting = structs.replace(facts, counts=_NO_COUNTS)
        now_s = self._clock()
        if lasting == self._told and now_s < self._due_s:
            return None
        self._told, self._due_s = lasting, now_s + self._interval_s
        return facts
