"""Real workers with tiers below their pool: prompts, answers and what the tiers tell."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from sidecar.setting import WorkerSettings
from support.worker import get_text

if TYPE_CHECKING:
    from support.worker import RunningWorker

MODEL: Final = "tiny"
PAGE_TOKENS: Final = 16
SOURCE_HEADER: Final = "X-Warmroute-Kv-Source"
_PRINTABLE: Final = range(32, 127)


class Answer(Struct, frozen=True):
    """What one completion said, and how much of its prompt was not computed."""

    token_ids: list[int]
    cached_tokens: int


def settings_of(**changes: Any) -> WorkerSettings:
    """Return settings of the built-in model on one thread."""
    base: dict[str, Any] = {"model": MODEL, "page_tokens": PAGE_TOKENS, "threads": 1}
    return WorkerSettings(**base | changes)


def prompt_of(seed: int, tokens: int = 128) -> list[int]:
    """Return a prompt that shares no page with that of another seed."""
    rng = random.Random(seed)
    return [rng.choice(_PRINTABLE) for _ in range(tokens)]


def complete(
    worker: RunningWorker, prompt: list[int], source: str | None = None, *, max_tokens: int = 6
) -> Answer:
    """Return the greedy answer; ``source`` is where pages may be fetched."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    if source is not None:
        headers[SOURCE_HEADER] = source
    request = urllib.request.Request(  # noqa: S310 - http
        f"{worker.url}/v1/completions",
        json.dumps(body | {"return_token_ids": True, "ignore_eos": True}).encode(),
        headers,
    )
    with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310 - http
        answer = json.loads(response.read())
    details = answer["usage"]["prompt_tokens_details"]
    return Answer(answer["choices"][0]["token_ids"], details["cached_tokens"])


def tiers_of(worker: RunningWorker) -> dict[str, dict[str, Any]]:
    """Return ``/debug/kv`` by tier."""
    return {tier["tier"]: tier for tier in json.loads(get_text(worker, "/debug/kv"))["tiers"]}


def written_down(worker: RunningWorker, within_s: float = 60.0) -> dict[str, dict[str, Any]]:
    """Wait until the disk has every page that came to the host; return the tiers."""
    start_s = time.monotonic()
    while True:
        tiers = tiers_of(worker)
        host, disk = tiers["host"], tiers["disk"]
        if disk["moved_in_bytes"] == host["moved_in_bytes"]:
            return tiers
        assert time.monotonic() - start_s < within_s, tiers


def until_on_disk(worker: RunningWorker, pages: int, within_s: float = 60.0) -> None:
    """Wait until the disk has so many pages."""
    start_s = time.monotonic()
    while (states := tiers_of(worker)["disk"]["states"])["evictable"] < pages:
        assert time.monotonic() - start_s < within_s, states
