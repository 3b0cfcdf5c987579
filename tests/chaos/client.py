"""Clients of two tenants that talk on and on, leave at all points, and keep a ledger.

Conversations grow turn by turn. Each request has a nonce that nobody else has, and the ledger line
tells how it ended, what its replica proved, and what its client could have known to be cached.
"""

from __future__ import annotations

import asyncio
import enum
import json
import random
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from chaos.evidence import ClientLine, End, read_answer, read_stream
from chaos.speech import BLOCK_TOKENS, MODEL, PATH, rendered
from chaos.wire import CutError, Wire, request_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEADLINE_S: Final = 40.0
MOST_TURNS: Final = 5
UNREPEATABLE_SHARE: Final = 0.05
LEAVE_SHARE: Final = 0.05
SYSTEM_WORDS: Final = 150
PROMPTS_KEPT: Final = 20_000
HEADS_KEPT: Final = 250_000
"""More blocks of a tenant than all replicas of the rig hold together."""
WORDS: Final = ("cache", "prefix", "router", "replica", "block", "token", "queue", "lease", "fleet")


class Leaving(enum.StrEnum):
    """Ways in which a client goes away."""

    HALF_BODY = "in the middle of its own body"
    NO_HEAD = "before the head"
    IN_STREAM = "in the middle of a stream"
    RESET = "in the middle of a stream, with a reset"
    HALF_CLOSE = "with a half-close before the answer"


@dataclass(slots=True)
class Tenant:
    """Whose requests these are. ``_heads`` counts the prompts that begin with the same blocks."""

    name: str
    key: str
    canary: str
    _heads: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def own_prefix_tokens(self, prompt: bytes) -> int:
        """Return how many leading tokens (bytes) a noted prompt shares, in blocks, with others."""
        blocks = 0
        for head in _heads(prompt):
            if self._heads.get(head, 0) < 2:
                break
            blocks += 1
        return blocks * BLOCK_TOKENS

    def note(self, prompt: bytes) -> None:
        """Remember a prompt; the heads that nobody used for longest are forgotten."""
        for head in _heads(prompt):
            self._heads[head] = self._heads.get(head, 0) + 1
            self._heads.move_to_end(head)
        while len(self._heads) > HEADS_KEPT:
            self._heads.popitem(last=False)


def _heads(prompt: bytes) -> Iterator[int]:
    """Yield a number for each beginning of a prompt that is whole blocks, the shortest first."""
    head = 0
    for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
        head = hash((head, prompt[end - BLOCK_TOKENS : end]))
        yield head


@dataclass(slots=True)
class Shape:
    """What requests are like; a fault may change it for a while."""

    rate_hz: float = 20.0
    leave_share: float = LEAVE_SHARE
    hot_share: float = 0.0
    slow_reader_share: float = 0.03


