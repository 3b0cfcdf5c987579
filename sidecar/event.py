"""KV events as engines publish them, decoded into one frozen form; lenient, because engines differ.

A payload is msgpack ``[timestamp, [event, ...], data_parallel_rank]``. Events are arrays with
positional slots (older vLLM, SGLang) or maps with a ``type`` key; both carry the same names. What
this module does not know it skips and counts: one odd event never costs the rest of its batch.

Engine hashes are opaque *handles* here, 64-bit patterns that name a page until it is removed. A
cache salt is turned into its scope at once, so that it goes no further than this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from state.model import Tier
from state.prefix import TOKEN_BYTES, pack_tokens, salt_scope

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_PAYLOAD_BYTES: Final = 64 << 20
MAX_PAGE_TOKENS: Final = 1 << 20
MAX_ADAPTER_CHARS: Final = 512
HANDLE_BYTES: Final = 8
_HANDLE_MASK: Final = (1 << 64) - 1

_STORED_SLOTS: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
)
_REMOVED_SLOTS: Final = ("block_hashes", "medium", "group_idx", "locality", "ownership")
_TIERS: Final = {
    "GPU": Tier.GPU,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "FS": Tier.DISK,
    "OBJ": Tier.DISK,
    "STORAGE": Tier.DISK,
    "DISK": Tier.DISK,
}
MEDIA: Final = frozenset(_TIERS)
"""The names of media that are known; all others get no credit."""
_PREFIX_KINDS: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})


class MalformedError(ValueError):
    """A payload or an event that no known engine sends."""


class StoredPages(Struct, frozen=True, kw_only=True):
    """A run of consecutive pages that the engine now holds; page i's parent is page i - 1.

    ``parent`` is the handle before the run, None at the start of a prompt. ``packed_tokens`` is
    empty where the engine names known pages only. ``scope`` is None where the event does not tell,
    then it is the parent's. Pages from ``opaque_from`` on depend on more than tokens (images,
    embeddings, a nameless adapter). ``tier`` is None where the medium is not known. Groups that
    are not ``is_prefix_group`` (sliding windows, state spaces) do not hold whole prefixes.
    """

    handles: tuple[int, ...]
    parent: int | None
    packed_tokens: bytes
    page_tokens: int
    adapter: str = ""
    scope: str | None = None
    opaque_from: int | None = None
    tier: Tier | None = Tier.GPU
    group: int | None = None
    is_prefix_group: bool = True


class RemovedPages(Struct, frozen=True, kw_only=True):
    """One physical copy of each of these pages is gone from ``tier``."""

    handles: tuple[int, ...]
    tier: Tier | None = Tier.GPU
    group: int | None = None


class ClearedPages(Struct, frozen=True, kw_only=True):
    """The engine dropped its whole cache."""


KvEvent = StoredPages | RemovedPages | ClearedPages


class EventBatch(Struct, frozen=True, kw_only=True):
    """The usable events of one payload, in order, and how many others it held."""

    timestamp_s: float | None
    events: tuple[KvEvent, ...]
    dp_rank: int | None = None
    unknown_events: int = 0
    malformed_events: int = 0


def decode_batch(payload: bytes) -> EventBatch:
    """Return the events of ``payload``; raises MalformedError when it is no event batch at all."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        message = f"payload of {len(payload)} bytes"
        raise MalformedError(message)
    try:
        raw = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        message = "payload is not msgpack"
        raise MalformedError(message) from error
    match raw:
        case [timestamp, list(raw_events), *rest]:
            pass
        case _:
            message = "payload is not an event batch"
            raise MalformedError(message)
    events: list[KvEvent] = []
    unknown = malformed = 0
    for raw_event in raw_events:
        try:
            event = _decode_event(raw_event)
        except (MalformedError, OverflowError, TypeError):
            malformed += 1
            continue
        if event is None:
            unknown += 1
        else:
            events.append(event)
    return EventBatch(
        timestamp_s=float(timestamp) if isinstance(timestamp, float | int) else None,
        events=tuple(events),
        dp_rank=_optional_int(rest[0]) if rest else None,
        unknown_events=unknown,
        malformed_events=malformed,
    )


def _decode_event(raw: object) -> KvEvent | None:
    """Return the event, None for a kind that is not ours to follow."""
    fields: dict[object, object]
    match raw:
        case {"type": str(tag)} if isinstance(raw, dict):
            fields = raw
        case [str(tag), *slots]:
            fields = _named(tag, slots)
        case _:
            message = "event without a type"
            raise MalformedError(message)
    match tag:
        case "BlockStored":
            return _stored(fields)
        case "BlockRemoved":
            return RemovedPages(
                handles=_handles(fields.get("block_hashes")),
                tier=_tier(fields),
                group=_optional_int(fields.get("group_idx")),
            )
        case "AllBlocksCleared":
            return ClearedPages()
    return None


def _named(tag: str, slots: list[object]) -> dict[object, object]:
    """Return positional slots under their names; SGLang may append a map of further fields."""
    trailing: dict[object, object] = {}
    if slots and isinstance(slots[-1], dict):
        *slots, last = slots
        trailing = last if isinstance(last, dict) else {}
    names = _STORED_SLOTS if tag == "BlockStored" else _REMOVED_SLOTS
    return {**dict(zip(names, slots, strict=False)), **trailing}


