"""Chats about images with a real vLLM that sees: who has what of them, and what is predicted.

``make test-vllm WARMROUTE_VLLM=/path/to/vllm``.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec import Struct

from prompt.codec import load_codec
from prompt.likeness import media_prompt
from prompt.request import decode_chat
from support.media_engine import ask_engine
from support.sighted import IMAGE_MARK, linked, picture, png, text, user, write_sighted_model
from support.vllm import MODEL, PAGE_TOKENS, vllm_command
from support.vllm_stand import MARKS, OUTPUT_TOKENS, PAGES, open_stand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

    from support.sighted import Json
    from support.vllm_stand import Stand

pytestmark = MARKS

TALKS: Final = 24
SHAPES: Final = ((64, 64), (96, 48), (120, 30), (40, 80))
FOLLOWERS: Final = (
    ("a first image", "a second turn"),
    ("a second turn", "an image in a later turn"),
    ("a second turn", "another one in that turn"),
    ("an image in a later turn", "that turn again, two answers"),
    ("the same image twice", "the same image twice, again"),
)
"""What goes where its images were."""
HEAD_SLACK: Final = 4
"""Tokens before an image that might belong to what comes in its place."""
WORDS: Final = ("the", "quick", "brown", "fox", "jumps", "naïve", "你好", "replicas", "cache", "🦙")


class Told(Struct, frozen=True):
    """What the router said of a request before it was sent, and the engine afterwards."""

    replica: str
    predicted_tokens: int
    cached_tokens: int
    prompt_tokens: int
    is_exact: bool
    answer: str

    @property
    def is_to_the_page(self) -> bool:
        """Whether they said the same."""
        return self.predicted_tokens // PAGE_TOKENS == self.cached_tokens // PAGE_TOKENS


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sighted(tmp_path_factory: pytest.TempPathFactory, vllm: Path) -> AsyncIterator[Stand]:
    """Two engines whose model sees, before one router."""
    folder = tmp_path_factory.mktemp("sighted")
    model = write_sighted_model(folder / "model", vllm)
    limit = ("--limit-mm-per-prompt", json.dumps({"image": 4}))
    async with open_stand(folder, vllm_command(vllm, model, PAGES, *limit), model) as stand:
        yield stand


async def ask(stand: Stand, messages: list[Json], **fields: Any) -> Told:
    """Send a chat through the router that knows all news."""
    await stand.informed()
    body = {"model": MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS, **fields}
    told = await ask_engine(stand.fleet.http, stand.fleet.router.url, body)
    record = await stand.fleet.decision(told["x-warmroute-request-id"])
    usage = told["usage"]
    return Told(
        told["x-warmroute-replica"],
        int(told["x-warmroute-predicted-cached-tokens"]),
        (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        usage["prompt_tokens"],
        record["is_exact"],
        told["choices"][0]["message"]["content"],
    )


def said(rng: random.Random, least: int, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def seen(rng: random.Random) -> Json:
    return picture(rng.randrange(1 << 24), *rng.choice(SHAPES))


def then(messages: list[Json], told: Told, *parts: Json) -> list[Json]:
    return [*messages, {"role": "assistant", "content": told.answer}, user(*parts)]


async def told_in_a_talk(stand: Stand, rng: random.Random) -> dict[str, Told]:
    """Ask nine things of one conversation that nobody had before; return what was told of each."""
    cat, dog, bird = seen(rng), seen(rng), seen(rng)
    rules = {"role": "system", "content": said(rng, 40, 120)}
    asked = text(said(rng, 10, 80))
    first = [rules, user(asked, cat)]
    told = {"a first image": await ask(stand, first)}
    told["the same text, another image"] = await ask(stand, [rules, user(asked, dog)])
    told["the same text, no image"] = await ask(stand, [rules, user(asked)])
    second = then(first, told["a first image"], text(said(rng, 5, 20)))
    told["a second turn"] = await ask(stand, second)
    more = text(said(rng, 5, 20))
    third = then(second, told["a second turn"], more, bird)
    other = then(second, told["a second turn"], more, seen(rng))
    told["an image in a later turn"] = await ask(stand, third)
    told["another one in that turn"] = await ask(stand, other)
    told["that turn again, two answers"] = await ask(stand, third, n=2)
    twice = [rules, user(asked, cat, text("and"), cat)]
    told["the same image twice"] = await ask(stand, twice)
    told["the same image twice, again"] = await ask(stand, twice)
    return told


async def test_what_is_predicted_of_two_hundred_requests_with_images(sighted: Stand) -> None:
    """To the page where text comes before all that is new; never more than the engine had there."""
    rng = random.Random(7)
    kinds: defaultdict[str, list[Told]] = defaultdict(list)
    talks = [await told_in_a_talk(sighted, rng) for _ in range(TALKS)]
    for told in talks:
        for kind, one in told.items():
            kinds[kind].append(one)
    print("\n".join(map(summary, kinds, kinds.values())))  # noqa: T201 - the result, shown with -rP
    for told in talks:
        check_talk(told)
    assert all(one.is_to_the_page for one in kinds["a first image"])
    assert all(one.is_to_the_page for one in kinds["the same text, no image"])
    near = kinds["the same text, another image"]
    assert sum(one.is_to_the_page for one in near) >= 0.8 * TALKS
    assert {one.replica for one in kinds["a first image"]} == {"v0", "v1"}


def summary(kind: str, told: list[Told]) -> str:
    """Return one row of the table in ``docs/vllm.md``."""
    right = sum(one.is_to_the_page for one in told)
    over = sum(one.predicted_tokens > one.cached_tokens for one in told)
    predicted = round(sum(one.predicted_tokens for one in told) / len(told))
    cached = round(sum(one.cached_tokens for one in told) / len(told))
    whole = round(sum(one.prompt_tokens for one in told) / len(told))
    warm = f"{right} of {len(told)} | {over}"
    return f"| {kind} | {warm} | {predicted} | {cached} | {whole} |"


def check_talk(told: dict[str, Told]) -> None:
    """Assert what holds of each talk."""
    first, other = told["a first image"], told["the same text, another image"]
    assert (first.predicted_tokens, first.cached_tokens) == (0, 0)
    for warm, follower in FOLLOWERS:
        assert told[warm].replica == told[follower].replica
    assert [kind for kind, one in told.items() if one.is_exact] == ["the same text, no image"]
    assert 0 <= other.cached_tokens - other.predicted_tokens <= PAGE_TOKENS
    second, third = told["a second turn"], told["an image in a later turn"]
    assert second.cached_tokens >= first.prompt_tokens - PAGE_TOKENS
    assert second.predicted_tokens > other.predicted_tokens
    assert third.cached_tokens >= second.prompt_tokens - PAGE_TOKENS
    another, again = told["another one in that turn"], told["that turn again, two answers"]
    assert again.cached_tokens > another.cached_tokens >= third.cached_tokens
    assert again.predicted_tokens > another.predicted_tokens
    assert told["the same image twice, again"].predicted_tokens > second.predicted_tokens


async def test_the_head_is_what_the_engine_computes_up_to_the_image(sighted: Stand) -> None:
    """Wherever the first image is; all ids before it but a few."""
    rng = random.Random(8)
    codec = load_codec(sighted.model)
    [mark] = memoryview(codec.text_tokens(IMAGE_MARK, add_special_tokens=False)).cast("I")
    rules = {"role": "system", "content": said(rng, 10, 40)}
    answer = {"role": "assistant", "content": said(rng, 5, 20)}
    asked, cat = text(said(rng, 10, 40)), seen(rng)
    for messages in (
        [user(cat)],
        [user(cat, asked)],
        [rules, user(asked, cat, asked, cat)],
        [rules, user(asked), answer, user(asked, asked, cat), answer, user(asked)],
    ):
        body = {"model": MODEL, "messages": messages}
        head = media_prompt(decode_chat(json.dumps(body).encode()), codec).head
        async with sighted.fleet.http.post(
            f"{sighted.engines.engines[0].url}/tokenize", json=body
        ) as told:
            ids = (await told.json())["tokens"]
        ours = [] if head is None else memoryview(head.packed).cast("I").tolist()
        assert ids[: len(ours)] == ours
        assert ids.index(mark) - HEAD_SLACK - 2 <= len(ours) <= ids.index(mark)


async def test_an_image_at_an_address_is_known_by_that_address(sighted: Stand) -> None:
    """Whoever serves it may serve another one, so no such prediction is called exact."""
    pictures = {"/a.png": png(64, 64, 1), "/b.png": png(64, 64, 1)}

    async def served(request: web.Request) -> web.Response:
        return web.Response(body=pictures[request.path], content_type="image/png")

    rules = {"role": "system", "content": "An image from elsewhere. " * 20}
    elsewhere = web.Application()
    elsewhere.router.add_get("/{name}", served)
    async with TestServer(elsewhere) as server:

        async def asked(name: str) -> Told:
            url = str(server.make_url(f"/{name}.png"))
            return await ask(sighted, [rules, user(linked(url), text("what?"))])

        first, again, copy = [await asked(name) for name in "aab"]
        pictures["/a.png"] = png(64, 64, 2)
        changed = await asked("a")
    assert {one.replica for one in (first, again, copy, changed)} == {first.replica}
    assert again.predicted_tokens > first.predicted_tokens == 0
    assert again.cached_tokens >= first.prompt_tokens - PAGE_TOKENS
    # The engine knows the image by its pixels: a copy is warm, and what changed is not.
    assert copy.cached_tokens == again.cached_tokens > copy.predicted_tokens
    assert changed.cached_tokens < again.cached_tokens
    assert changed.predicted_tokens == again.predicted_tokens
    assert not changed.is_exact
