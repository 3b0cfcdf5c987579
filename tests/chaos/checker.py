"""The invariants I-1 to I-12, judged on evidence alone. Imports nothing of the router's.

Each function returns what breaks its invariant, one sentence each; nothing is good.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

from chaos.evidence import End
from chaos.speech import NONCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from chaos.evidence import ClientLine, Evidence, Outage, Sample

MARGIN_S: Final = 1.5
RECORD_S: Final = 0.5
"""So much later than its client may a router write down how a request ended."""
LIMIT_S: Final = 30.0
"""Longer than every deadline of the rig's routers together."""
ATTEMPT_SHARE: Final = 1.2
ATTEMPT_RESERVE: Final = 3
SLACK_TOKENS: Final = 64
SPARE_DESCRIPTORS: Final = 12
SPARE_CLIENTS: Final = 6
RSS_FACTOR: Final = 1.3
RSS_SPARE_BYTES: Final = 24 * 2**20
MiB: Final = 2**20
OUTCOMES: Final = {
    End.COMPLETE: {"done"},
    End.ERROR_EVENT: {"failed"},
    End.HTTP_ERROR: {"failed", "done", "cancelled", "refused"},
    End.CLOSED: {"failed", "cancelled"},
    End.LEFT: {"cancelled", "done", "failed"},
    End.HUNG: set[str](),
}


def is_excused(line: ClientLine, outages: list[Outage]) -> bool:
    """Return whether the client's router was struck while this request was open."""
    return any(
        outage.router == line.router
        and outage.from_s - MARGIN_S <= line.ended_s
        and line.began_s <= outage.until_s + MARGIN_S
        for outage in outages
    )


def is_seen(line: ClientLine, evidence: Evidence) -> bool:
    """Return whether somebody looked at the router between this request's end and its own."""
    ends = [one.from_s for one in evidence.outages if one.router == line.router]
    end_s = min((from_s for from_s in ends if from_s >= line.ended_s), default=float("inf"))
    if end_s == float("inf"):
        return True
    return any(
        one.router == line.router and line.ended_s + RECORD_S <= one.at_s <= end_s
        for one in evidence.samples
    )


def no_silent_loss(evidence: Evidence) -> list[str]:
    """I-1: one end for each request, and the same one in the router's record."""
    found = []
    records: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in evidence.decisions:
        records[str(record["client_request_id"])].append(record)
    for line in evidence.clients:
        excused = is_excused(line, evidence.outages)
        if line.end is End.HUNG:
            found.append(f"{line.request} never ended")
        is_torn = line.end is End.CLOSED and (line.is_stream or line.status != 200)
        if is_torn and not excused:
            why = f"status {line.status}, {line.error_code!r}, {line.took_s:.1f} s, in {line.phase}"
            found.append(f"{line.request} was cut off without a word ({why})")
        told = records[line.request]
        if len(told) > 1:
            found.append(f"{line.request} has {len(told)} records")
        if not told and not excused and line.end is not End.LEFT and is_seen(line, evidence):
            found.append(f"{line.request} ({line.end}) has no record")
        if told and not excused and told[0]["outcome"] not in OUTCOMES[line.end]:
            found.append(f"{line.request} {line.end}, the router says {told[0]['outcome']}")
    return found


def no_false_completion(evidence: Evidence) -> list[str]:
    """I-2: an end that the replica said, and pieces that it sent, in order, without a hole."""
    done = {line["attempt"] for line in evidence.replicas if line["event"] == "done"}
    found = []
    for line in evidence.clients:
        found += [f"{line.request}: {fault}" for fault in line.faults if "canary" not in fault]
        says = line.end is End.COMPLETE or line.says_done
        if not says:
            continue
        if not line.attempts or line.attempts[-1] not in done:
            found.append(f"{line.request} is whole, and no replica ended it")
        if line.pieces != line.wanted_pieces:
            found.append(f"{line.request} is whole with {line.pieces} of {line.wanted_pieces}")
    return found


