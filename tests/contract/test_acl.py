"""The example's access rules on a real server: enough for all that is done, and no more."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from redis.exceptions import NoPermissionError, ResponseError

from state.client import command_client, run_command
from state.schema import KEY_PREFIX
from support.fleet_state import A, record
from support.state_backend import RedisBackend
from support.valkey_acl import RULES, ValkeyAcl

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from state.client import Client

_STATE = Path(__file__).parents[2] / "state"
REFUSED = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("CONFIG", "GET", "maxmemory"),
    ("CONFIG", "SET", "maxmemory", "0"),
    ("DEBUG", "SLEEP", "0"),
    ("SHUTDOWN", "NOSAVE"),
    ("SAVE",),
    ("REPLICAOF", "127.0.0.1", "1"),
    ("ACL", "LIST"),
    ("CLIENT", "LIST"),
    ("MONITOR",),
    ("SCRIPT", "FLUSH"),
    ("FUNCTION", "LIST"),
    ("MIGRATE", "127.0.0.1", "1", "wr:1:x", "0", "1"),
    ("DUMP", "wr:1:x"),
    ("SUBSCRIBE", "x"),
    ("GET", "other:key"),
    ("SET", "other:key", "1"),
    ("EVAL", "return redis.call('FLUSHALL')", "0"),
    ("EVAL", "return redis.call('GET', KEYS[1])", "1", "other:key"),
    ("EVAL", "return redis.call('GET', 'other:key')", "1", "wr:1:x"),
]


@pytest.fixture
async def limited(valkey_acl: ValkeyAcl) -> AsyncIterator[Client]:
    await valkey_acl.flush()
    client = command_client(valkey_acl.settings)
    yield client
    await client.aclose()


@pytest.mark.parametrize("command", REFUSED, ids=lambda command: " ".join(command)[:40])
async def test_what_routers_and_sidecars_never_do_is_refused(
    limited: Client, valkey_acl: ValkeyAcl, command: tuple[str, ...]
) -> None:
    """S-14: no key of others, nothing that lists, empties, dumps, stops or configures."""
    await valkey_acl.command("SET", "other:key", "theirs")
    with pytest.raises((NoPermissionError, ResponseError), match=r"(?i)permissions|ACL"):
        await run_command(limited, *command)
    assert await valkey_acl.command("GET", "other:key") == b"theirs"


async def test_every_command_of_ours_is_in_the_rules(limited: Client) -> None:
    """S-14: of the scripts, and of the code, as far as they are written out."""
    await run_command(limited, "PING")
    allowed = set(re.findall(r"\+([a-z|]+)", RULES.read_text()))
    used = {
        name.lower()
        for path in _STATE.glob("*.lua")
        for name in re.findall(r"redis\.p?call\('([A-Z]+)'", path.read_text())
    }
    pattern = r"(?:execute_command|run_command)\((?:[\w.]*[cC]lient, )?\"([A-Z]+)\""
    used |= {
        name.lower()
        for path in _STATE.glob("*.py")
        if path.name != "cluster.py"
        for name in re.findall(pattern, path.read_text())
    }
    assert len(used) > 25
    assert used <= allowed
    assert f"~{KEY_PREFIX.partition(':')[0]}:*" in RULES.read_text()


async def test_the_rules_let_a_whole_life_of_a_replica_pass(valkey_acl: ValkeyAcl) -> None:
    """S-14: the store contract runs on these rules, too; here, nothing at all was refused."""
    await valkey_acl.flush()
    await valkey_acl.command("ACL", "LOG", "RESET")
    async with AsyncExitStack() as stack:
        backend = RedisBackend(valkey_acl, stack)
        await backend.writer.register(record())
        mirror = await backend.mirror()
        assert await mirror.settle(30)
        await backend.writer.deregister(A, record().generation)
        assert await mirror.settle(30)
        assert mirror.failures == 0
    assert await valkey_acl.refusals() == []
