"""What a client, a tenant or an operator keeps to himself is in nothing that the router writes.

Each secret of a test is a canary of its own kind. Every error path fires at the log level of
``debug``; then all that the router wrote is searched. Documented exceptions, each tested: the id
that a client gave its request is told to that client and kept with the decision; a served model's
name is in its decision.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pytest

from router.server import LOAD_PATHS, PREFIX_PATHS
from support.fleet import MODEL, FleetPlan, LocalFleet, Router
from support.raw import DONE, LAST, SSE, RawClient, chunk, sized
from support.stage import Actor, answer_at_once, post_to, stream_two_events
from support.talking import fleet_is_up, talking_router
from support.tenant import digest_of, tenant_config

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from support.raw import Received, Reply, Talk

CANARY: Final = "sk-CANARY-"
KEY: Final = f"{CANARY}key-of-acme-0123456789"
REQUEST_ID: Final = "id-CANARY-7"
PATHS: Final = sorted(PREFIX_PATHS | LOAD_PATHS)
OPERATOR_PATHS: Final = (
    *("/metrics", "/readyz", "/debug/decisions?limit=1000", "/debug/replicas", "/admin/replicas"),
    *("/admin/router", "/admin/trust", "/admin/diagnoses", "/admin/billing", "/admin/scopes"),
)
HEADERS: Final = (
    *("Cookie", "X-Api-Key-Old", "User-Agent", "X-Forwarded-For", "Forwarded", "Referer", "From"),
    *("OpenAI-Organization", "OpenAI-Project", "Traceparent", "X-Request-Id", "Via", "X-User"),
    *("X-Warmroute-Kv-Source", "X-data-parallel-rank", "Content-Type", "Accept", "Baggage"),
)
FIELDS: Final = ("user", "metadata", "service_tier", "stop", "x", "safety_identifier", "id")


@dataclass(slots=True)
class Written:
    """All that a router told or wrote, by where."""

    parts: dict[str, bytes] = field(default_factory=dict)

    def note(self, where: str, data: bytes) -> None:
        """Add what was seen at one place."""
        self.parts[where] = self.parts.get(where, b"") + data

    def places_of(self, canary: str) -> dict[str, list[bytes]]:
        """Return where ``canary`` was written, in any case, with what surrounds it."""
        found = re.compile(rb".{0,60}" + re.escape(canary.encode()) + rb".{0,30}", re.IGNORECASE)
        hits = {where: found.findall(data)[:3] for where, data in self.parts.items()}
        return {where: hit for where, hit in hits.items() if hit}


async def break_off(talk: Talk, _: Received) -> None:
    """Begin a stream and leave."""
    await talk.say(SSE + chunk(b"data: {}\n\n"))
    talk.reset()


async def fail(talk: Talk, received: Received) -> None:
    """Answer as an engine that repeats what it was asked."""
    await talk.say(sized(b'{"error":"%b"}' % received.body[:20], status=b"500 Oops"))


async def be_busy(talk: Talk, _: Received) -> None:
    """Have no room."""
    await talk.say(sized(b"{}", status=b"503 Busy"))


async def say_garbage(talk: Talk, received: Received) -> None:
    """Answer what is no HTTP, with what was asked in it."""
    await talk.say(b"HTP/1.1 " + received.body + b"\r\n\r\n")


async def say_bad_header(talk: Talk, _: Received) -> None:
    """Answer with a header that may not pass."""
    await talk.say(b"HTTP/1.1 200 OK\r\nX: %b\x01\r\nContent-Length: 0\r\n\r\n" % CANARY.encode())


async def say_bad_events(talk: Talk, _: Received) -> None:
    """Stream events that nothing can be read of."""
    told = b'data: {"error": "%b"}\n\ndata: {"usage":{"a":[%b]}}\n\n'
    await talk.say(SSE + chunk(told % (CANARY.encode(), CANARY.encode())) + chunk(DONE) + LAST)


async def say_nothing(talk: Talk, _: Received) -> None:
    """Let the deadline pass."""
    await asyncio.sleep(5)
    talk.reset()


ANSWERS: Final = (
    *(answer_at_once, say_nothing, stream_two_events, break_off, fail, be_busy, say_garbage),
    *(say_bad_header, say_bad_events),
)


def request(path: str, body: bytes, *, key: str = KEY, request_id: str = REQUEST_ID) -> bytes:
    """Return a POST whose headers and query are canaries, each of its own."""
    names = {name.replace("-", "_"): f"{CANARY}{name}" for name in HEADERS}
    names |= {"X_Request_Id": request_id, "Authorization": f"Bearer {key}"}
    return post_to(body, f"{path}?api_key={CANARY}query&user={CANARY}q", **names)


def good_body(**fields: Any) -> bytes:
    """Return a body that any path takes, with canaries wherever a client may write."""
    secrets = {name: f"{CANARY}{name}" for name in FIELDS}
    text = f"{CANARY}prompt "
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text, "name": f"{CANARY}name"}],
        "prompt": text * 40,
        "input": text * 40,
        "max_tokens": 1,
        "tools": [{"type": "function", "function": {"name": f"{CANARY}tool"}}],
        "chat_template_kwargs": {f"{CANARY}k": f"{CANARY}v"},
        f"{CANARY}field": 1,
    }
    return json.dumps(body | secrets | fields).encode()


def bad_bodies() -> Iterable[bytes]:
    """Yield bodies that are wrong in each of the ways that are refused."""
    secret = f'"{CANARY}x"'.encode()
    yield from (secret, b"{" + secret, b'{"model":%b}' % secret, b'{"model":[%b]}' % secret)
    yield good_body(model=f"{CANARY}model")
    yield good_body(model=f"{CANARY}\u202e")
    yield good_body()[:-1] + b',"model":%b}' % secret
    yield good_body()[:-1] + b',"cache_salt":%b,"cache_salt":%b}' % (secret, secret)
    yield good_body()[:-1] + b",%b:1e999}" % secret
    yield good_body()[:-1] + b',"a":"\xff"}'
    for name in ("messages", "prompt", "input", "n", "max_tokens", "stream", "tools", "cache_salt"):
        for value in (f"{CANARY}v", [f"{CANARY}v"], [{f"{CANARY}k": 1}], {f"{CANARY}k": 2}, -1):
            yield good_body(**{name: value})
    yield good_body(kv_transfer_params={f"{CANARY}k": 1})
    yield good_body(messages=[{"role": f"{CANARY}role", "content": [{"type": f"{CANARY}type"}]}])
    part = {"type": "image_url", "image_url": {"url": f"{CANARY}url"}, "uuid": f"{CANARY}uuid"}
    yield good_body(messages=[{"role": "user", "content": [part]}])


def raw_requests() -> Iterable[bytes]:
    """Yield what is no request, or one for nobody."""
    secret = CANARY.encode()
    yield b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n" % secret
    yield b"DELETE /livez?%b HTTP/1.1\r\nHost: a\r\n\r\n" % secret
    yield b"%b / HTTP/1.1\r\nHost: a\r\n\r\n" % secret
    yield b"GET /livez HTTP/1.1\r\nHost: %b/\r\n\r\n" % secret
    yield b"GET /livez HTTP/1.1\r\nHost: a\r\n%b\x01: b\r\n\r\n" % secret
    yield b"GET http://%b/ HTTP/1.1\r\nHost: a\r\n\r\n" % secret
    yield b"GET /x#%b HTTP/1.1\r\nHost: a\r\n\r\n" % secret
    yield b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n" % (secret * 1_000)
    yield b"GET / HTTP/1.1\r\nHost: a\r\nX: %b\r\n\r\n" % (secret * 1_000)
    post = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %b\r\n" % KEY.encode()
    )
    yield post + b"Content-Encoding: %b\r\nContent-Length: 0\r\n\r\n" % secret
    yield post + b"Expect: %b\r\nContent-Length: 2\r\n\r\n{}" % secret
    yield post + b"Transfer-Encoding: %b\r\n\r\n" % secret
    yield post + b"Content-Length: %b\r\n\r\n" % secret
    yield post + b"Transfer-Encoding: chunked\r\n\r\n%b\r\n" % secret
    yield post + b"Content-Length: 99999999\r\n\r\n" + secret


async def tell(router: Router, data: bytes, written: Written, *, is_own: bool = True) -> int:
    """Send bytes on a connection of their own; note an answer of the router itself."""
    client = await RawClient.connect(router.port)
    try:
        client.send(data)
        async with asyncio.timeout(15):
            answer: Reply = await client.reply()
        if is_own or (answer.status >= 400 and b"warmroute" in b"".join(answer.all(b"server"))):
            told = [b"%b: %b" % pair for pair in answer.headers]
            written.note("answers", answer.body)
            written.note("answer headers", b"\n".join(told))
    except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
        return 0
    finally:
        client.abort()
    return answer.status


async def ask_operators(fleet: LocalFleet, router: Router, written: Written) -> None:
    """Read everything that the operators' listener tells."""
    for path in OPERATOR_PATHS:
        async with fleet.http.get(router.admin_url + path) as answer:
            written.note(path.partition("?")[0], await answer.read())
    query = f"/debug/decisions?limit={CANARY}"
    for path in (query, f"/debug/decisions/{CANARY}", f"/admin/scopes/{CANARY}", f"/{CANARY}"):
        for method in ("GET", "POST", "DELETE"):
            async with fleet.http.request(method, router.admin_url + path) as answer:
                written.note("operators' errors", await answer.read())


