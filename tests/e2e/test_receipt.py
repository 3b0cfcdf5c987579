"""What clients and operators are told: receipts, decisions, models, errors, exit codes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import openai
import pytest
import pytest_asyncio

from support.conversation import ask, sdk
from support.fleet import MODEL, FleetPlan, LocalFleet
from support.raw import RawClient, Reply, get
from support.stage import Actor, chat_body, post_to
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG_TEXT = "quick brown foxes jump over lazy dogs " * 60
RECEIPT = "x-warmroute-"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    plan = FleetPlan(
        tokenizer=write_tokenizer(folder / "tokenizer"),
        preset="llama-8b-h100",
        speed_up=20,
        config={"receipts": True, "seed": 7},
    )
    async with LocalFleet(folder, plan) as running:
        yield running


async def request(port: int, data: bytes, *, bodiless: bool = False) -> Reply:
    """Send one request to one listener and return the response."""
    client = await RawClient.connect(port)
    client.send(data)
    reply = await client.reply(bodiless=bodiless)
    await client.close()
    return reply


async def command(*words: str) -> tuple[int, str, str]:
    """Run ``warmroute WORDS``; return exit code, output and errors."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "warmroute",
        *words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(20):
        output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_equal_calls_of_the_sdk_give_equal_answers_streamed_or_not(
    fleet: LocalFleet,
) -> None:
    chat: Any = [{"role": "user", "content": LONG_TEXT + "sdk"}]
    async with sdk(fleet.router.url) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=chat, max_tokens=30)
        streamed = await ask(client, MODEL, [("user", LONG_TEXT + "sdk")], output_tokens=30)
    assert whole.choices[0].message.content == streamed.text
    assert streamed.text
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == streamed.prompt_tokens
    assert streamed.cached_tokens > streamed.prompt_tokens - 64


async def test_a_receipt_says_what_the_decision_record_says(fleet: LocalFleet) -> None:
    async with sdk(fleet.router.url) as client:
        cold = await ask(client, MODEL, [("user", "receipt " + LONG_TEXT)])
        warm = await ask(client, MODEL, [("user", "receipt " + LONG_TEXT)])
    assert warm.replica == cold.replica
    assert warm.reason == "prefix"
    assert warm.predicted_tokens > cold.predicted_tokens
    for answered in (cold, warm):
        record = await fleet.decision(answered.request_id)
        [attempt] = record["attempts"]
        assert attempt["decision"]["replica"] == answered.replica
        assert attempt["decision"]["predicted_cached_tokens"] == answered.predicted_tokens
        assert record["reported_cached_tokens"] == answered.cached_tokens
        assert record["prompt_tokens"] == record["reported_prompt_tokens"]
        assert len(attempt["decision"]["candidates"]) == 2


async def test_receipts_are_off_unless_asked_for(fleet: LocalFleet) -> None:
    router = await fleet.start_router(receipts=False)
    await fleet.all_up(router)
    for stream in (True, False):
        body = chat_body(stream=stream, max_tokens=2)
        reply = await request(router.port, post_to(body, x_request_id="mine"))
        assert reply.status == 200
        assert reply.all(b"x-request-id") == [b"mine"]
        assert not [name for name, _ in reply.headers if name.lower().startswith(b"x-warmroute")]
    assert await asyncio.to_thread(fleet.processes.stop, router.child) == 0


async def test_explain_finds_a_request_by_both_of_its_ids(fleet: LocalFleet) -> None:
    body = chat_body(LONG_TEXT, stream=False, max_tokens=2)
    reply = await request(fleet.router.port, post_to(body, x_request_id="my-own-id"))
    [router_id] = reply.all(RECEIPT.encode() + b"request-id")
    admin = ("--admin", fleet.router.admin_url)
    shown = [await command("explain", name, *admin) for name in (router_id.decode(), "my-own-id")]
    for code, output, errors in shown:
        assert (code, errors) == (0, "")
        assert f"request {router_id.decode()}" in output
        assert all(replica.name in output for replica in fleet.replicas)
        assert "candidates" in output
    code, output, _ = await command("explain", "--last", "1", "--json", *admin)
    assert code == 0
    assert json.loads(output)[0]["client_request_id"] == "my-own-id"


async def test_explain_says_what_is_wrong(fleet: LocalFleet) -> None:
    admin = ("--admin", fleet.router.admin_url)
    code, _, errors = await command("explain", "nobody", *admin)
    assert (code, "request id" in errors) == (2, True)
    code, _, errors = await command("explain", "--last", "1", "--admin", fleet.router.url)
    assert (code, "is this the address of --admin" in errors) == (2, True)
    code, _, errors = await command("tenants", "report", *admin)
    assert (code, "of a router with tenants" in errors) == (2, True)
    code, _, errors = await command("explain", "x", "--admin", "http://127.0.0.1:9")
    assert (code, "no router answers" in errors) == (2, True)
    assert "Traceback" not in errors


