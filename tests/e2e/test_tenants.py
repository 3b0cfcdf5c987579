"""Tenants at a real router: what an engine gets of them, and what they get of each other."""

from __future__ import annotations

import base64
import itertools
import json
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest
import pytest_asyncio

from router.gate import FAILURES_AT_ONCE
from router.server import LOAD_PATHS, PREFIX_PATHS
from state.secret import engine_salt
from support.fleet import MODEL, until
from support.raw import RawClient, get
from support.stage import Actor, Stage, answer_at_once, post_to, staged_router, stream_two_events
from support.tenant import SECRET, key_of, tenant_config
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.raw import Received, Reply, Talk

pytestmark = pytest.mark.asyncio(loop_scope="module")

AUDIO = {path for path in LOAD_PATHS if "audio" in path}
SALTED = [*sorted((PREFIX_PATHS | LOAD_PATHS) - AUDIO), "/pooling"]
ENGINE_KEY = "key-of-the-engines"
ACME, OTHER = (engine_salt(SECRET, f"tenant:{name}", "") for name in ("acme", "other"))
GROUP = engine_salt(SECRET, "group:shared", "")
TEXT = [{"role": "user", "content": "hello 🦙"}]
HOSTS = itertools.count(10)
CLIENT_SALTS = {
    "none": "",
    "first": '"cache_salt":"mine",',
    "another tenant's": f'"cache_salt":"{OTHER}",',
    "escaped": '"\\u0063ache\\u005Fsalt" : "mine" , ',
    "no text": '"cache_salt":[1,{"cache_salt":"mine"}],',
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("stage")
    config = tenant_config(
        folder,
        "other",
        acme={"receipts": False},
        left={"share": "shared"},
        right={"share": "shared"},
        open={"receipts": True},
    )
    async with staged_router(
        folder,
        [Actor("a"), Actor("b")],
        tokenizer=write_tokenizer(folder / "tokenizer"),
        paths=["/pooling"],
        upstream={"api_key": ENGINE_KEY},
        hold={"enabled": True},
        **config,
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(stage: Stage) -> None:
    stage.reset()


@pytest.fixture
def address() -> str:
    """Return an address of this machine from which no request came before."""
    return f"127.0.0.{next(HOSTS)}"


async def ask_from(stage: Stage, address: str, data: bytes) -> Reply:
    client = await RawClient.connect(stage.fleet.router.port, address=address)
    client.send(data)
    reply = await client.reply()
    await client.close()
    return reply


def body_for(path: str, salt: str, *, stream: bool) -> bytes:
    """Return a body as its clients write it, with ``salt`` in front."""
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": TEXT,
        "input": "hello 🦙",
        "max_tokens": 4,
        "stream": stream,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"cache_salt": 1}}}],
    }
    if path in {"/v1/completions", "/tokenize"}:
        fields["prompt"] = "hello 🦙"
    return ("{" + salt + json.dumps(fields)[1:]).encode()


def bearer(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key_of(tenant)}"}


def salts_of(received: Received) -> list[Any]:
    """Return the salts that any parser sees on the top level."""
    pairs = json.loads(received.body, object_pairs_hook=lambda pairs: pairs)
    return [value for name, value in pairs if name == "cache_salt"]


async def play(talk: Talk, received: Received) -> None:
    is_streamed = json.loads(received.body).get("stream")
    await (stream_two_events if is_streamed else answer_at_once)(talk, received)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", SALTED)
async def test_an_engine_gets_the_salt_of_the_tenant_s_scope_on_every_path(
    stage: Stage, path: str, *, stream: bool
) -> None:
    """S-04, B20: the same for the same scope, another for others, a client's own nowhere."""
    stage.cast(play)
    for name, salt in CLIENT_SALTS.items():
        sent = body_for(path, salt, stream=stream)
        for tenant, expected in (
            ("acme", ACME),
            ("other", OTHER),
            ("left", GROUP),
            ("right", GROUP),
        ):
            stage.reset()
            stage.cast(play)
            reply = await stage.ask(post_to(sent, path, **bearer(tenant)))
            assert reply.status == 200, (name, reply.body)
            [received] = stage.posts()
            assert salts_of(received) == [expected], name
            assert b"mine" not in received.body
            rest = received.body.replace(b'"cache_salt":"%b",' % expected.encode(), b"", 1)
            own = body_for(path, "", stream=stream)
            assert rest.replace(b" , ", b"", 1) == own or name == "escaped", name
            record = (await stage.fleet.decisions(1))[-1]
            assert record["tenant"] == tenant