def no_cross_talk(evidence: Evidence) -> list[str]:
    """I-3: no answer has what belongs to another request."""
    begun = {one["attempt"]: one["request"] for one in evidence.replicas if one["event"] == "begin"}
    found = []
    for line in evidence.clients:
        found += [f"{line.request}: {fault}" for fault in line.faults if "canary" in fault]
        found += [
            f"{line.request} got the answer to {begun[attempt]}"
            for attempt in line.attempts
            if attempt in begun and begun[attempt] != line.request
        ]
    return found


def no_cross_tenant_hit(evidence: Evidence) -> list[str]:
    """I-4: no block of another tenant counts, in a replica or in a prediction."""
    found = [
        f"{line['request']} of {line['tenant']} hit blocks of {line['foreign']}"
        for line in evidence.replicas
        if line["event"] == "begin" and line["foreign"]
    ]
    known = {line.request: line for line in evidence.clients}
    for record in evidence.decisions:
        client = known.get(str(record["client_request_id"]))
        if client is None:
            continue
        if record["tenant"] not in (None, client.tenant):
            found.append(f"{client.request} of {client.tenant} is booked on {record['tenant']}")
        for attempt in record["attempts"][:1]:  # the first may have filled a cache for the next
            predicted = attempt["decision"]["predicted_cached_tokens"]
            if predicted > client.own_prefix_tokens + SLACK_TOKENS:
                found.append(
                    f"{client.request}: {predicted} tokens predicted,"
                    f" {client.own_prefix_tokens} were ever sent by its tenant"
                )
    return found


def one_commit(evidence: Evidence) -> list[str]:
    """I-5: bytes of one replica for each request, and few attempts."""
    begun = Counter(line["request"] for line in evidence.replicas if line["event"] == "begin")
    found = []
    for line in evidence.clients:
        if len(line.attempts) > 1:
            found.append(f"{line.request} got bytes of {', '.join(line.attempts)}")
        most = 2 if line.is_repeatable else 1
        if begun[line.request] > most:
            found.append(f"{line.request} reached {begun[line.request]} replicas, at most {most}")
    total, requests = begun.total(), len(evidence.clients)
    if total > ATTEMPT_SHARE * requests + ATTEMPT_RESERVE:
        found.append(f"{total} attempts for {requests} requests")
    return found


def conserved(evidence: Evidence) -> list[str]:
    """I-6: nothing is in flight at rest, and never less than nothing."""
    found = [
        f"router {rest.router} has {rest.inflight:.0f} in flight at rest"
        for rest in evidence.rests
        if rest.inflight
    ]
    found += [
        f"replica {name} still computes {count}"
        for name, count in evidence.replica_active.items()
        if count
    ]
    for sample in evidence.samples:
        found += [
            f"router {sample.router}: {name} is {value}"
            for name, value in sample.series.items()
            if "inflight" in name and value < 0
        ]
    return found


def no_leaks(evidence: Evidence) -> list[str]:
    """I-7: descriptors, sockets and clients of the store are as before."""
    found = []
    for rest in evidence.rests:
        most = rest.descriptors_before + rest.pool + SPARE_DESCRIPTORS
        if rest.descriptors > most:
            found.append(f"router {rest.router} has {rest.descriptors} descriptors, {most} allowed")
        if rest.half_closed:
            found.append(f"router {rest.router} has {rest.half_closed} sockets in CLOSE_WAIT")
    before, after = evidence.redis_clients
    if after > before + SPARE_CLIENTS:
        found.append(f"the store has {after} clients, {before} before")
    return found


def bounded_memory(evidence: Evidence) -> list[str]:
    """I-8: memory stays, and every key of the store dies some day."""
    found = []
    for rest in evidence.rests:
        most = RSS_FACTOR * rest.rss_before + RSS_SPARE_BYTES
        if rest.rss_bytes > most:
            found.append(
                f"router {rest.router} takes {rest.rss_bytes // MiB} MiB,"
                f" {rest.rss_before // MiB} when warm"
            )
    found += [f"key {key} has no time to live" for key in evidence.keys_without_ttl]
    return found


def alive(evidence: Evidence) -> list[str]:
    """I-9: nobody waits beyond every deadline."""
    return [
        f"{line.request} took {line.took_s:.1f} s"
        for line in evidence.clients
        if line.end is not End.LEFT and line.took_s > LIMIT_S + MARGIN_S
    ]