async def test_a_salt_keeps_equal_prompts_apart(fleet: LocalFleet) -> None:
    """A69, B19, C46: no hit is predicted, and none is made, over a salt's border."""
    turns = [("user", "salt " + LONG_TEXT)]
    async with sdk(fleet.router.url) as client:
        for salt in ("t1", "t2"):
            cold = await ask(client, MODEL, turns, cache_salt=salt)
            assert (cold.predicted_tokens, cold.cached_tokens) == (0, 0)
        for salt in ("t1", "t2"):
            warm = await ask(client, MODEL, turns, cache_salt=salt)
            assert warm.predicted_tokens > warm.prompt_tokens - 65
            assert abs(warm.error_tokens) < 64
        plain = await ask(client, MODEL, turns)
        assert (plain.predicted_tokens, plain.cached_tokens) == (0, 0)


async def test_models_are_those_of_all_live_replicas_and_others_are_a_404(
    fleet: LocalFleet,
) -> None:
    """C29, C21: the router answers from what it knows."""
    actor = Actor("other", model="other-model")
    endpoint = await actor.replica.start()
    replicas = [{"url": f"http://{endpoint.authority}", "name": actor.name}]
    router = await fleet.start_router(replicas=replicas)
    try:
        await fleet.all_up(router, 3)
        async with sdk(router.url) as client:
            assert [model.id async for model in client.models.list()] == [MODEL, "other-model"]
            chat: Any = [{"role": "user", "content": "hello"}]
            with pytest.raises(openai.NotFoundError) as refused:
                await client.chat.completions.create(model="no-model", messages=chat)
        assert refused.value.code == "model_not_found"
        body = json.dumps({"model": "other-model", "messages": chat}).encode()
        reply = await request(router.port, post_to(body))
        assert reply.all(b"x-warmroute-replica") == [b"other"]
    finally:
        await asyncio.to_thread(fleet.processes.stop, router.child)
        await actor.replica.stop()


async def test_without_a_replica_the_answer_is_503_with_retry_after(tmp_path: Path) -> None:
    """B43, C29: alive, not ready, and says when to come back."""
    async with LocalFleet(tmp_path, FleetPlan(replicas=0)) as empty:
        reply = await request(empty.router.port, post_to(chat_body()))
        assert reply.status == 503
        assert int(reply.all(b"retry-after")[0]) >= 1
        assert json.loads(reply.body)["error"]["code"] == "no_replica"
        assert (await request(empty.router.port, get("/livez"))).status == 200
        assert (await request(empty.router.port, get("/readyz"))).status == 503


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1//models", 404),
        ("GET", "/debug/replicas", 404),
        ("POST", "/v1/unknown", 404),
        ("GET", "/", 404),
        ("HEAD", "/v1/models", 200),
        ("HEAD", "/livez", 200),
        ("HEAD", "/readyz", 200),
        ("HEAD", "/metrics", 200),
        ("HEAD", "/v1/chat/completions", 405),
        ("GET", "/v1/models?x=1", 200),
    ],
)
async def test_only_known_paths_and_methods_are_answered(
    fleet: LocalFleet, method: str, path: str, status: int
) -> None:
    """Operator paths are not served to clients; a HEAD has no body."""
    data = f"{method} {path} HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n".encode()
    client = await RawClient.connect(fleet.router.port)
    client.send(data)
    raw = await client.reader.read(-1)
    await client.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    assert int(head.split(b" ")[1]) == status
    assert (b"\r\nallow: " in head.lower()) == (status == 405)
    assert (body == b"") == (method == "HEAD")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("listen: nowhere\n", "listen"),
        ("health: {fall: 0}\n", "health.fall"),
        ("health: {fell: 3}\n", "health"),
        ("replicas: [{url: 'http://a:1'}, {url: 'ftp://a:1'}]\n", "replicas[1].url"),
        ("policy: {kind: best}\n", "policy"),
        ("models: [{name: m}]\n", "models[0]"),
        ("a: [\n", "YAML"),
    ],
)
async def test_a_wrong_config_ends_with_2_and_names_the_key(
    tmp_path: Path, text: str, key: str
) -> None:
    path = tmp_path / "warmroute.yaml"
    path.write_text(text)
    code, output, errors = await command("serve", "--config", str(path))
    assert (code, output) == (2, "")
    assert key in errors
    assert str(path) in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("serve", "--policy", "best"), "--policy"),
        (("serve", "--replica", "localhost"), "replicas[0].url"),
        (("serve", "--model", "name-only"), "--model"),
        (("serve", "--redis", "http://x"), "redis"),
        (("serve", "--config", "/nowhere/at-all.yaml"), "/nowhere/at-all.yaml"),
        (("serve", "--no-such-flag"), "--no-such-flag"),
        (("worker", "--pages", "0"), "--pages"),
        (("worker", "--preset", "abacus"), "--preset"),
        (("sidecar", "--engine", "http://127.0.0.1:9"), "--redis"),
        (("explain",), "request id"),
    ],
)
async def test_a_wrong_flag_ends_with_2_and_is_named(words: tuple[str, ...], named: str) -> None:
    """A94: what a flag says is used, or refused by name."""
    code, output, errors = await command(*words)
    assert (code, output) == (2, "")
    assert named in errors
    assert "Traceback" not in errors
