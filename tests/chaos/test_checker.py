"""Each invariant has a defect that breaks it, and nothing else is found in what is sound."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from chaos.checker import INVARIANTS, check
from chaos.evidence import ClientLine, End, Evidence, Outage, Rest, Sample, read_answer, read_stream
from chaos.speech import DONE, chunk, piece, usage, whole

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = b"a key of the run"
NONCE, FOREIGN = "zq00000000000001", "zq00000000000002"
MiB = 2**20


def client(**fields: Any) -> ClientLine:
    told: dict[str, Any] = {
        "request": "r1",
        "tenant": "acme",
        "router": 0,
        "nonce": NONCE,
        "is_stream": True,
        "began_s": 1.0,
        "ended_s": 1.5,
        "wanted_pieces": 3,
        "pieces": 3,
        "says_done": True,
        "status": 200,
        "end": End.COMPLETE,
        "attempts": ("w0-life-1",),
        "own_prefix_tokens": 640,
    }
    return ClientLine(**(told | fields))


def begun(attempt: str = "w0-life-1", request: str = "r1", **fields: Any) -> dict[str, Any]:
    line = {"event": "begin", "attempt": attempt, "request": request, "tenant": "acme"}
    return line | {"foreign": "", "cached_tokens": 64} | fields


def record(**fields: Any) -> dict[str, Any]:
    decision = {"predicted_cached_tokens": 640}
    told = {"client_request_id": "r1", "outcome": "done", "tenant": "acme"}
    return told | {"attempts": [{"decision": decision}]} | fields


def sample(at_s: float = 1.0, requests: int = -1, **series: float) -> Sample:
    named = {
        'warmroute_requests_total{outcome="done",code="200"}': 1.0,
        'warmroute_inflight_requests{replica="w0"}': 0.0,
        'warmroute_replica_state{replica="w0",state="up"}': 1.0,
    }
    return Sample(router=0, life=1, at_s=at_s, series=named | series, requests=requests)


def rest(**fields: Any) -> Rest:
    told: dict[str, Any] = {
        "router": 0,
        "inflight": 0.0,
        "descriptors": 30,
        "descriptors_before": 30,
        "pool": 2,
        "half_closed": 0,
        "rss_bytes": 80 * MiB,
        "rss_before": 75 * MiB,
    }
    return Rest(**(told | fields))


def sound() -> Evidence:
    return Evidence(
        key=KEY,
        clients=[client()],
        replicas=[begun(), {"event": "done", "attempt": "w0-life-1", "request": ""}],
        decisions=[record()],
        samples=[sample(), sample(2.0, 1)],
        rests=[rest()],
        replica_active={"w0": 0},
        artefacts={"router-0.log": "INFO ready"},
        secrets=("sk-secret",),
        redis_clients=(10, 10),
        replica_names=frozenset({"w0", "w1"}),
    )


def with_clients(*lines: ClientLine) -> Callable[[], Evidence]:
    return lambda: replace(sound(), clients=list(lines))


def many_attempts() -> Evidence:
    lines = [client(request=f"r{number}", attempts=()) for number in range(100)]
    begins = [begun(f"w0-life-{number}", f"r{number % 100}") for number in range(124)]
    return replace(sound(), clients=lines, replicas=begins)


def extra(**fields: Any) -> Callable[[], Evidence]:
    return lambda: replace(sound(), **fields)


EJECTED = {f'warmroute_replica_state{{replica="w{n}",state="ejected"}}': 1.0 for n in range(2)}
RETRIES = {'warmroute_retries_total{reason="busy"}': 9.0}
DEFECTS: list[tuple[str, str, Callable[[], Evidence]]] = [
    ("I-1", "never ended", with_clients(client(end=End.HUNG))),
    ("I-1", "cut off", with_clients(client(end=End.CLOSED, says_done=False))),
    ("I-1", "no record", extra(decisions=[])),
    ("I-1", "2 records", extra(decisions=[record(), record()])),
    ("I-1", "the router says", extra(decisions=[record(outcome="failed")])),
    ("I-2", "no replica ended it", extra(replicas=[begun()])),
    ("I-2", "with 2 of 3", with_clients(client(pieces=2))),
    ("I-2", "not piece", with_clients(client(faults=("not piece 1 of this request",)))),
    ("I-3", "canary", with_clients(client(faults=("foreign canary",)))),
    ("I-3", "got the answer to", extra(replicas=[begun(request="r2"), *sound().replicas[1:]])),
    ("I-4", "hit blocks of", extra(replicas=[begun(foreign="globex"), *sound().replicas[1:]])),
    ("I-4", "were ever sent", with_clients(client(own_prefix_tokens=0))),
    ("I-4", "is booked on", extra(decisions=[record(tenant="globex")])),
    ("I-5", "got bytes of", with_clients(client(attempts=("w1-life-1", "w0-life-1")))),
    ("I-5", "reached 3", extra(replicas=[*sound().replicas, begun("a"), begun("b")])),
    (
        "I-5",
        "reached 2",
        lambda: replace(
            sound(),
            clients=[client(is_repeatable=False)],
            replicas=[*sound().replicas, begun("w1-life-1")],
        ),
    ),
    ("I-5", "124 attempts for 100", many_attempts),
    ("I-6", "in flight at rest", extra(rests=[rest(inflight=1.0)])),
    ("I-6", "still computes", extra(replica_active={"w0": 1})),
    (
        "I-6",
        "is -1",
        extra(samples=[sample(2.0, 1, **{'warmroute_inflight_requests{replica="w0"}': -1.0})]),
    ),
    ("I-7", "descriptors", extra(rests=[rest(descriptors=60)])),
    ("I-7", "CLOSE_WAIT", extra(rests=[rest(half_closed=1)])),
    ("I-7", "the store has", extra(redis_clients=(10, 20))),
    ("I-8", "MiB", extra(rests=[rest(rss_bytes=150 * MiB)])),
    ("I-8", "time to live", extra(keys_without_ttl=["wr:x"])),
    ("I-9", "took", with_clients(client(ended_s=60.0))),
    ("I-10", "2 of 2 ejected", extra(samples=[sample(2.0, 1, **EJECTED)])),
    ("I-10", "second tries", extra(samples=[sample(2.0, 1, **RETRIES)])),
    (
        "I-11",
        "fell from",
        extra(samples=[sample(1.0, -1, a_total=2.0), sample(2.0, 1, a_total=1.0)]),
    ),
    ("I-11", "fell from", extra(samples=[sample(1.0, -1, a_total=2.0), sample(2.0, 1)])),
    ("I-11", "nobody", extra(samples=[sample(2.0, 1, **{'a{replica="w9"}': 1.0})])),
    ("I-11", "are on record", extra(samples=[sample(2.0, 2)])),
    ("I-12", "canary", extra(artefacts={"router-0.log": f"hello {NONCE}"})),
    ("I-12", "secret", extra(artefacts={"metrics": "sk-secret"})),
    ("I-12", "Traceback", extra(artefacts={"router-0.log": "Traceback (most recent"})),
]


def test_sound_evidence_breaks_nothing() -> None:
    assert check(sound()) == {name: [] for name in INVARIANTS}


def test_every_invariant_has_a_defect() -> None:
    assert {name for name, _, _ in DEFECTS} == set(INVARIANTS)
    assert list(INVARIANTS) == [f"I-{number}" for number in range(1, 13)]


@pytest.mark.parametrize(
    ("name", "text", "make"), DEFECTS, ids=[f"{name} {text}" for name, text, _ in DEFECTS]
)
def test_a_defect_is_found(name: str, text: str, make: Callable[[], Evidence]) -> None:
    """I-1 to I-12: the checker has teeth."""
    found = check(make())[name]
    assert any(text in one for one in found), found


def test_a_connection_that_broke_while_its_router_was_struck_is_excused() -> None:
    evidence = with_clients(client(end=End.CLOSED, says_done=False))()
    evidence.outages = [Outage(router=0, from_s=1.2, until_s=3.0)]
    assert check(evidence)["I-1"] == []
    evidence.outages = [Outage(router=1, from_s=1.2, until_s=3.0)]
    assert check(evidence)["I-1"]
    evidence.outages = [Outage(router=0, from_s=9.0, until_s=10.0)]
    assert check(evidence)["I-1"]


def test_a_record_that_died_with_its_router_before_anybody_looked_is_not_missed() -> None:
    evidence = extra(decisions=[], outages=[Outage(router=0, from_s=9.0, until_s=10.0)])()
    evidence.samples = [sample(1.0), sample(10.0, 1)]
    assert check(evidence)["I-1"] == []
    evidence.samples = [sample(1.0), sample(8.0), sample(10.0, 1)]
    assert check(evidence)["I-1"]


def test_a_series_that_left_with_its_replica_did_not_fall() -> None:
    evidence = sound()
    evidence.samples = [sample(1.0, -1, **{'a_total{replica="w0"}': 2.0}), sample(2.0, 1)]
    assert check(evidence)["I-11"] == []


def test_what_is_counted_of_a_replica_begins_anew_with_its_next_life_only() -> None:
    evidence = sound()
    counted = {
        at_s: sample(at_s, 1, **{'a_total{replica="w0"}': 3.0 - at_s}) for at_s in (1.0, 2.0)
    }
    evidence.samples = list(counted.values())
    assert check(evidence)["I-11"]
    evidence.reborn = frozenset({"w0"})
    assert check(evidence)["I-11"] == []


def stream(*sequences: int, attempt: str = "w0-life-1", nonce: str = NONCE) -> bytes:
    return b"".join(chunk(attempt, piece(KEY, nonce, sequence)) for sequence in sequences)


def test_a_stream_is_read_as_it_was_signed() -> None:
    reading = read_stream(stream(0, 1, 2) + DONE, KEY, NONCE)
    assert (reading.pieces, reading.says_done, reading.faults) == (3, True, [])
    assert reading.attempts == ["w0-life-1"]


@pytest.mark.parametrize(
    "body",
    [
        stream(0, 2),
        stream(0, 0),
        stream(1),
        stream(0).replace(b"zq00000000000001.0.", b"zq00000000000001.0.f"),
        stream(0) + DONE + stream(1),
        stream(0, nonce=FOREIGN),
        b"data: {broken\n\n" + stream(0),
        stream(0) + b"data: {broken\n\n" + b'data: {"error":{"code":"truncated"}}\n\n',
        stream(0) + stream(1)[:-9] + b"\n\n" + stream(1),
    ],
)
def test_what_is_not_as_signed_is_a_fault(body: bytes) -> None:
    """I-2, I-3."""
    assert read_stream(body, KEY, NONCE).faults


def test_an_event_that_an_error_cuts_off_is_a_beginning_of_the_right_one() -> None:
    error = b'data: {"error":{"code":"truncated"}}\n\n'
    reading = read_stream(stream(0) + stream(1)[:-9] + b"\n\n" + error, KEY, NONCE)
    assert (reading.pieces, reading.error_code, reading.faults) == (1, "truncated", [])
    for cut in range(1, len(stream(1))):
        reading = read_stream(stream(0) + stream(1)[:cut] + b"\n\n" + error, KEY, NONCE)
        assert (reading.error_code, reading.faults) == ("truncated", []), cut


def test_a_whole_answer_is_read_and_a_foreign_one_is_a_fault() -> None:
    text = "".join(piece(KEY, NONCE, sequence) for sequence in range(4))
    reading = read_answer(whole("w1-life-9", text, usage(10, 0, 4)), KEY, NONCE)
    assert (reading.pieces, reading.says_done, reading.faults) == (4, True, [])
    assert read_answer(whole("w1-life-9", text, usage(10, 0, 4)), KEY, FOREIGN).faults
    assert read_answer(b"{", KEY, NONCE).faults
