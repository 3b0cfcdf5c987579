"""Lua scripts of the store: one small file each, sent by digest, sent whole when unknown."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redis.exceptions import NoScriptError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from state.client import Argument, Client


class Script:
    """One ``state/<name>.lua``. A server that lost its scripts (restart, flush) gets it again."""

    __slots__ = ("_digest", "_source")

    def __init__(self, name: str) -> None:
        self._source = Path(__file__).with_name(f"{name}.lua").read_bytes()
        self._digest = hashlib.sha1(self._source, usedforsecurity=False).hexdigest()

    def call(self, keys: Sequence[str | bytes], arguments: Sequence[Argument]) -> ScriptCall:
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


async def run_scripts(client: Client, calls: Sequence[ScriptCall]) -> list[Any]:
    """Run ``calls`` in one round trip and return their results; raises the first error."""
    results = await try_scripts(client, calls)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


async def try_scripts(client: Client, calls: Sequence[ScriptCall]) -> list[Any]:
    """Run ``calls`` in one round trip; an error of one stands in its result's place.

    Calls of scripts that a server lost are sent once more, whole.
    """
    results = await _sent(client, [call.by_digest for call in calls])
    lost = [n for n, result in enumerate(results) if isinstance(result, NoScriptError)]
    if lost:
        again = await _sent(client, [calls[number].by_source for number in lost])
        for number, result in zip(lost, again, strict=True):
            results[number] = result
    return results


async def _sent(client: Client, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    return await pipeline.execute(raise_on_error=False)