def read_files(folder: Path, router: Router, written: Written) -> None:
    """Read every file that the router wrote."""
    written.note("log", router.child.log.read_bytes())
    written.note("output", router.child.output.read_bytes())
    for path in folder.glob("*.jsonl*"):
        written.note(path.name, path.read_bytes())


async def test_no_canary_is_in_anything_that_a_router_writes(tmp_path: Path) -> None:
    """G-01, G-02, I-12: each header, query, field, path, model; each error path; at ``debug``."""
    actors = [Actor("a"), Actor("b")]
    for actor in actors:
        actor.url = f"http://{(await actor.replica.start()).authority}"
    written = Written()
    config = tenant_config(tmp_path) | {
        "tenants": [{"name": "acme", "key_digests": [digest_of(KEY)], "receipts": True}],
        "replicas": [{"url": actor.url, "name": actor.name} for actor in actors],
        "attend_sidecars": False,
        "health": {"interval_s": 0.1},
        "upstream": {"api_key": f"{CANARY}engine", "first_byte_timeout_s": 0.3},
        "decisions": {"path": str(tmp_path / "decisions.jsonl"), "chains": True},
        "tenants_state_file": str(tmp_path / "epochs.json"),
        "audit_log": str(tmp_path / "audit.jsonl"),
    }
    async with LocalFleet(tmp_path, FleetPlan(replicas=0, routers=0)) as fleet:
        config["state"] = {"redis": fleet.state_url}
        async with talking_router(fleet, tmp_path, "router-canary", **config) as router:
            await fleet_is_up(fleet, router)
            statuses = await provoke(router, actors, written)
            await ask_operators(fleet, router, written)
        read_files(tmp_path, router, written)
    for actor in actors:
        await actor.replica.stop()
    assert {200, 400, 401, 404, 405, 413, 415, 417, 500, 502, 503, 504} <= statuses, statuses
    assert written.places_of(CANARY) == {}
    # The exceptions: the id of a request, and the name of a model that is served.
    places = written.places_of(REQUEST_ID)
    assert places.keys() == {"answer headers", "/debug/decisions"}
    assert b" WARNING " in written.parts["log"]
    assert written.parts["decisions.jsonl"].count(b"\n") > len(PATHS)
    assert MODEL in written.parts["/debug/decisions"].decode()


