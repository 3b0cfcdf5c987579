"""A server with the example's access rules; its user is limited, the test itself is not."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from state.client import RedisSettings, command_client, run_command
from support.valkey import ValkeyProcess

RULES = Path(__file__).parents[2] / "examples" / "valkey.acl"
_SHUT, _OPEN = "user default off", "user default on nopass ~* &* +@all"


class ValkeyAcl(ValkeyProcess):
    """``url`` is that of the example's user; ``command`` may do anything."""

    def __init__(self) -> None:
        self._rules = Path(tempfile.mkdtemp(prefix="wra-")) / "valkey.acl"
        lines = RULES.read_text().splitlines()
        assert _SHUT in lines
        rules = "\n".join(_OPEN if line == _SHUT else line for line in lines)
        self._rules.write_text(rules + "\n")
        super().__init__("--aclfile", str(self._rules), "--enable-debug-command", "yes")

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._rules.unlink()
        self._rules.parent.rmdir()

    @property
    def url(self) -> str:
        return f"unix://warmroute:change-me@{self.socket_path}"

    async def command(self, *arguments: str | bytes | float) -> Any:
        """Run one command as a user without limits."""
        url = f"unix://{self.socket_path}"
        client = command_client(
            RedisSettings(url=url, command_timeout_s=10.0, connect_timeout_s=10.0)
        )
        try:
            return await run_command(client, *arguments)
        finally:
            await client.aclose()

    async def keys_without_ttl(self) -> list[bytes]:
        """Return the keys that would live for ever."""
        keys = await self.command("KEYS", "*")
        return [key for key in keys if await self.command("PTTL", key) == -1]

    async def refusals(self) -> list[Any]:
        """Return what the server refused, as its ACL LOG tells."""
        found: list[Any] = await self.command("ACL", "LOG")
        return found
