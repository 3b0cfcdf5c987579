"""Lua scripts of the store: one small file each, sent by digest, sent whole when unknown."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis.exceptions import NoScriptError

from state.client import run_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.asyncio import Redis

    from state.client import Argument


class Script:
    """One ``state/<name>.lua``. A server that lost its scripts (restart, flush) gets it again."""

    __slots__ = ("_digest", "_source")

    def __init__(self, name: str) -> None:
        self._source = Path(__file__).with_name(f"{name}.lua").read_bytes()
        self._digest = hashlib.sha1(self._source, usedforsecurity=False).hexdigest()

    def call(self, keys: Sequence[str], arguments: Sequence[Argument]) -> ScriptCall:
        """Return a call of this script, not yet sent."""
        return ScriptCall(
            by_digest=("EVALSHA", self._digest, len(keys), *keys, *arguments),
            by_source=("EVAL", self._source, len(keys), *keys, *arguments),
        )


class ScriptCall:
    """A script with its keys and arguments, in both forms in which it can be sent."""

    __slots__ = ("by_digest", "by_source")

    def __init__(self, by_digest: tuple[Argument, ...], by_source: tuple[Argument, ...]) -> None:
        self.by_digest = by_digest
        self.by_source = by_source


async def run_scripts(client: Redis, calls: Sequence[ScriptCall]) -> list[Any]:
    """Run ``calls`` in one round trip and return their results; raises the first error."""
    pipeline = client.pipeline(transaction=False)
    for call in calls:
        pipeline.execute_command(*call.by_digest)
    results = await pipeline.execute(raise_on_error=False)
    for number, (call, result) in enumerate(zip(calls, results, strict=True)):
        if isinstance(result, NoScriptError):
            results[number] = await run_command(client, *call.by_source)
        elif isinstance(result, Exception):
            raise result
    return results