async def provoke(router: Router, actors: list[Actor], written: Written) -> set[int]:
    """Let every error path fire; return the statuses that came of it."""
    statuses, numbers = set(), itertools.count()
    for answer in ANSWERS:
        for actor in actors:
            actor.answer = answer
        for path in PATHS if answer is answer_at_once else PATHS[:3]:
            body = good_body(seed=next(numbers))  # what fails again and again is not asked again
            statuses.add(await tell(router, request(path, body), written, is_own=False))
    for actor in actors:
        actor.answer = answer_at_once
    for path, body in itertools.product(PATHS[:5], bad_bodies()):
        statuses.add(await tell(router, request(path, body), written, is_own=False))
    for data in raw_requests():
        statuses.add(await tell(router, data, written))
    for key in (f"{CANARY}unknown", "", f"{CANARY}\u00e9"):
        told = await tell(router, request(PATHS[0], b"{}", key=key), written)
        statuses.add(told)
    statuses.add(
        await tell(router, request(PATHS[0], good_body(), request_id=CANARY + "\xe9"), written)
    )
    for actor in actors:
        await actor.replica.stop()
    for path in PATHS[:3]:
        statuses.add(await tell(router, request(path, good_body()), written))
    return statuses


async def test_a_password_of_the_state_store_is_in_no_log(tmp_path: Path) -> None:
    """G-02: with a store that refuses the password, and with none at all."""
    written = Written()
    async with LocalFleet(tmp_path, FleetPlan(replicas=0, routers=0)) as fleet:
        url = f"redis://:{CANARY}password@127.0.0.1:1/0"
        config = {"state": {"redis": url}, "replicas": [{"url": "http://127.0.0.1:1"}]}
        async with talking_router(fleet, tmp_path, "router-away", **config) as router:
            await asyncio.sleep(1.5)
            await ask_operators(fleet, router, written)
        read_files(tmp_path, router, written)
    assert b"127.0.0.1:1" in written.parts["log"]
    assert written.places_of(CANARY) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": {"redis": f"ftp://u:{CANARY}p@h"}},
        {"state": {"redis": f"redis://u:{CANARY}p@h/0?password={CANARY}"}},
        {"state": {"redis": f"redis://u:{CANARY}p@[h/0"}},
        {"replicas": [{"url": f"http://u:{CANARY}p@h:80"}]},
        {"upstream": {"api_key": f"{CANARY} with blanks"}},
        {"upstream": {"api_key": [f"{CANARY}key"]}},
        {"tenants": [{"name": "a", "key_digests": [f"{CANARY}key-in-place-of-its-digest"]}]},
    ],
)
async def test_a_wrong_secret_in_the_configuration_is_not_repeated(
    tmp_path: Path, wrong: dict[str, object]
) -> None:
    """G-02: the error names the key."""
    path = tmp_path / "router.yaml"
    path.write_text(json.dumps(wrong))
    async with LocalFleet(tmp_path, FleetPlan(replicas=0, routers=0)) as fleet:
        child = fleet.processes.start("broken", "serve", "--config", str(path))
        assert await asyncio.to_thread(child.process.wait, 100) == 2
        said = child.log.read_text() + child.output.read_text()
    assert next(iter(wrong)) in said
    assert CANARY not in said
