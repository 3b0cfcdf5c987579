"""What is wrong with one replica, from all that is known of it. Pure.

A cause hides its consequences: an index is empty because events are off, and saying both would send
people to look twice. So rules run in the order of the way from the engine to the prediction, and
the last ones speak only when no other did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from router.availability import Standing
from state.model import EngineKind
from warmroute.doctor_case import Code
from warmroute.doctor_sidecar import LEAST_ANSWERED, events_flag, of_salt, of_sidecar, of_size
from warmroute.doctor_text import found

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router.diagnosis import Diagnosis
    from warmroute.doctor_case import Case, EngineReport, Finding, ReplicaCase, TokenCheck

UNREPORTED_SHARE: Final = 0.9
_TOLD_KINDS: Final = frozenset({EngineKind.VLLM, EngineKind.SGLANG, EngineKind.WORKER})


def judge_replica(case: ReplicaCase, whole: Case) -> list[Finding]:
    """Return what is wrong with one replica."""
    findings = [*_of_engine(case), *_of_tokens(case)]
    if not any(one.code is Code.EVENTS_OFF for one in findings):
        findings += of_sidecar(case, whole)
    findings += of_salt(case, whole)
    findings += of_size(case)
    findings += _of_reports(case, whole)
    codes = {one.code for one in findings}
    if not codes - {Code.CACHE_TOO_SMALL, Code.HITS_UNREPORTED, Code.EVENTS_LOST}:
        findings += _of_index(case)
    if not codes - {Code.CACHE_TOO_SMALL}:
        findings += _of_probe(case)
    if not findings:
        findings += [
            _of_diagnosis(case, each) for each in whole.diagnoses if each.replica == case.name
        ]
    return [*findings, *_of_standing(case)]


def _of_standing(case: ReplicaCase) -> Iterator[Finding]:
    now = case.view.standing if case.view is not None else None
    if now is None or now.standing not in {Standing.EJECTED, Standing.PROBATION}:
        return
    is_ejected = now.left_s is not None
    yield found(
        Code.REPLICA_EJECTED,
        case.name,
        seen=f"It is ejected for {now.left_s:.0f} s more." if is_ejected else "It is in probation.",
        fix=f"see the engine's log for what failed ({now.reason or 'requests'})",
    )


def _of_engine(case: ReplicaCase) -> Iterator[Finding]:
    engine = case.engine
    if engine is None:
        return
    if engine.is_caching is False:
        seen = "The engine says that it keeps no prefixes"
        if engine.cache_queries:
            seen += f" ({engine.cache_hits or 0:,} of {engine.cache_queries:,} prompt tokens found)"
        yield found(
            Code.CACHING_OFF,
            case.name,
            seen=f"{seen}.",
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
        yield found(
            Code.EVENTS_OFF,
            case.name,
            seen="The engine names no publisher of KV events (/kv_event_sources).",
            fix=f"start the engine with {events_flag(engine.kind)}",
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
    return found(
        code,
        case.name,
        seen=(
            f"{other} of {of} sample {what} have other tokens in the engine than by "
            f"{check.directory} ({check.first})."
        ),
        fix=(
            f"give --model {check.model}=DIR the directory whose {part} the engine uses, or leave "
            "it out so that the engine is asked for tokens"
        ),
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
        yield found(
            Code.HITS_UNREPORTED,
            case.name,
            seen=seen,
            fix=f"start the engine with {flag}",
        )


def _of_index(case: ReplicaCase) -> Iterator[Finding]:
    view, engine, facts = case.view, case.engine, case.facts
    if view is None or not view.registered or view.resident_blocks or facts is None:
        return
    computed = engine.metrics.prompt_tokens if engine is not None else None
    has_pages = facts.counts.held_pages * (facts.page_tokens or 0) >= (facts.block_tokens or 1)
    if has_pages or (computed and facts.counts.batches and facts.counts.stored_pages):
        yield found(
            Code.INDEX_EMPTY,
            case.name,
            seen=(
                f"The router knows of no block; the sidecar knows of {facts.counts.held_pages:,} "
                f"pages, after {facts.counts.batches:,} batches of events."
            ),
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
        yield found(
            Code.CACHING_OFF,
            case.name,
            seen=(
                f"A prompt of {probe.prompt_tokens} tokens was sent twice, and the engine found "
                "none of it the second time."
            ),
            fix="vllm serve ... --enable-prefix-caching; sglang: leave out --disable-radix-cache",
        )
    elif (
        probe.predicted_tokens is not None
        and abs(probe.predicted_tokens - probe.reported_tokens) > block
    ):
        yield found(
            Code.PREDICTION_WRONG,
            case.name,
            seen=(
                f"Of {probe.prompt_tokens} tokens that were sent twice the engine found "
                f"{probe.reported_tokens}; the router expected {probe.predicted_tokens}."
            ),
            fix="see the findings above, and `warmroute explain --last 1` for that decision",
        )


def _of_diagnosis(case: ReplicaCase, diagnosis: Diagnosis) -> Finding:
    return found(
        Code.UNTRUSTED,
        case.name,
        seen=f"{diagnosis.finding} ({diagnosis.kind.value}, model {diagnosis.model})",
        fix=diagnosis.advice,
    )
