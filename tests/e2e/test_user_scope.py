"""A tenant that keeps its users apart, at a real router: the salt of each on every path."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from prompt.reader import MESSAGE_PATH
from router.server import LOAD_PATHS, PREFIX_PATHS
from state.secret import engine_salt
from support.fleet import MODEL
from support.stage import Actor, answer_at_once, post_to, staged_router, stream_two_events
from support.tenancy import TEXT, tenant, tenant_fleet
from support.tenancy import key_of as tenancy_key
from support.tenant import SECRET, key_of, tenant_config

if TYPE_CHECKING:
    from pathlib import Path

    from support.raw import Received, Talk
    from support.valkey import ValkeyProcess

PATHS = sorted(path for path in PREFIX_PATHS | LOAD_PATHS if "audio" not in path)
SCOPE = "tenant:acme"
USER = "user-CANARY-1"


def body_for(path: str, user: object, *, stream: bool) -> bytes:
    """Return a body of ``path`` that names a user."""
    text = [{"role": "user", "content": "hello"}]
    name = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    fields: dict[str, object] = {
        "model": "fleet-model",
        name: text if name == "messages" else "hello",
        "stream": stream,
        "cache_salt": "mine",
    }
    if path == MESSAGE_PATH:
        fields |= {"max_tokens": 1, "metadata": {"user_id": user}}
    else:
        fields["user"] = user
    return json.dumps(fields).encode()


async def test_each_user_has_a_salt_of_its_own_on_every_path(tmp_path: Path) -> None:
    """S-01, S-04: streamed or not; who names none has the tenant's; no user is in any log."""

    async def play(talk: Talk, received: Received) -> None:
        is_streamed = json.loads(received.body)["stream"]
        await (stream_two_events if is_streamed else answer_at_once)(talk, received)

    actor = Actor("a")
    actor.answer = play
    config = tenant_config(tmp_path, acme={"share": "user"}) | {"groups": []}
    expected = {
        user: engine_salt(SECRET, SCOPE, "", user or None) for user in (USER, "user-2", "", None)
    }
    assert len(set(expected.values())) == 3
    headers = {"Authorization": f"Bearer {key_of('acme')}"}
    async with staged_router(
        tmp_path, [actor], router_flags=("--log-level", "debug"), **config
    ) as stage:
        for path in PATHS:
            for user, salt in expected.items():
                for stream in (False, True):
                    body = body_for(path, user, stream=stream)
                    reply = await stage.ask(post_to(body, path, **headers))
                    assert reply.status == 200, (path, reply.body)
                    sent = json.loads(actor.posts()[-1].body)
                    assert sent["cache_salt"] == salt, (path, user)
        count = len(actor.posts())
        for path in PATHS:
            for wrong in (5, USER * 100):
                body = body_for(path, wrong, stream=False)
                reply = await stage.ask(post_to(body, path, **headers))
                assert reply.status == 400
                assert b"user" in reply.body
                assert b"CANARY" not in reply.body
        assert len(actor.posts()) == count
        shown = json.dumps(await stage.fleet.decisions(100))
        async with stage.fleet.http.get(f"{stage.fleet.router.admin_url}/metrics") as answer:
            shown += await answer.text()
        child = stage.fleet.router.child
        shown += child.log.read_text() + child.output.read_text()
        assert "CANARY" not in shown


async def test_a_user_meets_its_own_prompts_and_nobody_elses(
    tmp_path: Path, valkey: ValkeyProcess
) -> None:
    """S-01, S-05: at a real worker and sidecar; a deletion of the tenant ends it for all users."""
    acme = tenant("acme", share="user")
    async with tenant_fleet(tmp_path, valkey.url, acme, "other") as made:
        router = await made.router("r1")

        async def ask(user: str | None, name: str = "acme") -> tuple[int, int]:
            """Return the tokens that were predicted to be cached, and those that were."""
            body = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}]}
            named = {} if user is None else {"user": user}
            headers = {"Authorization": f"Bearer {tenancy_key(name)}"}
            url = f"{router.url}/v1/chat/completions"
            asked = {**body, **named, "max_tokens": 1}
            async with made.fleet.http.post(url, json=asked, headers=headers) as answer:
                assert answer.status == 200
                details = (await answer.json())["usage"].get("prompt_tokens_details") or {}
                predicted = answer.headers["x-warmroute-predicted-cached-tokens"]
                return int(predicted), int(details.get("cached_tokens") or 0)

        for user in ("one", "two", None):
            assert await ask(user) == (0, 0), user
        assert await ask("one", "other") == (0, 0)
        for user in ("one", "two", None):
            predicted, cached = await ask(user)
            assert 0 < predicted <= cached, user
        status, _ = await made.call("DELETE", router, f"/admin/scopes/{SCOPE}")
        assert status == 200
        for user in ("one", "two", None):
            assert await ask(user) == (0, 0), user
        predicted, cached = await ask("one", "other")
        assert 0 < predicted <= cached