@pytest.mark.parametrize("path", sorted(AUDIO))
async def test_a_path_that_takes_no_salt_is_not_served_to_tenants(stage: Stage, path: str) -> None:
    reply = await stage.ask(post_to(b"--form\r\n", path, **bearer("acme")))
    assert reply.status == 403
    reply = await stage.ask(post_to(b"--form\r\n", path))
    assert reply.status == 401
    assert stage.posts() == []


@pytest.mark.parametrize("path", SALTED)
async def test_a_body_without_a_place_for_a_salt_reaches_no_engine(stage: Stage, path: str) -> None:
    """S-04: what is no JSON object, has two salts, or names pages of other engines."""
    bodies = [
        b"--form\r\n",
        b"[]",
        body_for(path, '"cache_salt":"a","cache\\u005fsalt":"b",', stream=False),
        body_for(path, '"kv_transfer_params":{"remote_block_ids":[1]},', stream=False),
        body_for(path, "", stream=False).decode().encode("utf-16"),
    ]
    for body in bodies:
        reply = await stage.ask(post_to(body, path, **bearer("acme")))
        assert reply.status == 400, body
    assert stage.posts() == []


@pytest.mark.parametrize("path", sorted(PREFIX_PATHS | LOAD_PATHS | {"/pooling"}))
async def test_without_a_key_nothing_is_served_and_all_are_told_the_same(
    stage: Stage, path: str, address: str
) -> None:
    """C57, S-09: no key, a wrong one, a wrong scheme; before the body is looked at."""
    headers: list[dict[str, str]] = [
        {},
        {"X_Tenant": "acme"},
        {"Authorization": "Bearer sk-wrong"},
        {"Authorization": f"Bearer {key_of('acme')}x"},
        {"Authorization": "Basic " + base64.b64encode(b"acme:x").decode()},
    ]
    answers = [await ask_from(stage, address, post_to(b"{", path, **one)) for one in headers]
    assert [answer.status for answer in answers] == [401] * len(headers)
    assert len({answer.body for answer in answers}) == 1
    assert answers[0].all(b"www-authenticate") == [b"Bearer"]
    assert stage.posts() == []


async def test_the_models_need_a_key_and_health_does_not(stage: Stage, address: str) -> None:
    line = f"Authorization: Bearer {key_of('acme')}\r\n".encode()
    assert (await ask_from(stage, address, get("/v1/models"))).status == 401
    assert (await ask_from(stage, address, get("/v1/models", line))).status == 200
    for path in ("/livez", "/readyz"):
        assert (await ask_from(stage, address, get(path))).status == 200
    assert (await ask_from(stage, address, get("/metrics", line))).status == 404


async def test_an_address_that_tries_keys_is_told_to_wait(stage: Stage, address: str) -> None:
    """S-09: others, and those at that address who have a key, are served meanwhile."""
    wrong = post_to(b"{}", Authorization="Bearer sk-wrong")
    good = post_to(body_for("/v1/chat/completions", "", stream=False), **bearer("acme"))
    statuses = [(await ask_from(stage, address, wrong)).status for _ in range(FAILURES_AT_ONCE + 5)]
    assert set(statuses[:FAILURES_AT_ONCE]) == {401}
    assert 429 in statuses[FAILURES_AT_ONCE:]
    replies = [await ask_from(stage, address, get("/v1/models")) for _ in range(5)]
    waits = [reply.all(b"retry-after") for reply in replies if reply.status == 429]
    assert waits
    assert all(wait == [b"1"] for wait in waits)
    assert (await ask_from(stage, address, good)).status == 200
    assert (await stage.ask(good)).status == 200


async def test_a_session_of_one_name_is_another_one_for_each_scope(stage: Stage) -> None:
    """An engine that groups pages by session never joins two tenants."""
    asked = json.loads(body_for("/v1/chat/completions", "", stream=False)) | {"session_id": "s-1"}
    told = []
    for tenant in ("acme", "other", "acme"):
        stage.reset()
        sent = json.dumps(asked).encode()
        assert (await stage.ask(post_to(sent, **bearer(tenant)))).status == 200
        [received] = stage.posts()
        told.append(json.loads(received.body)["session_id"])
    assert told[0] == told[2] != told[1]
    assert "s-1" not in told
    too_long = json.dumps(asked | {"session_id": "x" * 257}).encode()
    assert (await stage.ask(post_to(too_long, **bearer("acme")))).status == 400