def _stored(fields: dict[object, object]) -> StoredPages:
    handles = _handles(fields.get("block_hashes"))
    is_prefix_group = _kind(fields.get("kv_cache_spec_kind")) in _PREFIX_KINDS
    page_tokens = _page_tokens(fields.get("block_size"))
    packed = _packed(fields.get("token_ids"))
    if is_prefix_group:
        handles, packed = _whole_pages(handles, packed, page_tokens)
    parent = fields.get("parent_block_hash")
    adapter = _text(fields.get("lora_name"))
    scope, opaque_from = _extras(fields, adapter, is_root=parent is None, pages=len(handles))
    return StoredPages(
        handles=handles,
        parent=None if parent is None else _handle(parent),
        packed_tokens=packed,
        page_tokens=page_tokens,
        adapter=adapter,
        scope=scope,
        opaque_from=opaque_from,
        tier=_tier(fields),
        group=_optional_int(fields.get("group_idx")),
        is_prefix_group=is_prefix_group,
    )


def _whole_pages(
    handles: tuple[int, ...], packed: bytes, page_tokens: int
) -> tuple[tuple[int, ...], bytes]:
    """Check that tokens and handles agree; a short last page (SGLang) is left out."""
    if not packed or not handles:
        return handles, b""
    page_bytes = page_tokens * TOKEN_BYTES
    missing_bytes = len(handles) * page_bytes - len(packed)
    if not 0 <= missing_bytes < max(page_bytes, 1):
        message = "token count does not match the pages"
        raise MalformedError(message)
    if missing_bytes:
        return handles[:-1], packed[: (len(handles) - 1) * page_bytes]
    return handles, packed


def _extras(
    fields: dict[object, object], adapter: str, *, is_root: bool, pages: int
) -> tuple[str | None, int | None]:
    """Return (scope, first opaque page) from what a page's identity holds besides tokens.

    Page 0 of a prompt lists the adapter and the salt as bare texts; anything else in there, or a
    text elsewhere that is not the adapter, is content that tokens do not show. Where a salt begins
    later, behind a public prefix, the event also says that this text is one (``cache_salt``).
    """
    salt = fields.get("cache_salt")
    scope = salt_scope(salt) if isinstance(salt, str) and salt else None
    if fields.get("lora_id") is not None and not adapter:
        return scope, 0
    extra_keys = fields.get("extra_keys")
    if not isinstance(extra_keys, list):
        return scope, None
    for page, keys in enumerate(extra_keys[:pages]):
        foreign = _foreign(keys, adapter)
        if not foreign:
            continue
        is_salt = page == 0 and len(foreign) == 1 and (is_root or foreign[0] == salt)
        if is_salt and isinstance(foreign[0], str):
            scope = salt_scope(foreign[0])
            continue
        return scope, page
    return scope, None


def _foreign(keys: object, adapter: str) -> Sequence[object]:
    """Return the keys of one page without its adapter, which is listed once."""
    if keys is None:
        return ()
    if not isinstance(keys, list):
        return (keys,)
    rest = list(keys)
    if adapter and adapter in rest:
        rest.remove(adapter)
    return rest


def _tier(fields: dict[object, object]) -> Tier | None:
    if fields.get("locality") == "REMOTE" or fields.get("ownership") == "kvcr":
        return None
    medium = fields.get("medium")
    if medium is None:
        return Tier.GPU
    return _TIERS.get(medium) if isinstance(medium, str) else None


def _handles(raw: object) -> tuple[int, ...]:
    if not isinstance(raw, list):
        message = "block_hashes is not a list"
        raise MalformedError(message)
    return tuple([_handle(item) for item in raw])


def _handle(raw: object) -> int:
    """Return the 64-bit pattern of a hash: an int of either sign, or a digest's last 8 bytes."""
    if isinstance(raw, int):
        return raw & _HANDLE_MASK
    if isinstance(raw, bytes) and len(raw) >= HANDLE_BYTES:
        return int.from_bytes(raw[-HANDLE_BYTES:], "big")
    message = "block hash is neither an int nor a digest"
    raise MalformedError(message)


def _packed(raw: object) -> bytes:
    """Return packed tokens; EAGLE's (token, next token) pairs fold to their first."""
    if raw is None:
        return b""
    if not isinstance(raw, list):
        message = "token_ids is not a list"
        raise MalformedError(message)
    if raw and isinstance(raw[0], list):
        if not all(isinstance(pair, list) and pair for pair in raw):
            message = "token_ids mixes pairs and tokens"
            raise MalformedError(message)
        raw = [pair[0] for pair in raw]
    return pack_tokens(raw)


def _page_tokens(raw: object) -> int:
    if raw is None:
        return 0
    if isinstance(raw, int) and 0 <= raw <= MAX_PAGE_TOKENS:
        return raw
    message = "block_size out of range"
    raise MalformedError(message)


def _kind(raw: object) -> str | None:
    return raw if isinstance(raw, str) else None


def _text(raw: object) -> str:
    if raw is None:
        return ""
    if isinstance(raw, str) and len(raw) <= MAX_ADAPTER_CHARS:
        return raw
    message = "lora_name is not a short text"
    raise MalformedError(message)


def _optional_int(raw: object) -> int | None:
    return raw if isinstance(raw, int) else None
