"""Fleets of workers that can be restarted where they were, and what routers do to warm them."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from support.fleet import MODEL, START_S, LocalFleet, Replica, Router, until
from support.port import free_ports

if TYPE_CHECKING:
    from collections.abc import Mapping

BLOCK_TOKENS: Final = 64
PRINTABLE: Final = range(32, 127)
"""Ids that the bundled models know."""
ARRIVALS: Final = 6
"""Requests after which a prefix is kept, with some to spare."""
WARM: Final[dict[str, Any]] = {"enabled": True, "step_tokens": 512, "seconds": 600.0}
ENDS_S: Final = 300.0
"""Within so long a job ends, whoever else has the processor."""
CONFIG: Final[dict[str, Any]] = {
    "receipts": True,
    "warm_up": WARM,
    "hot_prefix": {"min_prefix_tokens": 128, "half_life_s": 600.0},
}


def tokens_of(name: str, count: int) -> list[int]:
    """Return token ids that no other name has."""
    draw = random.Random(name)
    return [draw.choice(PRINTABLE) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Got:
    """Who answered, what was predicted and what the engine had; tokens of the prompt."""

    replica: str
    predicted_tokens: int
    cached_tokens: int
    prompt_tokens: int


class WarmFleet(LocalFleet):
    """Workers on ports of their own; ``start_engines`` after it was entered without any."""

    async def start_engines(self, count: int, *flags: str, peers: bool = False) -> None:
        """Start workers and sidecars; with ``peers`` they fetch pages from each other."""
        self.ports = free_ports(count)
        self.flags = list(flags)
        if peers:
            urls = ",".join(f"http://127.0.0.1:{port}" for port in self.ports)
            self.flags += ["--transfer-port", "0", "--transfer-peers", urls, "--fetch", "always"]
        workers = [self.worker_at(index) for index in range(count)]
        for index, worker in enumerate(workers):
            await worker.ready(START_S)
            sidecar = await self.start_sidecar(f"w{index}", worker.words[0]).ready(START_S)
            self.replicas.append(Replica(f"w{index}", worker, sidecar))

    def worker_at(self, index: int) -> Any:
        """Start the worker of that number on its port."""
        port = str(self.ports[index])
        return self.start_worker(f"w{index}", *self.flags, "--port", port)

    async def add_router(self, **config: Any) -> Router:
        """Start a router and wait until it sees all workers."""
        router = await self.start_router(**{**CONFIG, **config})
        self.routers.append(router)
        await self.all_up(router, len(self.replicas))
        return router

    async def restart(self, index: int) -> None:
        """Kill a worker and start another one in its place; its sidecar goes on."""
        replica = self.replicas[index]
        before = {id(one): await self.life(replica.name, one) for one in self.routers}
        replica.worker.process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(replica.worker.process.wait, 20)
        replica.worker = await self.worker_at(index).ready(START_S)

        for router in self.routers:

            async def is_new(router: Router = router) -> bool:
                seen = (await self.seen(router)).get(replica.name)
                return bool(
                    seen and seen["up"] and seen["generation"] not in (None, before[id(router)])
                )

            await until(is_new, f"another life of {replica.name}")

    async def life(self, name: str, router: Router) -> str | None:
        """Return the generation of a replica as a router knows it."""
        generation: str | None = (await self.seen(router))[name]["generation"]
        return generation

    async def ask(
        self,
        prompt: list[int],
        router: Router | None = None,
        max_tokens: int = 1,
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Got:
        """Send a prompt of token ids, and wait for its answer."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, **fields}
        url = f"{(router or self.router).url}/v1/completions"
        async with self.http.post(url, data=json.dumps(body), headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            told = await answer.json()
            predicted = answer.headers["x-warmroute-predicted-cached-tokens"]
            details = told["usage"]["prompt_tokens_details"] or {}
            return Got(
                answer.headers["x-warmroute-replica"],
                int(predicted),
                int(details.get("cached_tokens") or 0),
                int(told["usage"]["prompt_tokens"]),
            )

    async def make_hot(
        self, prefix: list[int], router: Router | None = None, times: int = ARRIVALS, **more: Any
    ) -> list[Got]:
        """Send prompts that share ``prefix`` and nothing else."""
        prompts = [prefix + tokens_of(f"{prefix[:4]}{at}", 70) for at in range(times)]
        return [await self.ask(prompt, router, **more) for prompt in prompts]

    async def warm_ups(self, router: Router | None = None) -> dict[str, Any]:
        """Return what a router tells of its warm-ups."""
        url = (router or self.router).admin_url
        told: dict[str, Any] = await self.get(f"{url}/admin/warmup")
        return told

    async def kept(self, prefixes: int, router: Router | None = None) -> None:
        """Wait until a router keeps at least so many prefixes."""

        async def is_so() -> bool:
            return int((await self.warm_ups(router))["kept_prefixes"]) >= prefixes

        await until(is_so, f"{prefixes} prefixes are kept")

    async def job(
        self, kind: str, replica: str, router: Router | None = None, *, ended: bool = True
    ) -> dict[str, Any]:
        """Wait for the newest job of a kind, and for its end; return it."""
        found: dict[str, Any] = {}

        async def is_there() -> bool:
            jobs = (await self.warm_ups(router))["jobs"]
            rows = [row for row in jobs if (row["kind"], row["replica"]) == (kind, replica)]
            if not rows or (ended and not rows[0]["end"]):
                return False
            found.update(rows[0])
            return True

        await until(is_there, f"the {kind} of {replica}", ENDS_S)
        return found

    async def computed(self, index: int) -> int:
        """Return how many prompt tokens a worker has computed in its life."""
        gauges = await self.gauges(self.replicas[index].url)
        asked = gauges["vllm:prompt_tokens_total"]
        return int(asked - gauges["vllm:prefix_cache_hits_total"])

    async def holders(self, prompt: list[int]) -> dict[str, int]:
        """Return what each worker has of a prompt, by what its own cache answers."""
        found = {}
        for replica in self.replicas:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
            url = f"{replica.url}/v1/completions"
            async with self.http.post(url, data=json.dumps(body)) as answer:
                usage = (await answer.json())["usage"]
            found[replica.name] = int(
                (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            )
        return found
