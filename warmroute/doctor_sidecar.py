"""What is wrong between engine and router: the sidecar, its events, pages and keys. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from state.model import EngineKind, ReplicaFacts
from warmroute.doctor_case import Code
from warmroute.doctor_text import found
from warmroute.engine_facts import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warmroute.doctor_case import Case, Finding, ReplicaCase

SGLANG_EVENTS_FLAG: Final = (
    '--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5558"}\''
)
VLLM_EVENTS_FLAG: Final = (
    '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
    '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\''
)
_WILDCARD: Final = (
    'let the endpoint of --kv-events-config have a wildcard ("tcp://*:5557"): vLLM connects to any '
    "other instead of listening there"
)
RETURNED_SHARE: Final = 0.1
RETURNED_PAGES: Final = 64
FULL_FRACTION: Final = 0.95
LEAST_ANSWERED: Final = 3


_LOST: Final = "lost"
"""Why a generation began (``sidecar.metrics.RenewalReason``): batches that nobody replayed."""


def events_flag(kind: EngineKind) -> str:
    """Return the flag that lets an engine publish events."""
    return SGLANG_EVENTS_FLAG if kind is EngineKind.SGLANG else VLLM_EVENTS_FLAG


def of_sidecar(case: ReplicaCase, whole: Case) -> Iterator[Finding]:
    """Yield what is wrong with a replica's sidecar, or that there is none."""
    view, engine = case.view, case.engine
    has_events = engine is not None and bool(engine.sources)
    is_seen = view is not None and view.registered
    if whole.router is not None and not is_seen and case.record is not None:
        yield found(
            Code.OTHER_STATE,
            case.name,
            seen=(
                "A sidecar registered it in the store that was given, and the router, whose store "
                f"is {whole.router.state or 'one of its own'}, does not know that."
            ),
            fix="give `warmroute serve --redis` and `warmroute sidecar --redis` the same URL",
        )
    elif not case.is_registered and has_events and (whole.router is not None or whole.has_state):
        url = engine.url if engine is not None else case.url
        yield found(
            Code.NO_SIDECAR,
            case.name,
            seen="The engine publishes KV events, and no sidecar of it is registered.",
            fix=f"warmroute sidecar --engine {url} --redis URL (the routers' one)",
        )
    if case.facts is not None:
        yield from _of_facts(case, case.facts)
    deaf = _deaf(case)
    if deaf:
        yield found(
            Code.EVENTS_SILENT,
            case.name,
            seen=f"The engine names {', '.join(deaf)}, where nothing listens on this host.",
            fix=_WILDCARD,
        )
    if view is not None and view.same_keys is False:
        yield found(
            Code.KEYS_DIFFER,
            case.name,
            seen="Its sidecar derives other block ids than this router.",
            fix=(
                "give both the same chain seed (state.chain_seed, --chain-seed) and the same "
                "deployment key file, and restart the one that was wrong"
            ),
        )


def _of_facts(case: ReplicaCase, facts: ReplicaFacts) -> Iterator[Finding]:
    wrong = _of_port(case, facts)
    yield from wrong
    yield from _of_pages(case, facts)
    if facts.is_silent and not (wrong or _deaf(case)):
        yield found(
            Code.EVENTS_SILENT,
            case.name,
            seen=f"The engine computes prompts, and nothing ever came from {facts.events}.",
            fix=f"check that the sidecar's host reaches that port; {_WILDCARD}",
        )
    counts = facts.counts
    if counts.dropped_batches or facts.reason == _LOST:
        yield found(
            Code.EVENTS_LOST,
            case.name,
            seen=(
                f"{counts.gaps} gaps, {counts.missed_batches} batches missed, "
                f"{counts.dropped_batches} dropped; replay: {'yes' if facts.has_replay else 'no'}."
            ),
            fix=(
                'name a "replay_endpoint" in the engine\'s --kv-events-config; if there is one, '
                'raise its "buffer_steps"'
            ),
        )


def _deaf(case: ReplicaCase) -> tuple[str, ...]:
    """Return the endpoints that the engine names and nobody publishes at, seen from its own host.

    From another one they may be out of reach, and the sidecar's host not.
    """
    engine, facts = case.engine, case.facts
    if (
        engine is None
        or not is_loopback(engine.url)
        or len(engine.deaf) < len(engine.sources or ())
    ):
        return ()
    return () if facts is not None and facts.counts.batches else engine.deaf