async def test_an_engine_gets_its_own_key_and_nothing_that_names_the_client(stage: Stage) -> None:
    """A55: with health checks and model lists, too."""
    reply = await stage.ask(
        post_to(
            body_for("/v1/chat/completions", "", stream=False),
            **bearer("acme"),
            X_Api_Key=key_of("acme"),
            Cookie="a=b",
            X_Tenant="other",
            OpenAI_Organization="org",
            X_Session_Id="s-1",
            X_Trace="kept",
        )
    )
    assert reply.status == 200
    [received] = stage.posts()
    assert received.all(b"authorization") == [f"Bearer {ENGINE_KEY}".encode()]
    names = {name.lower() for name, _ in received.headers}
    own = {b"x-api-key", b"cookie", b"x-tenant", b"openai-organization", b"x-session-id"}
    assert not names & own
    assert received.all(b"x-trace") == [b"kept"]
    probes: list[Received] = []

    async def are_probed() -> bool:
        seen = [one for actor in stage.actors for one in actor.replica.requests]
        probes[:] = [one for one in seen if b"GET /health" in one.line]
        return len(probes) > 1

    await until(are_probed, "two health checks")
    assert all(one.all(b"authorization") == [f"Bearer {ENGINE_KEY}".encode()] for one in probes)


async def test_a_tenant_sees_receipts_where_its_settings_say_so_and_only_there(
    stage: Stage,
) -> None:
    """S-06: the router's own setting is on, and says nothing to tenants."""
    seen = {}
    for tenant in ("acme", "other", "open"):
        reply = await stage.ask(
            post_to(body_for("/v1/chat/completions", "", stream=False), **bearer(tenant))
        )
        seen[tenant] = [name for name, _ in reply.headers if name.startswith(b"x-warmroute-")]
    assert seen["acme"] == seen["other"] == []
    assert b"x-warmroute-predicted-cached-tokens" in seen["open"]


async def test_requests_are_counted_by_tenant_for_operators_alone(stage: Stage) -> None:
    await stage.ask(post_to(body_for("/v1/chat/completions", "", stream=False), **bearer("open")))
    async with stage.fleet.http.get(f"{stage.fleet.router.admin_url}/metrics") as answer:
        text = await answer.text()
    assert 'warmroute_tenant_requests_total{outcome="done",tenant="open"}' in text
    assert 'warmroute_key_failures_total{result="refused"}' in text


async def test_no_key_no_salt_and_no_secret_is_logged(stage: Stage) -> None:
    for key in (key_of("acme"), "sk-wrong-key-of-nobody"):
        body = body_for("/v1/chat/completions", "", stream=False)
        await stage.ask(post_to(body, Authorization=f"Bearer {key}"))
    await stage.ask(post_to(b"{", Authorization=f"Bearer {key_of('acme')}"))
    logs = b"".join(
        path.read_bytes()
        for path in stage.fleet.directory.iterdir()
        if path.suffix in {".log", ".out"}
    )
    records = json.dumps(await stage.fleet.decisions(1000)).encode()
    for hidden in (key_of("acme"), "sk-wrong-key-of-nobody", ACME, SECRET.decode(), ENGINE_KEY):
        assert hidden.encode() not in logs + records


@pytest.mark.parametrize("key", [key_of("open"), "wrong"], ids=["good", "wrong"])
async def test_the_sdks_show_their_keys_and_raise_their_errors(stage: Stage, key: str) -> None:
    """S-09: openai sends a bearer token, anthropic X-Api-Key."""
    url = stage.fleet.router.url
    messages: Any = TEXT
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as claude,
    ):
        if key == "wrong":
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model=MODEL, messages=messages)
            with pytest.raises(anthropic.AuthenticationError):
                await claude.messages.create(model=MODEL, messages=messages, max_tokens=4)
            assert stage.posts() == []
            return
        await client.chat.completions.create(model=MODEL, messages=messages)
        assert [one.id for one in (await client.models.list()).data] == [MODEL]
        await claude.messages.create(model=MODEL, messages=messages, max_tokens=4)
    salts = [salts_of(one) for one in stage.posts()]
    assert salts == [[engine_salt(SECRET, "tenant:open", "")]] * 2
