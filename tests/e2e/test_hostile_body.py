"""Bodies that are hard to read hold up nobody else: a whole router, attacked."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from router.server import JSON_PATHS
from support.hostile_body import BODIES, post
from support.stage import Actor, post_to, staged_router

if TYPE_CHECKING:
    from asyncio.subprocess import Process

TESTS = Path(__file__).parents[1]
SECONDS = 6.0
PATIENCE_S = 90.0
"""A busy machine takes its time over what waits at the end of an attack."""
BOUND_S = 0.5
"""Read on the event loop these bodies would hold it for up to 0.8 s each, ten times a second."""
REFUSED = [
    (b'{"model":"m","model":"n",%b}', "model"),
    (b'{"model":"m","\\u006dodel":"n",%b}', "model"),
    (b'{"model":"m","cache_salt":"a","cache_salt":"b",%b}', "cache_salt"),
    (b'{"model":"m","seed":NaN,%b}', "body"),
    (b'{"model":"m","seed":Infinity,%b}', "body"),
    (b'{"model":"m","seed":1e999,%b}', "seed"),
    (b'{"model":"m","seed":' + b"9" * 5_000 + b",%b}", "seed"),
    (b'{"model":"m","user":' + b"[" * 100_000 + b"]" * 100_000 + b",%b}", "body"),
    (b'{"model":"m","user":"\\ud800",%b}', "body"),
    (b'{"model":"m","user":"\xff",%b}', "body"),
    (b'{"model":"m","user":"\x00",%b}', "body"),
    (b"\xef\xbb\xbf" + b'{"model":"m",%b}', "body"),
]
PROMPTS = b'"messages":[{"role":"user","content":"x"}],"prompt":"x","input":"x"'


async def _started(kind: str, port: int, admin_port: int) -> Process:
    words = ["-m", "support.hostile_body", kind, str(port), str(admin_port), str(SECONDS)]
    paths = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=-1, env=os.environ | {"PYTHONPATH": paths}
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def _told(process: Process) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        output, _ = await process.communicate()
    return json.loads(output)


async def test_hostile_bodies_hold_up_nobody_else(tmp_path: Path) -> None:
    """L-06, L-07, F20: 8 MiB of whatever is slow to read, ten a second, on every kind of path."""
    async with staged_router(tmp_path, [Actor("a"), Actor("b")]) as stage:
        router = stage.fleet.router
        admin_port = int(router.admin_url.rpartition(":")[2])
        attacking = await _started("attack", router.port, admin_port)
        watching = await _started("watch", router.port, admin_port)
        seen, answers = await _told(watching), await _told(attacking)
    took_s, lags_s = seen["took_s"], seen["lags_s"]
    told = {
        "answers": answers,
        "livez": [took_s[int(len(took_s) * part)] for part in (0.5, 0.95, 0.99)] + [took_s[-1]],
        "lag": [lags_s[len(lags_s) // 2], lags_s[-1]],
    }
    assert set(answers) <= {"200", "400", "404", "503"}, told
    assert {"200", "400"} <= set(answers), told
    assert took_s[int(len(took_s) * 0.75)] < BOUND_S, told
    assert lags_s[int(len(lags_s) * 0.75)] < BOUND_S, told


async def test_a_body_that_parsers_disagree_on_is_refused_by_its_field(tmp_path: Path) -> None:
    """L-06, F20: on every path, in OpenAI's shape, and no replica sees it."""
    async with staged_router(tmp_path, [Actor("a")]) as stage:
        for path in sorted(JSON_PATHS):
            for template, field in REFUSED:
                body = template.replace(b"%b", PROMPTS)
                reply = await stage.ask(post_to(body, path))
                error = msgspec.json.decode(reply.body)["error"]
                told = (reply.status, error["type"], error["param"])
                assert told == (400, "invalid_request_error", field), (path, body[:60])
            reply = await stage.ask(post_to('{"model":"m"}'.encode("utf-16"), path))
            assert reply.status == 400
        assert stage.posts() == []


async def test_what_was_read_is_what_is_sent(tmp_path: Path) -> None:
    """F20: a large body goes on byte by byte, as it was judged."""
    async with staged_router(tmp_path, [Actor("a")]) as stage:
        request = post("/v1/chat/completions", BODIES["escapes"]())
        assert (await stage.ask(request)).status == 200
        (sent,) = stage.posts()
        assert sent.body == request.partition(b"\r\n\r\n")[2]
