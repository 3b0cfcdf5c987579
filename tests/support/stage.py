"""A router process in front of replicas that follow scripts in the test's own process."""

from __future__ import annotations

import contextlib
import json
import resource
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from support.fleet import MODEL, FleetPlan, LocalFleet
from support.raw import DONE, LAST, SSE, FakeReplica, RawClient, Received, Reply, Talk, chunk, sized

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    Answer = Callable[[Talk, Received], Awaitable[None]]

SOCKETS = 8192
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
ANSWER = sized(b'{"object":"chat.completion","choices":[]}')


def chat_body(text: str = "hello", *, stream: bool = True, **fields: Any) -> bytes:
    """Return a chat request's body."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": stream}
    return json.dumps(body | fields).encode()


def post_to(body: bytes, path: str = "/v1/chat/completions", **headers: str) -> bytes:
    """Return a POST request; underscores in header names become dashes."""
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()]
    head = f"POST {path} HTTP/1.1\r\nHost: router\r\nContent-Length: {len(body)}\r\n"
    return (head + "".join(lines) + "\r\n").encode() + body


def allow_sockets() -> None:
    """Let this process, and those that it starts, have thousands of sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = SOCKETS if hard == resource.RLIM_INFINITY else min(SOCKETS, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


async def answer_at_once(talk: Talk, _: Received) -> None:
    """Answer with a small JSON body."""
    await talk.say(ANSWER)


async def stream_two_events(talk: Talk, _: Received) -> None:
    """Answer with a short stream."""
    await talk.say(SSE + chunk(EVENT) + chunk(EVENT) + chunk(DONE) + LAST)


@dataclass(slots=True, eq=False)
class Actor:
    """One scripted replica. ``answer`` serves whatever is no health check or model list."""

    name: str
    model: str = MODEL
    answer: Answer = answer_at_once
    is_healthy: bool = True
    replica: FakeReplica = field(init=False)
    url: str = ""

    def __post_init__(self) -> None:
        self.replica = FakeReplica(self.play)

    async def play(self, talk: Talk) -> None:
        """Serve one connection."""
        models = json.dumps({"object": "list", "data": [{"id": self.model, "object": "model"}]})
        while True:
            received = await talk.request()
            path = received.line.split(b" ")[1]
            if path == b"/health":
                status = b"200 OK" if self.is_healthy else b"500 Internal Server Error"
                await talk.say(sized(b"{}", status=status))
            elif path == b"/v1/models":
                await talk.say(sized(models.encode()))
            else:
                await self.answer(talk, received)

    def posts(self) -> list[Received]:
        """Return the requests that came, without health checks."""
        return [one for one in self.replica.requests if one.line.startswith(b"POST")]


@dataclass(slots=True)
class Stage:
    """The router and its scripted replicas."""

    fleet: LocalFleet
    actors: list[Actor]
    clients: list[RawClient] = field(default_factory=list)

    def reset(self) -> None:
        """Forget what a test set up, and let its clients leave."""
        for client in self.clients:
            client.abort()
        self.clients.clear()
        for actor in self.actors:
            actor.answer = answer_at_once
            actor.is_healthy = True
            actor.replica.requests.clear()

    def cast(self, answer: Answer) -> None:
        """Let every replica give this answer."""
        for actor in self.actors:
            actor.answer = answer

    def posts(self) -> list[Received]:
        """Return the requests that any replica got."""
        return [one for actor in self.actors for one in actor.posts()]

    async def client(self) -> RawClient:
        """Return a new client of the router."""
        client = await RawClient.connect(self.fleet.router.port)
        self.clients.append(client)
        return client

    async def ask(self, request: bytes, *, bodiless: bool = False) -> Reply:
        """Send one request on a connection of its own and return the response."""
        client = await self.client()
        client.send(request)
        reply = await client.reply(bodiless=bodiless)
        await client.close()
        return reply


@contextlib.asynccontextmanager
async def staged_router(
    directory: Path,
    actors: list[Actor],
    tokenizer: Path | None = None,
    *,
    router_flags: tuple[str, ...] = (),
    router_prefix: tuple[str, ...] = (),
    **config: Any,
) -> AsyncIterator[Stage]:
    """Start the actors and a router that knows them by its configuration."""
    for actor in actors:
        endpoint = await actor.replica.start()
        actor.url = f"http://{endpoint.authority}"
    replicas = [{"url": actor.url, "name": actor.name} for actor in actors]
    settings = {
        "replicas": replicas,
        "attend_sidecars": False,  # their scripts know the router's own questions only
        "health": {"interval_s": 0.1},
        "receipts": True,
        **config,
    }
    plan = FleetPlan(
        replicas=0,
        tokenizer=tokenizer,
        router_flags=router_flags,
        router_prefix=router_prefix,
        config=settings,
    )
    try:
        async with LocalFleet(directory, plan) as fleet:
            stage = Stage(fleet, actors)
            yield stage
            stage.reset()
    finally:
        for actor in actors:
            await actor.replica.stop()
