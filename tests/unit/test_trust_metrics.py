"""What of trust is shown: in metrics, and to whoever asks why a replica was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from router.diagnosis import Kind
from router.forecast import credits_of, promised_tokens
from router.trace import Attempt, DecisionRecord
from router.trust import BookKey, Ground, Observation
from router.trust_metrics import MAX_SERIES, TrustMetrics
from state.model import Rung
from support.closed_loop import A, B, ClosedLoop
from warmroute.explain import candidates_table, headline

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

    from router.account import Call

PROMPT = range(1_280)


def samples(loop: ClosedLoop) -> dict[str, list[Sample]]:
    """Return what a scrape shows, by name."""
    registry = CollectorRegistry()
    registry.register(TrustMetrics(loop.feedback, lambda: (A, B)))
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


async def half_right() -> ClosedLoop:
    """Return a fleet on which ``a`` has half of what it is known for, asked 60 times."""
    loop = ClosedLoop()
    await loop.begin(A, B)
    await loop.hold(A, PROMPT)
    loop.choosing.members = loop.choosing.members[:1]
    loop.engines = {A: lambda _, __: 640}
    for _ in range(60):
        loop.ask(range(1_300))
        loop.rest(3.0)
    return loop


async def test_shares_credits_totals_and_diagnoses_are_series_of_their_own() -> None:
    """By replica, model and ground; every kind of diagnosis has its 0 or 1."""
    loop = await half_right()
    shown = samples(loop)
    labels = {"replica": "a", "model": "m", "ground": "events"}
    for name, value in (("precision", 0.5), ("recall", 1.0), ("credit", 0.5)):
        [sample] = shown[f"warmroute_prediction_{name}_ratio"]
        assert (sample.labels, round(sample.value, 6)) == (labels, value)
    totals = {s.labels["side"]: s.value for s in shown["warmroute_compared_tokens_total"]}
    assert totals == {"predicted": 60 * 1_280, "reported": 60 * 640, "matched": 60 * 640}
    diagnoses = {
        (s.labels["replica"], s.labels["kind"]): s.value for s in shown["warmroute_diagnosis"]
    }
    assert len(diagnoses) == 2 * len(Kind)
    assert {key for key, value in diagnoses.items() if value} == {("a", "low_precision")}


async def test_thousands_of_adapters_make_a_bounded_number_of_series() -> None:
    """B51: those that were asked for last are shown."""
    loop = ClosedLoop()
    for number in range(3 * MAX_SERIES):
        key = BookKey(A, f"adapter-{number}", Ground.EVENTS)
        loop.choosing.know.trust.observe(key, Observation(64, 64, 64), 0.0)
    shown = samples(loop)["warmroute_prediction_precision_ratio"]
    assert len(shown) == MAX_SERIES
    assert f"adapter-{3 * MAX_SERIES - 1}" in {sample.labels["model"] for sample in shown}


def record_of(call: Call) -> DecisionRecord:
    [choice] = call.choices
    attempt = Attempt(
        decision=choice.decision,
        outcome="done",
        credits=credits_of(call.routed),
        promised_tokens=promised_tokens(call.routed, choice.member.replica),
    )
    fields: dict[str, Any] = dict.fromkeys(
        ("client_request_id", "unroutable", "hot_prefix_tokens", "ttft_s")
    )
    return DecisionRecord(
        **fields,
        request_id="r", ordinal=1, seed=1, started_unix_s=0.0, path="/v1/completions",
        model="m", policy="Weighted", prompt_tokens=1_300, is_exact=True, rung=Rung.LIVE,
        state_age_s=0.0, hot_holders=(), attempts=(attempt,), status=200, outcome="done",
        duration_s=0.1, reported_prompt_tokens=1_300, reported_cached_tokens=640,
    )  # fmt: skip


async def test_explain_says_what_a_prediction_was_multiplied_by() -> None:
    """Of the chosen replica in words, of every candidate in the table; also after JSON."""
    loop = await half_right()
    loop.choosing.members = [*loop.choosing.members]
    loop.ask(range(1_300))
    kept = msgspec.json.encode(record_of(loop.calls[-1]))
    record = msgspec.json.decode(kept, type=DecisionRecord)
    text = "\n".join(headline(record))
    assert "predicted 640 cached tokens; the engine reported 640" in text
    assert "1280 are on record there, but such predictions came true for 50 % lately" in text
    console = Console(width=120)
    with console.capture() as captured:
        console.print(candidates_table(record.attempts[-1]))
    assert "credit" in captured.get()
    assert "0.50" in captured.get()


async def test_explain_does_not_speak_of_trust_where_nothing_is_wrong() -> None:
    """A healthy fleet's explanation is what it was."""
    loop = ClosedLoop()
    await loop.begin(A)
    await loop.hold(A, PROMPT)
    loop.ask(range(1_300))
    record = record_of(loop.calls[-1])
    assert "on record" not in "\n".join(headline(record))
    titles = [column.header for column in candidates_table(record.attempts[-1]).columns]
    assert "credit" not in titles