def _of_port(case: ReplicaCase, facts: ReplicaFacts) -> list[Finding]:
    """Return whether the sidecar listens where nobody publishes, as far as the engine tells."""
    engine = case.engine
    if engine is None or not engine.sources or facts.events is None:
        return []
    published = [source.events for source in engine.sources]
    if _port(facts.events) in {_port(each) for each in published}:
        return []
    return [
        found(
            Code.WRONG_EVENT_PORT,
            case.name,
            seen=(
                f"The sidecar follows {facts.events}; the engine publishes at "
                f"{', '.join(published)}."
            ),
            fix=f"leave --events out, or: warmroute sidecar --engine {engine.url} --events "
            f"{published[0]}",
        )
    ]


def _port(endpoint: str) -> str:
    """Return what of an endpoint is the same for all who dial it."""
    return endpoint.rpartition(":")[2] if endpoint.startswith("tcp://") else endpoint


def _of_pages(case: ReplicaCase, facts: ReplicaFacts) -> Iterator[Finding]:
    engine = case.engine
    told = engine.metrics.page_tokens if engine is not None else None
    has_other_page = (
        told is not None
        and facts.page_tokens is not None
        and facts.page_tokens != told
        and not facts.counts.batches
    )
    if facts.has_unfit_pages or has_other_page:
        pages = f"pages of {told}" if told is not None else "pages of another size"
        yield found(
            Code.PAGE_MISMATCH,
            case.name,
            seen=(
                f"The engine has {pages} tokens; the sidecar was told pages of "
                f"{facts.page_tokens} and blocks of {facts.block_tokens}."
            ),
            fix=(
                "leave --page-tokens and --block-tokens out of the sidecar's flags, or make blocks "
                "a multiple of the engine's pages"
            ),
        )
    if facts.unknown_media:
        yield found(
            Code.UNKNOWN_MEDIUM,
            case.name,
            seen=f"The engine keeps pages in {', '.join(facts.unknown_media)}.",
            fix="keep reused pages in GPU, CPU or disk tiers, or report the medium's name to us",
        )


def of_salt(case: ReplicaCase, whole: Case) -> Iterator[Finding]:
    """Yield whether requests and pages disagree about cache salts."""
    facts, router = case.facts, whole.router
    if facts is None or router is None:
        return
    counts = facts.counts
    answered = router.recent.answered.get(case.name, 0)
    salted = router.recent.salted.get(case.name, 0)
    is_known = answered >= LEAST_ANSWERED
    is_lost = is_known and salted == answered and counts.plain_pages and not counts.salted_pages
    is_added = is_known and not salted and counts.salted_pages and not counts.plain_pages
    if is_lost or is_added:
        pages = counts.plain_pages or counts.salted_pages
        yield found(
            Code.SALT_MISMATCH,
            case.name,
            seen=(
                f"{salted} of its last {answered} requests had a cache salt; "
                f"{'none' if is_lost else 'all'} of the engine's {pages} known pages have one."
            ),
            fix=(
                "let nothing between router and engine touch request bodies; vLLM publishes salts "
                "(extra_keys) since 0.18"
            ),
        )


def of_size(case: ReplicaCase) -> Iterator[Finding]:
    """Yield whether the cache is too small for what is asked of it."""
    facts, engine = case.facts, case.engine
    fix = (
        "give the engine more KV memory (vLLM: --gpu-memory-utilization, --kv-cache-dtype fp8, "
        "offloading; SGLang: --mem-fraction-static, --enable-hierarchical-cache) or more replicas"
    )
    if facts is not None and facts.counts.stored_pages:
        counts = facts.counts
        share = counts.returned_pages / counts.stored_pages
        if counts.returned_pages >= RETURNED_PAGES and share >= RETURNED_SHARE:
            yield found(
                Code.CACHE_TOO_SMALL,
                case.name,
                seen=(
                    f"{counts.returned_pages:,} of {counts.stored_pages:,} pages computed "
                    f"({100 * share:.0f} %) had been there before and were evicted; the pool has "
                    f"{_number(facts.capacity_pages)} pages."
                ),
                fix=fix,
            )
        return
    used = engine.metrics.load.kv_used_fraction if engine is not None else None
    if engine is not None and used is not None and used >= FULL_FRACTION and engine.preemptions:
        yield found(
            Code.CACHE_TOO_SMALL,
            case.name,
            seen=(
                f"Running requests take {100 * used:.0f} % of the pool, and {engine.preemptions:,} "
                "lost their pages."
            ),
            fix=fix,
        )


def _number(value: int | None) -> str:
    return "an unknown number of" if value is None else f"{value:,}"
