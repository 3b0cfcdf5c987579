"""A tenant that tries to get at what others made, past the salt, at a real router."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from router.server import LOAD_PATHS, PREFIX_PATHS
from support.fleet import MODEL
from support.raw import sized
from support.stage import Actor, Stage, post_to, staged_router
from support.tenant import key_of, tenant_config
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.raw import Received, Reply, Talk

pytestmark = pytest.mark.asyncio(loop_scope="module")

AUDIO = {path for path in LOAD_PATHS if "audio" in path}
SALTED = sorted((PREFIX_PATHS | LOAD_PATHS | {"/v1/forms"}) - AUDIO)
AUDIT = "audit.jsonl"
USAGE = {"prompt_tokens": 64 * 40, "completion_tokens": 1, "total_tokens": 64 * 40 + 1}
LOGO = {"type": "image_url", "image_url": {"url": "http://a/logo.png"}, "uuid": "logo"}


def body_of(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": MODEL, "messages": messages, "input": "hello", "prompt": "hello", **fields}
    return json.dumps(body).encode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("stage")
    config = tenant_config(
        folder, "acme", slow={"quota": {"new_blocks_per_s": 0.01, "burst_s": 1000}}
    )
    async with staged_router(
        folder,
        [Actor("a")],
        tokenizer=write_tokenizer(folder / "tokenizer"),
        paths=["/v1/forms"],
        tenants_state_file=str(folder / "epochs.json"),
        audit_log=str(folder / AUDIT),
        **config,
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(stage: Stage) -> None:
    stage.reset()


async def ask(stage: Stage, path: str, body: bytes, tenant: str = "acme") -> Reply:
    return await stage.ask(post_to(body, path, Authorization=f"Bearer {key_of(tenant)}"))


@pytest.mark.parametrize("path", SALTED)
async def test_a_body_that_another_reader_takes_for_no_json_reaches_no_engine(
    stage: Stage, path: str
) -> None:
    """S-04: such as a form, whose preamble looks like JSON: its reader would see no salt."""
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
    for body in (
        b'{"x":1}\r\n' + form,
        b'{"model":1,' + form,
        b'{"model":null}' + form,
        b'{"x":"' + form + b'"}',
        body_of().decode().encode("utf-16-le"),
        body_of() + b"\0",
    ):
        reply = await ask(stage, path, body)
        assert reply.status == 400, body
    assert stage.posts() == []


async def test_a_path_that_is_not_read_passes_on_what_is_json(stage: Stage) -> None:
    for body in (body_of(), b"{}", body_of(model=None), body_of(model=1), body_of(x="é")):
        assert (await ask(stage, "/v1/forms", body)).status == 200, body
    assert len(stage.posts()) == 5


@pytest.mark.parametrize("path", SALTED)
async def test_a_client_takes_no_pages_and_no_media_that_others_made(
    stage: Stage, path: str
) -> None:
    """S-04, S-05: by their numbers, by a room, by a name."""
    named = [{"role": "user", "content": [LOGO | {"image_url": None}]}]
    for fields in (
        {"kv_transfer_params": {"remote_block_ids": [1]}},
        {"ec_transfer_params": {"peer": "a"}},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
        {"bootstrap_room": 7},
        {"messages": named},
    ):
        assert (await ask(stage, path, body_of(**fields))).status == 400, fields
    assert stage.posts() == []


async def test_a_prompt_that_the_router_cannot_read_is_no_way_around_a_quota(stage: Stage) -> None:
    """S-08: the engine's count is charged; the account has 10 blocks, and the prompt had 40."""

    async def answer(talk: Talk, _: Received) -> None:
        await talk.say(sized(json.dumps({"object": "x", "choices": [], "usage": USAGE}).encode()))

    stage.cast(answer)
    body = body_of(chat_template="{{ messages }}")
    assert (await ask(stage, "/v1/chat/completions", body, "slow")).status == 200
    reply = await ask(stage, "/v1/chat/completions", body, "slow")
    assert reply.status == 429
    assert reply.all(b"retry-after") == [b"60"]
    assert len(stage.posts()) == 1


async def test_nothing_is_done_where_the_record_of_it_would_be_lost(stage: Stage) -> None:
    """S-12: an audit log that somebody took away is a 503, and no failure of the router."""
    path, kept = stage.fleet.directory / AUDIT, stage.fleet.directory / "kept"
    scopes = f"{stage.fleet.router.admin_url}/admin/scopes"

    async def delete() -> tuple[int, Any]:
        async with stage.fleet.http.delete(f"{scopes}/tenant:acme") as answer:
            return answer.status, await answer.json()

    async def epochs() -> Any:
        async with stage.fleet.http.get(scopes) as answer:
            return await answer.json()

    before = await epochs()
    path.rename(kept)
    status, told = await delete()
    assert (status, told["error"]["code"]) == (503, "audit_log_failed")
    assert "nothing was done" in told["error"]["message"]
    assert await epochs() == before
    kept.rename(path)
    assert (await delete())[0] == 200
    assert await epochs() != before