def bounded_reaction(evidence: Evidence) -> list[str]:
    """I-10: most of the fleet stays in, or there is panic; second tries have a budget."""
    found = []
    size = len(evidence.replica_names)
    for sample in evidence.samples:
        out = sum(
            value
            for name, value in sample.series.items()
            if name.startswith("warmroute_replica_state{")
            and ('state="ejected"' in name or 'state="probation"' in name)
        )
        if out > size / 2 and not sample.series.get("warmroute_panic_models", 0.0):
            found.append(f"router {sample.router} has {out:.0f} of {size} ejected")
    last = {(sample.router, sample.life): sample for sample in evidence.samples}
    shared = 0.0
    for sample in last.values():
        for reason in ("closed", "busy", "first_byte_timeout"):
            name = f'warmroute_retries_total{{reason="{reason}"}}'
            shared += sample.series.get(name, 0.0)
    most = 0.2 * len(evidence.clients) + 3 * max(1, len(last))
    if shared > most:
        found.append(f"{shared:.0f} second tries that add load, at most {most:.0f}")
    return found


def true_metrics(evidence: Evidence) -> list[str]:
    """I-11: counters only grow within a life, count every request, and have closed labels."""
    found = []
    before: dict[tuple[int, int], Sample] = {}
    for sample in evidence.samples:
        life = (sample.router, sample.life)
        if life in before:
            found += [
                f"router {sample.router}: {name} fell from {value} to {sample.series.get(name, 0)}"
                for name, value in before[life].series.items()
                if is_counter(name)
                and sample.series.get(name, 0.0) < value
                and not _may_begin_anew(name, sample, evidence)
            ]
        before[life] = sample
        found += [
            f"router {sample.router}: a series of nobody, {name}"
            for name in sample.series
            if _replica_label(name) not in (None, *evidence.replica_names)
        ]
    for (router, number), sample in before.items():
        if sample.requests < 0:
            continue  # its last look is older than its last request
        counted = sum(
            value
            for name, value in sample.series.items()
            if name.startswith("warmroute_requests_total{")
        )
        if counted != sample.requests:
            found.append(
                f"router {router} (life {number}) counts {counted:.0f} requests,"
                f" {sample.requests} are on record"
            )
    return found


def is_counter(name: str) -> bool:
    """Return whether a series may only grow."""
    return name.partition("{")[0].endswith(("_total", "_count", "_bucket", "_sum"))


def _may_begin_anew(name: str, sample: Sample, evidence: Evidence) -> bool:
    """Return whether a series left with its replica, or is that of a replica's next life."""
    replica = _replica_label(name)
    return replica is not None and (name not in sample.series or replica in evidence.reborn)


def _replica_label(name: str) -> str | None:
    _, has, rest = name.partition('replica="')
    return rest.partition('"')[0] if has else None


def no_secrets(evidence: Evidence) -> list[str]:
    """I-12: no canary and no secret in what is written or shown, and no stack trace."""
    found = []
    for name, text in evidence.artefacts.items():
        found += [f"a canary in {name}"] * bool(NONCE.search(text))
        found += [f"a secret in {name}" for secret in evidence.secrets if secret in text]
        found += [
            f"{word!r} in {name}"
            for word in ("Traceback", "was never retrieved", "never awaited", "Unclosed")
            if word in text
        ]
    return found


INVARIANTS: Final[dict[str, Callable[[Evidence], list[str]]]] = {
    "I-1": no_silent_loss,
    "I-2": no_false_completion,
    "I-3": no_cross_talk,
    "I-4": no_cross_tenant_hit,
    "I-5": one_commit,
    "I-6": conserved,
    "I-7": no_leaks,
    "I-8": bounded_memory,
    "I-9": alive,
    "I-10": bounded_reaction,
    "I-11": true_metrics,
    "I-12": no_secrets,
}


def check(evidence: Evidence) -> dict[str, list[str]]:
    """Return what breaks each invariant."""
    return {name: judge(evidence) for name, judge in INVARIANTS.items()}
