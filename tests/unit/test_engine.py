"""The loop of the worker's engine."""

from __future__ import annotations

import asyncio
import time

from prompt.codec import load_codec
from sidecar.cache import PagedCache
from sidecar.clock import preset_cost
from sidecar.engine import Delta, Engine, EngineOptions, Generation, Halted
from sidecar.runner import Lexicon
from sidecar.scheduler import Scheduler, SchedulerLimits
from state.prefix import pack_tokens


async def test_a_request_that_left_before_the_engine_woke_up_does_not_stop_it() -> None:
    """A19: submitted and aborted in one turn of the event loop; the next request is answered."""
    engine = Engine(
        Scheduler(PagedCache(16, 4), SchedulerLimits()),
        Lexicon(load_codec(None)),
        EngineOptions(model="m", cost=preset_cost("instant")),
        lambda _: None,
        time.monotonic,
    )
    running = asyncio.create_task(engine.run())
    generation = Generation(packed_prompt=pack_tokens([1, 2, 3]), max_output_tokens=2)
    answered: asyncio.Queue[Delta | Halted] = asyncio.Queue()
    try:
        await asyncio.sleep(0)
        engine.abort(engine.submit(generation, lambda _: None))
        await asyncio.sleep(0)
        engine.submit(generation, answered.put_nowait)
        async with asyncio.timeout(5):
            first, last = await answered.get(), await answered.get()
        assert isinstance(first, Delta)
        assert isinstance(last, Delta)
        assert (first.finish, last.finish) == (None, "length")
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait([running])
