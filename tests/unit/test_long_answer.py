"""What an answer that goes on for long lets go of, and what stays known of it."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from policies.model import Candidate, Decision, Reason, ReplicaView
from prompt.model import PromptTokens, ReadPrompt
from prompt.run import RunTokens, TokenRun
from router.account import Call
from router.chooser import Choice
from router.long_answer import MOST_BYTES, lighten
from router.quarantine import Quarantine, QuarantineSettings
from router.watch import SLICE_LEAST, Watch
from state.model import BlockId, ReplicaId
from state.prefix import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

A, B = ReplicaId("a"), ReplicaId("b")
IDS = pack_tokens(range(300))
ROOT = BlockId(b"r" * 16)


class Looked:
    """What is watched, known by itself."""

    def __init__(self, look: Callable[[float], None]) -> None:
        self.look = look
        self.asked = 0

    def lighten(self, _: float) -> bool:
        """Let go when asked for the second time."""
        self.asked += 1
        return self.asked > 1


def call_of(body: bytes) -> tuple[Call, list[str], Any]:
    call = Call(
        request_id="r", client_request_id=None, path="/v1/completions", started_s=0.0,
        started_unix_s=0.0,
    )  # fmt: skip
    call.body = body
    prompt = ReadPrompt(
        model="m",
        is_stream=True,
        prompts=(
            PromptTokens(packed=IDS, is_exact=True),
            PromptTokens(run=RunTokens(TokenRun().extended(0, IDS), 200, IDS[:40]), is_exact=True),
        ),
        shadows=(PromptTokens(packed=IDS[:8], is_exact=False),),
        head=PromptTokens(packed=IDS[:16], is_exact=True),
    )
    call.routed = cast("Any", SimpleNamespace(prompt=prompt))
    lightened: list[str] = []
    connection = SimpleNamespace(lighten=lambda: lightened.append("connection"))
    return call, lightened, SimpleNamespace(connection=connection)


def let_go(
    call: Call, request: Any, quarantine: Quarantine | None = None, *, keeps_ids: bool
) -> Choice:
    """Return the choice of a call that let go of what it can."""
    views, scored = (ReplicaView(B),), (Candidate(B, 1.0, {"wait": 1.0}, 0),)
    choice = Choice(*[cast("Any", None)] * 7)  # what it took is of no interest here
    choice.views, choice.decision = views, Decision(B, Reason.LOAD, 0, scored)
    known = quarantine or Quarantine(QuarantineSettings(), b"s" * 32)
    lighten(call, request, choice, known, keeps_ids=keeps_ids)
    return choice


def test_body_and_ids_go_and_their_number_stays() -> None:
    call, lightened, request = call_of(b"body")
    choice = let_go(call, request, keeps_ids=False)
    assert (call.body, lightened) == (b"", ["connection"])
    assert (request.headers.received, choice.views, choice.decision.candidates) == ((), (), ())
    assert call.routed is not None
    prompt = call.routed.prompt
    assert [tokens.count for tokens in prompt.prompts] == [300, 210]
    assert [(tokens.count, tokens.is_exact) for tokens in prompt.shadows] == [(2, False)]
    assert prompt.head is not None
    assert prompt.head.count == 4
    for tokens in (*prompt.prompts, *prompt.shadows, prompt.head):
        with pytest.raises(LookupError):
            tokens.chain(ROOT, 64, 0)
        with pytest.raises(LookupError):
            _ = tokens.packed
    let_go(call, request, keeps_ids=False)
    assert lightened == ["connection"]


def test_the_ids_stay_where_somebody_looks_at_them_at_the_end() -> None:
    call, lightened, request = call_of(b"body")
    let_go(call, request, keeps_ids=True)
    assert (call.body, lightened) == (b"", ["connection"])
    assert call.routed is not None
    assert call.routed.prompt.prompts[0].packed == IDS


def test_a_request_without_its_body_is_suspect_and_cleared_like_one_with_it() -> None:
    quarantine = Quarantine(QuarantineSettings(), b"s" * 32)
    call, _, request = call_of(b"body")
    let_go(call, request, quarantine, keeps_ids=False)
    assert call.key == quarantine.key(call.path, b"body")
    for replica in (A, B):
        quarantine.suspect(replica, call.key, 1.0)
        quarantine.died(replica, 2.0)
    assert quarantine.left_s(call.path, b"body", 3.0) is not None
    quarantine.clear(call.path, call.body, call.key)
    assert quarantine.left_s(call.path, b"body", 3.0) is None


def test_a_body_that_takes_long_to_digest_stays() -> None:
    body = bytes(MOST_BYTES + 1)
    call, lightened, request = call_of(body)
    let_go(call, request, keeps_ids=False)
    assert (call.body is body, call.key, lightened) == (True, None, [])


async def test_a_look_at_many_exchanges_gives_way_to_others() -> None:
    """Each look takes a millisecond here: no more than one slice of them fits into a turn."""
    watch, turns, seen = Watch(0.001), [0], asyncio.Event()

    def look(_: float) -> None:
        time.sleep(0.0011)
        turns[-1] += 1
        if sum(turns) == len(watched):
            seen.set()

    watched = [Looked(look) for _ in range(4 * SLICE_LEAST)]
    for one in watched:
        watch.add(cast("Any", one))
    while not seen.is_set():
        await asyncio.sleep(0)
        turns.append(0)
    watch.close()
    assert max(turns) == SLICE_LEAST


async def test_what_has_ended_since_the_look_began_is_not_looked_at() -> None:
    watch, looked, begun = Watch(0.001), [], asyncio.Event()
    watched: list[Any] = []

    def look(now_s: float) -> None:
        looked.append(now_s)
        begun.set()
        for one in watched:
            watch.discard(one)

    watched += [Looked(look) for _ in range(3)]
    for one in watched:
        watch.add(one)
    await begun.wait()
    watch.close()
    assert len(looked) == 1


async def test_what_has_let_go_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.watch.LIGHTEN_S", 0.001)
    watch, looks, seen = Watch(0.001), [0], asyncio.Event()

    def look(_: float) -> None:
        looks[0] += one.asked > 1
        if looks[0] > 20:
            seen.set()

    one = Looked(look)
    watch.add(cast("Any", one))
    await seen.wait()
    watch.discard(cast("Any", one))
    watch.close()
    assert one.asked == 2
