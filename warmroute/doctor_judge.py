"""What is wrong with one replica, from all that is known of it. Pure.

A cause hides its consequences: an index is empty because events are off, and saying both would send
people to look twice. So rules run in the order of the way from the engine to the prediction, and
the last ones speak only when no other did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from state.model import EngineKind, ReplicaFacts
from warmroute.doctor_case import Code, Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router.diagnosis import Diagnosis
    from warmroute.doctor_case import Case, EngineReport, ReplicaCase, TokenCheck

EVENTS_FLAG: Final = {
    EngineKind.SGLANG: (
        '--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557", '
        '"replay_endpoint": "tcp://*:5558"}\''
    ),
}
VLLM_EVENTS_FLAG: Final = (
    '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
    '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\''
)
RETURNED_SHARE: Final = 0.1
RETURNED_PAGES: Final = 64
FULL_FRACTION: Final = 0.95
UNREPORTED_SHARE: Final = 0.9
LEAST_ANSWERED: Final = 2
_TOLD_KINDS: Final = frozenset({EngineKind.VLLM, EngineKind.SGLANG, EngineKind.WORKER})
_SHARPENED: Final = frozenset({Code.TOKENIZER_MISMATCH, Code.TEMPLATE_MISMATCH})


def judge_replica(case: ReplicaCase, whole: Case) -> list[Finding]:
    """Return what is wrong with one replica."""
    found = [*_of_engine(case), *_of_tokens(case)]
    if not any(one.code is Code.EVENTS_OFF for one in found):
        found += _of_sidecar(case, whole)
    found += _of_salt(case, whole)
    found += _of_size(case)
    found += _of_reports(case, whole)
    codes = {one.code for one in found}
    if not codes - {Code.CACHE_TOO_SMALL, Code.HITS_UNREPORTED, Code.EVENTS_LOST}:
        found += _of_index(case)
    if not codes - {Code.CACHE_TOO_SMALL}:
        found += _of_probe(case)
    if not found:
        found += [
            _of_diagnosis(case, each) for each in whole.diagnoses if each.replica == case.name
        ]
    return found


def _of_engine(case: ReplicaCase) -> Iterator[Finding]:
    engine = case.engine
    if engine is None:
        return
    if engine.is_caching is False:
        seen = "The engine says that it keeps no prefixes"
        if engine.cache_queries:
            seen += f" ({engine.cache_hits or 0:,} of {engine.cache_queries:,} prompt tokens found)"
        yield Finding(
            code=Code.CACHING_OFF,
            replica=case.name,
            seen=f"{seen}.",
            meaning="Every prompt is computed from its first token, wherever it goes.",
            fix=(
                "sglang: leave out --disable-radix-cache"
                if engine.kind is EngineKind.SGLANG
                else "vllm serve ... --enable-prefix-caching"
            ),
        )
    yield from _of_events(case, engine)


def _of_events(case: ReplicaCase, engine: EngineReport) -> Iterator[Finding]:
    facts = case.facts
    is_followed = facts is not None and facts.events is not None and facts.counts.batches > 0
    is_silent_by_choice = engine.sources == () or (
        engine.sources is None and engine.kind in _TOLD_KINDS
    )
    if is_silent_by_choice and not is_followed:
        yield Finding(
            code=Code.EVENTS_OFF,
            replica=case.name,
            seen="The engine names no publisher of KV events (/kv_event_sources).",
            meaning=(
                "What it holds is guessed from what this router sent it: other routers' requests, "
                "evictions and restarts stay unseen."
            ),
            fix=f"start the engine with {EVENTS_FLAG.get(engine.kind, VLLM_EVENTS_FLAG)}",
        )


def _of_tokens(case: ReplicaCase) -> Iterator[Finding]:
    for check in case.tokens:
        if check.other_texts:
            yield _other_tokens(case, check, Code.TOKENIZER_MISMATCH)
        elif check.other_chats:
            yield _other_tokens(case, check, Code.TEMPLATE_MISMATCH)


def _other_tokens(case: ReplicaCase, check: TokenCheck, code: Code) -> Finding:
    is_text = code is Code.TOKENIZER_MISMATCH
    other, of = (check.other_texts, check.texts) if is_text else (check.other_chats, check.chats)
    what, part = ("texts", "tokenizer.json") if is_text else ("chats", "chat template")
    return Finding(
        code=code,
        replica=case.name,
        seen=(
            f"{other} of {of} sample {what} have other tokens in the engine than by "
            f"{check.directory} ({check.first})."
        ),
        meaning=f"The router computes prefixes that {check.model} never has: it predicts no hits.",
        fix=(
            f"give --model {check.model}=DIR the directory whose {part} the engine uses, or leave "
            "it out so that the engine is asked for tokens"
        ),
    )


def _of_sidecar(case: ReplicaCase, whole: Case) -> Iterator[Finding]:
    view, engine = case.view, case.engine
    has_events = engine is not None and bool(engine.sources)
    is_seen = view is not None and view.registered
    if whole.router is not None and not is_seen and case.record is not None:
        yield Finding(
            code=Code.OTHER_STATE,
            replica=case.name,
            seen=(
                "A sidecar registered it in the store that was given, and the router, whose store "
                f"is {whole.router.state or 'one of its own'}, does not know that."
            ),
            meaning="Sidecar and router write and read different stores: nothing is ever predicted.",
            fix="give `warmroute serve --redis` and `warmroute sidecar --redis` the same URL",
        )
    elif not case.is_registered and has_events and (whole.router is not None or whole.has_state):
        url = engine.url if engine is not None else case.url
        yield Finding(
            code=Code.NO_SIDECAR,
            replica=case.name,
            seen="The engine publishes KV events, and no sidecar of it is registered.",
            meaning=(
                "Nobody tells the router what it holds; or its sidecar writes to another store than "
                "the router reads."
            ),
            fix=f"warmroute sidecar --engine {url} --redis URL (the routers' one)",
        )
    if case.facts is not None:
        yield from _of_facts(case, case.facts)
    if view is not None and view.same_keys is False:
        yield Finding(
            code=Code.KEYS_DIFFER,
            replica=case.name,
            seen="Its sidecar derives other block ids than this router.",
            meaning="No id of the one is ever found by the other: nothing is predicted.",
            fix=(
                "give both the same chain seed (state.chain_seed, --chain-seed) and the same "
                "deployment key file, and restart the one that was wrong"
            ),
        )


def _of_facts(case: ReplicaCase, facts: ReplicaFacts) -> Iterator[Finding]:
    wrong = _of_port(case, facts)
    yield from wrong
    yield from _of_pages(case, facts)
    if facts.is_silent and not wrong:
        yield Finding(
            code=Code.EVENTS_SILENT,
            replica=case.name,
            seen=f"The engine computes prompts, and nothing ever came from {facts.events}.",
            meaning="Events are off, blocked on their way, or published on another port.",
            fix=(
                "check that the sidecar's host reaches that port, and the engine's "
                f"{VLLM_EVENTS_FLAG}"
            ),
        )
    counts = facts.counts
    is_lost = counts.gaps > 0 and (not facts.has_replay or facts.reason == "lost")
    if counts.dropped_batches or is_lost:
        yield Finding(
            code=Code.EVENTS_LOST,
            replica=case.name,
            seen=(
                f"{counts.gaps} gaps, {counts.missed_batches} batches missed, "
                f"{counts.dropped_batches} dropped; replay: {'yes' if facts.has_replay else 'no'}."
            ),
            meaning="After a gap that is not replayed all that was known of the cache is void.",
            fix=(
                'name a "replay_endpoint" in the engine\'s --kv-events-config; if there is one, '
                'raise its "buffer_steps"'
            ),
        )


def _of_port(case: ReplicaCase, facts: ReplicaFacts) -> list[Finding]:
    """Return whether the sidecar listens where nobody publishes, as far as the engine tells."""
    engine = case.engine
    if engine is None or not engine.sources or facts.events is None:
        return []
    published = [source.events for source in engine.sources]
    if _port(facts.events) in {_port(each) for each in published}:
        return []
    return [
        Finding(
            code=Code.WRONG_EVENT_PORT,
            replica=case.name,
            seen=(
                f"The sidecar follows {facts.events}; the engine publishes at "
                f"{', '.join(published)}."
            ),
            meaning="The sidecar hears nothing, or another engine.",
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
        yield Finding(
            code=Code.PAGE_MISMATCH,
            replica=case.name,
            seen=(
                f"The engine has {pages} tokens; the sidecar was told pages of "
                f"{facts.page_tokens} and blocks of {facts.block_tokens}."
            ),
            meaning="Pages that do not fit the blocks cannot be indexed: the replica holds nothing.",
            fix=(
                "leave --page-tokens and --block-tokens out of the sidecar's flags, or make blocks "
                "a multiple of the engine's pages"
            ),
        )
    if facts.unknown_media:
        yield Finding(
            code=Code.UNKNOWN_MEDIUM,
            replica=case.name,
            seen=f"The engine keeps pages in {', '.join(facts.unknown_media)}.",
            meaning="A medium that is not known gets no credit: its pages count as not there.",
            fix="keep reused pages in GPU, CPU or disk tiers, or report the medium's name to us",
        )


def _of_salt(case: ReplicaCase, whole: Case) -> Iterator[Finding]:
    facts, router = case.facts, whole.router
    if facts is None or router is None:
        return
    counts, recent = facts.counts, router.recent
    known = recent.requests - sum(recent.unroutable.values())
    is_lost = known and recent.salted == known and counts.plain_pages and not counts.salted_pages
    is_added = known and not recent.salted and counts.salted_pages and not counts.plain_pages
    if is_lost or is_added:
        pages = counts.plain_pages or counts.salted_pages
        yield Finding(
            code=Code.SALT_MISMATCH,
            replica=case.name,
            seen=(
                f"{recent.salted} of the router's last {known} requests had a cache salt; "
                f"{'none' if is_lost else 'all'} of the engine's {pages} known pages have one."
            ),
            meaning=(
                "Something between router and engine changes cache_salt, or the engine does not "
                "publish it: router and engine speak of different prefixes."
            ),
            fix=(
                "let nothing between router and engine touch request bodies; vLLM publishes salts "
                "(extra_keys) since 0.18"
            ),
        )


def _of_size(case: ReplicaCase) -> Iterator[Finding]:
    facts, engine = case.facts, case.engine
    meaning = "Prefixes are evicted before they are asked for again: routing cannot help there."
    fix = (
        "give the engine more KV memory (vLLM: --gpu-memory-utilization, --kv-cache-dtype fp8, "
        "offloading; SGLang: --mem-fraction-static, --enable-hierarchical-cache) or more replicas"
    )
    if facts is not None and facts.counts.stored_pages:
        counts = facts.counts
        share = counts.returned_pages / counts.stored_pages
        if counts.returned_pages >= RETURNED_PAGES and share >= RETURNED_SHARE:
            yield Finding(
                code=Code.CACHE_TOO_SMALL,
                replica=case.name,
                seen=(
                    f"{counts.returned_pages:,} of {counts.stored_pages:,} pages computed "
                    f"({100 * share:.0f} %) had been there before and were evicted; the pool has "
                    f"{_number(facts.capacity_pages)} pages."
                ),
                meaning=meaning,
                fix=fix,
            )
        return
    used = engine.metrics.load.kv_used_fraction if engine is not None else None
    if engine is not None and used is not None and used >= FULL_FRACTION and engine.preemptions:
        yield Finding(
            code=Code.CACHE_TOO_SMALL,
            replica=case.name,
            seen=(
                f"Running requests take {100 * used:.0f} % of the pool, and {engine.preemptions:,} "
                "lost their pages."
            ),
            meaning="There is no room for prefixes beside what runs.",
            fix=fix,
        )


def _of_reports(case: ReplicaCase, whole: Case) -> Iterator[Finding]:
    engine, probe = case.engine, case.probe
    seen = ""
    if engine is not None and engine.does_report_hits is False:
        seen = "The engine says that its answers tell no cached_tokens."
    elif probe is not None and probe.reported_tokens is None:
        seen = "The answer to a probe has no prompt_tokens_details.cached_tokens."
    elif whole.router is not None:
        answered = whole.router.recent.answered.get(case.name, 0)
        silent = whole.router.recent.unreported.get(case.name, 0)
        if answered >= LEAST_ANSWERED and silent >= UNREPORTED_SHARE * answered:
            seen = f"{silent} of its last {answered} answers have no cached_tokens."
    if seen:
        kind = engine.kind if engine is not None else EngineKind.UNKNOWN
        flag = (
            "--enable-cache-report"
            if kind is EngineKind.SGLANG
            else "--enable-prompt-tokens-details"
        )
        yield Finding(
            code=Code.HITS_UNREPORTED,
            replica=case.name,
            seen=seen,
            meaning="Whether predictions come true cannot be seen: wrong ones go unnoticed.",
            fix=f"start the engine with {flag}",
        )


def _of_index(case: ReplicaCase) -> Iterator[Finding]:
    view, engine, facts = case.view, case.engine, case.facts
    if view is None or not view.registered or view.resident_blocks or facts is None:
        return
    computed = engine.metrics.prompt_tokens if engine is not None else None
    has_pages = facts.counts.held_pages * (facts.page_tokens or 0) >= (facts.block_tokens or 1)
    if has_pages or (computed and facts.counts.batches and facts.counts.stored_pages):
        yield Finding(
            code=Code.INDEX_EMPTY,
            replica=case.name,
            seen=(
                f"The router knows of no block; the sidecar knows of {facts.counts.held_pages:,} "
                f"pages, after {facts.counts.batches:,} batches of events."
            ),
            meaning="The cache was emptied, or what the sidecar writes does not arrive.",
            fix=(
                "look for 'state store failed' in the sidecar's log, and check that the store may "
                "keep what is written (maxmemory, maxmemory-policy volatile-lru)"
            ),
        )


def _of_probe(case: ReplicaCase) -> Iterator[Finding]:
    probe = case.probe
    if probe is None or probe.reported_tokens is None:
        return
    block = (case.facts.block_tokens if case.facts is not None else None) or 64
    if not probe.reported_tokens and probe.prompt_tokens > block:
        yield Finding(
            code=Code.CACHING_OFF,
            replica=case.name,
            seen=(
                f"A prompt of {probe.prompt_tokens} tokens was sent twice, and the engine found "
                "none of it the second time."
            ),
            meaning="The engine keeps no prefixes, or evicts them at once.",
            fix="vllm serve ... --enable-prefix-caching; sglang: leave out --disable-radix-cache",
        )
    elif (
        probe.predicted_tokens is not None
        and abs(probe.predicted_tokens - probe.reported_tokens) > block
    ):
        yield Finding(
            code=Code.PREDICTION_WRONG,
            replica=case.name,
            seen=(
                f"Of {probe.prompt_tokens} tokens that were sent twice the engine found "
                f"{probe.reported_tokens}; the router expected {probe.predicted_tokens}."
            ),
            meaning="What the router believes of this replica is not what is there.",
            fix="see the findings above, and `warmroute explain --last 1` for that decision",
        )


def _of_diagnosis(case: ReplicaCase, diagnosis: Diagnosis) -> Finding:
    return Finding(
        code=Code.UNTRUSTED,
        replica=case.name,
        seen=f"{diagnosis.finding} ({diagnosis.kind.value}, model {diagnosis.model})",
        meaning="Its predictions fail, so the router gives them less weight.",
        fix=diagnosis.advice,
    )


def _number(value: int | None) -> str:
    return "an unknown number of" if value is None else f"{value:,}"
