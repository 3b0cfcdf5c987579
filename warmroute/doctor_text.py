"""What each finding means, in the words of docs/doctor.md; made into findings here."""

from __future__ import annotations

from typing import Final

from warmroute.doctor_case import Code, Finding

MEANING: Final = {
    Code.CACHE_TOO_SMALL: (
        "Prefixes are evicted before they are asked for again: no router can find them there."
    ),
    Code.CACHING_OFF: (
        "The engine keeps no prefixes: it computes every prompt from its first token, wherever "
        "that goes."
    ),
    Code.ENGINE_UNREACHABLE: "Nothing can be asked of the engine, or it serves no model yet.",
    Code.EVENTS_LOST: "After a gap that is not replayed all that was known of the cache is void.",
    Code.EVENTS_OFF: (
        "What the engine holds is guessed from what this router sent it: what other routers sent, "
        "evictions and restarts stay unseen."
    ),
    Code.EVENTS_SILENT: (
        "Events are off, are held up on their way, or are published on another port."
    ),
    Code.FLEET_DRAINED: "Requests are answered 503: whoever is drained gets nothing new.",
    Code.HITS_UNREPORTED: (
        "Whether predictions come true cannot be seen, so wrong ones go unnoticed."
    ),
    Code.INDEX_EMPTY: (
        "The cache was emptied a moment ago, or what the sidecar writes does not arrive."
    ),
    Code.KEYS_DIFFER: "No block id of the one is ever found by the other: nothing is predicted.",
    Code.NO_SIDECAR: (
        "Nobody tells the router what the engine holds, or its sidecar writes to another store "
        "than the router reads."
    ),
    Code.OTHER_STATE: (
        "The sidecar writes to one store and the router reads another: nothing is predicted."
    ),
    Code.PAGE_MISMATCH: (
        "Pages that do not fit the blocks cannot be indexed: the replica seems to hold nothing."
    ),
    Code.PREDICTION_WRONG: "What the router believes of this replica is not what is there.",
    Code.PROMPTS_SHORT: (
        "Only whole blocks are indexed: a prompt that fills none is never found again."
    ),
    Code.PROMPTS_UNREAD: "Without tokens there is no prefix: such requests go by load.",
    Code.REPLICA_EJECTED: "Requests failed there, so it gets none for a while, or one at a time.",
    Code.REPLICA_LEFT: (
        "The fleet is smaller than it was. One that was taken away on purpose is forgotten with "
        "the requests that it answered."
    ),
    Code.ROUTER_UNREACHABLE: "Nothing can be asked of the router.",
    Code.SALT_MISMATCH: (
        "Something between router and engine changes cache_salt, or the engine does not publish "
        "it: the two speak of different prefixes."
    ),
    Code.STATE_NOT_LIVE: (
        "The router decides on what it knew before, or on load, until it reads the store again."
    ),
    Code.STATE_UNREACHABLE: "Nothing can be read of what sidecars wrote.",
    Code.TEMPLATE_MISMATCH: (
        "The router renders other chats than the engine: it looks for prefixes that are never "
        "there."
    ),
    Code.TOKENIZER_MISMATCH: (
        "The router computes other tokens than the engine: it looks for prefixes that are never "
        "there."
    ),
    Code.UNKNOWN_MEDIUM: "A medium that is not known gets no credit: its pages count as missing.",
    Code.UNTRUSTED: "Its predictions fail, so the router gives them less weight.",
    Code.WRONG_EVENT_PORT: "The sidecar hears nothing, or another engine.",
}


def found(code: Code, replica: str | None, *, seen: str, fix: str) -> Finding:
    """Return a finding with its meaning; ``seen`` gets one full stop, whoever's words it has."""
    seen = seen.rstrip(".") + "."
    return Finding(code=code, replica=replica, seen=seen, meaning=MEANING[code], fix=fix)
