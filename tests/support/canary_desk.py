"""An operator who looks after a canary, and the clients whose requests it splits."""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import TYPE_CHECKING, Any, Final

from support.fleet import MODEL, until
from support.setting_desk import SettingDesk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.fleet import LocalFleet, Router

SYSTEM: Final = "You are the same to everybody, and you say so at length. " * 40
CLIENTS: Final = 4
MOST_REQUESTS: Final = 1_500
_stories: Iterator[int] = itertools.count()


class CanaryDesk:
    """Asks one router of a fleet."""

    def __init__(self, fleet: LocalFleet, router: Router) -> None:
        self._fleet, self._router = fleet, router
        self.settings = SettingDesk(fleet, router)

    async def status(self) -> Any:
        """Return how the canary stands there."""
        return await self._fleet.get(f"{self._router.admin_url}/admin/canary")

    async def try_start(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Ask for a canary; return status and answer."""
        who = {"author": "ann@ops", "reason": "a try"}
        return await self.settings.post("/admin/canary", body | who)

    async def start(self, policy: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Start a canary."""
        status, told = await self.try_start({"policy": policy} | more)
        assert status == 200, told
        return dict(told)

    async def post(self, action: str, reason: str, **more: Any) -> tuple[int, Any]:
        """Promote or stop it."""
        body = {"author": "ann@ops", "reason": reason} | more
        return await self.settings.post(f"/admin/canary/{action}", body)

    async def run(self, *words: str) -> tuple[int, str]:
        """Run ``warmroute canary``; return its exit code and all that it told."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "warmroute", "canary", *words),
            *("--admin", self._router.admin_url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        told, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, told.decode()

    async def has_state(self, state: str, timeout_s: float = 60.0) -> None:
        """Wait until the canary stands so."""

        async def is_so() -> bool:
            return bool((await self.status())["state"] == state)

        await until(is_so, f"a canary that is {state}", timeout_s)

    async def has_counted(self, requests: int) -> bool:
        """Return whether so many requests are known here."""
        verdict = (await self.status())["verdict"]
        if verdict is None:
            return False
        return bool(verdict["control_requests"] + verdict["candidate_requests"] >= requests)


def conversation(story: str, turns: int = 1) -> dict[str, Any]:
    """Return the body of a turn of one conversation; they all begin with the same system prompt."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": story}]
    for turn in range(1, turns):
        messages += [
            {"role": "assistant", "content": f"answer {turn}"},
            {"role": "user", "content": f"and then, {turn}?"},
        ]
    return {"model": MODEL, "messages": messages, "max_tokens": 2, "ignore_eos": True}


async def talk(
    fleet: LocalFleet,
    requests: int = MOST_REQUESTS,
    *,
    until_over: CanaryDesk | None = None,
    routers: Sequence[Router] | None = None,
) -> None:
    """Send requests of conversations that are all new, in turn to each router.

    With ``until_over`` until the canary splits no more there, which has to come.
    """
    doors = itertools.cycle(routers or fleet.routers)
    left = iter(range(requests))
    is_over = False

    async def client() -> None:
        for _ in left:
            body, router = conversation(f"story {next(_stories)}"), next(doors)
            async with fleet.http.post(f"{router.url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
            if is_over:
                return

    async def watch(desk: CanaryDesk) -> None:
        nonlocal is_over
        while (await desk.status())["state"] == "running":  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.1)
        is_over = True

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    if until_over is None:
        await asyncio.gather(*clients)
        return
    watching = asyncio.create_task(watch(until_over))
    await asyncio.gather(*clients)
    watching.cancel()
    assert is_over, f"{requests} requests, and it goes on"