class Crowd:
    """Sends ``shape.rate_hz`` requests a second to the routers at ``ports``, in turn."""

    def __init__(
        self, ports: Callable[[int], int], tenants: list[Tenant], key: bytes, seed: int
    ) -> None:
        self._ports = ports
        self.tenants = tenants
        self._key = key
        self._rng = random.Random(seed)
        self._talks: list[tuple[Tenant, list[dict[str, Any]]]] = []
        self.shape = Shape()
        self.ledger: list[ClientLine] = []
        self.prompts: OrderedDict[str, bytes] = OrderedDict()
        self.phase = "start"
        self._count = 0
        self.routers = 2

    # Making requests.

    def nonce(self) -> str:
        """Return a canary that nobody had."""
        return f"zq{self._rng.getrandbits(56):014x}"

    def new_talk(self, tenant: Tenant) -> tuple[Tenant, list[dict[str, Any]]]:
        """Begin a conversation with the tenant's system prompt and one more of its own."""
        rng = random.Random(tenant.name)
        words = " ".join(rng.choices(WORDS, k=SYSTEM_WORDS))
        system = {"role": "system", "content": f"{words} {tenant.canary}"}
        own = " ".join(self._rng.choices(WORDS, k=60))
        return tenant, [system, {"role": "user", "content": own}]

    def draw(self) -> tuple[Tenant, list[dict[str, Any]]]:
        """Return a conversation to go on with."""
        if self._rng.random() < self.shape.hot_share or len(self._talks) < 8:
            talk = self.new_talk(self._rng.choice(self.tenants))
            self._talks = [*self._talks[-30:], talk]
            return talk
        talk = self._rng.choice(self._talks)
        if len(talk[1]) > 2 * MOST_TURNS:
            self._talks.remove(talk)
        return talk

    def line(
        self,
        talk: tuple[Tenant, list[dict[str, Any]]],
        *,
        router: int | None = None,
        is_stream: bool | None = None,
        pieces: int | None = None,
        extra: str = "",
    ) -> tuple[ClientLine, bytes, list[dict[str, Any]]]:
        """Return a ledger line, the body to send and the messages in it."""
        tenant, said = talk
        self._count += 1
        rng, nonce = self._rng, self.nonce()
        stream = rng.random() < 0.6 if is_stream is None else is_stream
        wanted = rng.randint(4, 14) if pieces is None else pieces
        request = f"r{self._count}"
        mark = f"[id={request} tenant={tenant.name} nonce={nonce}]"
        messages = [*said, {"role": "user", "content": f"{extra}{mark}"}]
        is_repeatable = rng.random() >= UNREPEATABLE_SHARE
        body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": wanted}
        body |= {"stream": stream} | ({} if is_repeatable else {"n": 2})
        prompt = rendered(messages)
        line = ClientLine(
            request=request,
            tenant=tenant.name,
            router=self._count % self.routers if router is None else router,
            nonce=nonce,
            is_stream=stream,
            began_s=time.monotonic(),
            is_repeatable=is_repeatable,
            wanted_pieces=wanted,
            prompt=prompt,
            phase=self.phase,
        )
        tenant.note(prompt)
        self.prompts[request] = prompt
        if len(self.prompts) > PROMPTS_KEPT:
            self.prompts.popitem(last=False)
        self.ledger.append(line)
        return line, json.dumps(body).encode(), messages

    # Sending them.

    async def run(self, tasks: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        """Send until told to stop; requests end in ``tasks``."""
        due_s = time.monotonic()
        while not stop.is_set():
            tasks.create_task(self.one())
            due_s = max(due_s + self._rng.expovariate(self.shape.rate_hz), time.monotonic() - 0.5)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def one(self) -> None:
        """Send one request, or a pipelined pair, the way that the dice say."""
        rng = self._rng
        talk = self.draw()
        if rng.random() < self.shape.leave_share:
            await self.leave(talk, rng.choice(list(Leaving)))
        elif rng.random() < 0.03:
            await self.pair()
        else:
            slow = rng.random() < self.shape.slow_reader_share
            await self.ask(talk, pause_s=0.05 if slow else 0.0)

    async def ask(
        self,
        talk: tuple[Tenant, list[dict[str, Any]]] | None = None,
        *,
        pause_s: float = 0.0,
        **about: Any,
    ) -> ClientLine:
        """Send one request and read its answer to the end."""
        talk = talk or self.draw()
        line, body, messages = self.line(talk, **about)
        received = bytearray()
        wire = None
        try:
            async with asyncio.timeout(DEADLINE_S):
                wire = await Wire.open(self._ports(line.router))
                wire.send(self._request(line, talk[0], body))
                await self._receive(wire, line, received, pause_s)
        except CutError as error:
            line.end, line.error_code = End.CLOSED, str(error)
        except TimeoutError:
            line.end = End.HUNG
        finally:
            if wire is not None:
                wire.close()
        self._judge(line, bytes(received))
        if line.end is End.COMPLETE and line.is_repeatable and len(talk[1]) == len(messages) - 1:
            answer = {"role": "assistant", "content": line.nonce * 2}
            talk[1][:] = [*messages, answer]
        return line

    async def pair(self) -> None:
        """Send two requests at once on one connection, which takes them in turn."""
        talks = [self.draw(), self.draw()]
        lines = [self.line(talk, router=self._count % self.routers) for talk in talks]
        for line, _, _ in lines[1:]:
            line.router = lines[0][0].router
        wire, bodies = None, [bytearray(), bytearray()]
        try:
            async with asyncio.timeout(DEADLINE_S):
                wire = await Wire.open(self._ports(lines[0][0].router))
                wire.send(
                    b"".join(
                        self._request(line, talk[0], body)
                        for talk, (line, body, _) in zip(talks, lines, strict=True)
                    )
                )
                for (line, _, _), received in zip(lines, bodies, strict=True):
                    await self._receive(wire, line, received, 0.0)
        except (CutError, TimeoutError) as error:
            end = End.CLOSED if isinstance(error, CutError) else End.HUNG
            for position, (line, _, _) in enumerate(lines):
                if line.ended_s == float("inf"):
                    # What follows an answer that closed its connection was never taken.
                    line.end = end if position == 0 or end is End.HUNG else End.LEFT
        finally:
            if wire is not None:
                wire.close()
        for (line, _, _), received in zip(lines, bodies, strict=True):
            self._judge(line, bytes(received))

    async def leave(
        self, talk: tuple[Tenant, list[dict[str, Any]]], means: Leaving, router: int | None = None
    ) -> None:
        """Send a request and go away."""
        in_stream = means in (Leaving.IN_STREAM, Leaving.RESET)
        line, body, _ = self.line(
            talk, is_stream=in_stream, pieces=30 if in_stream else None, router=router
        )
        line.end = End.LEFT
        received = bytearray()
        wire = None
        try:
            async with asyncio.timeout(DEADLINE_S):
                wire = await Wire.open(self._ports(line.router))
                data = self._request(line, talk[0], body)
                wire.send(data[: len(data) - len(body) // 2] if means is means.HALF_BODY else data)
                if in_stream:
                    head = await wire.head()
                    line.status = head.status
                    async for part in wire.body(head):
                        received += part
                        if len(received) > 400:
                            break
                else:
                    if means is Leaving.HALF_CLOSE:
                        wire.half_close()
                    await asyncio.sleep(self._rng.uniform(0.0, 0.05))
        except (CutError, TimeoutError):
            pass
        finally:
            if wire is not None:
                wire.reset() if means is Leaving.RESET else wire.close()
        self._judge(line, bytes(received))

    def _request(self, line: ClientLine, tenant: Tenant, body: bytes) -> bytes:
        fields = {
            "Authorization": f"Bearer {tenant.key}",
            "Content-Type": "application/json",
            "X-Request-Id": line.request,
        }
        return request_bytes(PATH, body, fields)

    async def _receive(
        self, wire: Wire, line: ClientLine, received: bytearray, pause_s: float
    ) -> None:
        head = await wire.head()
        line.status = head.status
        async for part in wire.body(head):
            if line.first_byte_s is None:
                line.first_byte_s = time.monotonic() - line.began_s
            received += part
            if pause_s:
                await asyncio.sleep(pause_s)
        line.ended_s = time.monotonic()
        line.end = End.COMPLETE if head.status == 200 else End.HTTP_ERROR

    def _judge(self, line: ClientLine, body: bytes) -> None:
        """Set what the bytes prove, and how the request ended after all."""
        line.ended_s = min(line.ended_s, time.monotonic())
        # At the end: what was written down later may have come to a router earlier.
        tenant = next(one for one in self.tenants if one.name == line.tenant)
        line.own_prefix_tokens = tenant.own_prefix_tokens(line.prompt)
        line.prompt = b""
        is_events = line.is_stream and line.status == 200
        if is_events:
            reading = read_stream(body, self._key, line.nonce)
        elif line.end in (End.COMPLETE, End.HTTP_ERROR):
            reading = read_answer(body, self._key, line.nonce)
        else:
            return
        line.pieces, line.says_done = reading.pieces, reading.says_done
        line.attempts = tuple(reading.attempts)
        line.error_code = reading.error_code or line.error_code
        line.faults = tuple(reading.faults)
        if line.end is End.LEFT:
            return
        if is_events and reading.error_code:
            line.end = End.ERROR_EVENT
        elif is_events and not reading.says_done:
            if line.end is End.COMPLETE:
                line.faults = (*line.faults, "a stream that ended well without its end")
            line.end = End.CLOSED
