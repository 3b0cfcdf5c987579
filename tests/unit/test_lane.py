"""Large bodies: values are counted exactly, and only so many of them wait for their thread."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prompt.lane
from prompt.lane import LARGE_BODY_BYTES, Lane, LaneFullError, refuse_dense
from prompt.model import BadPromptError, PromptTokens
from prompt.reader import CHAT_PATH, PromptReader
from prompt.run import RunTokens, TokenRun
from state.model import BlockId
from state.prefix import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Generator

ROOT = BlockId(bytes(16))


def values_of(value: Any) -> int:
    """Return the brackets and commas that JSON has for ``value``, outside of texts."""
    if isinstance(value, list | dict):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(0, len(value) - 1) + sum(map(values_of, inner))
    return 0


TREES = st.recursive(
    st.one_of(st.integers(), st.text(max_size=5), st.text(alphabet='\\",{[', max_size=12)),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(tree=TREES, slice_bytes=st.integers(2, 9))
@settings(max_examples=300)
def test_marks_are_counted_outside_of_texts_however_a_body_is_cut(
    tree: Any, slice_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt.lane, "_SLICE_BYTES", slice_bytes)
        body = json.dumps(tree).encode()
        assert prompt.lane._marks_outside_texts(body) == values_of(tree)


def test_a_text_of_commas_is_one_value_and_a_list_of_as_many_is_refused() -> None:
    """L-07: how long one call of the decoder takes goes with the number of values."""
    commas = b"," * (prompt.lane.MAX_BODY_VALUES + 1)
    refuse_dense(b'{"a":"%b"}' % commas)
    with pytest.raises(BadPromptError, match="body: expected at most 2000000 values"):
        refuse_dense(b'{"a":[1%b]}' % commas.replace(b",", b",1"))


async def test_large_work_is_done_in_one_thread_and_the_rest_refused() -> None:
    lane, gate, threads = Lane(max_waiting=1), threading.Event(), []

    def work() -> None:
        threads.append(threading.current_thread())
        assert gate.wait(10)

    first, second = asyncio.create_task(lane.run(work)), asyncio.create_task(lane.run(work))
    await asyncio.sleep(0)
    with pytest.raises(LaneFullError):
        await lane.run(work)
    gate.set()
    await asyncio.gather(first, second)
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()
    await lane.run(work)
    lane.close()


async def test_a_place_is_free_when_the_work_ends_not_when_its_client_leaves() -> None:
    lane, gate = Lane(max_waiting=0), threading.Event()
    left = asyncio.create_task(lane.run(lambda: gate.wait(10)))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    with pytest.raises(LaneFullError):
        await lane.run(int)
    gate.set()
    async with asyncio.timeout(20):
        while lane._open:  # noqa: ASYNC110 - observes from outside
            await asyncio.sleep(0.001)
    assert await lane.run(int) == 0
    lane.close()


async def test_a_large_chat_is_read_apart_from_the_loop_and_known_there() -> None:
    messages = [{"role": "user", "content": "ab" * LARGE_BODY_BYTES}]
    body = msgspec.json.encode({"model": "m", "messages": messages})
    longer = msgspec.json.encode({"model": "m", "messages": [*messages, messages[0]]})
    codec = prompt.codec.load_codec(None)
    async with PromptReader({}, codec) as reader:
        read = await reader.read(CHAT_PATH, body)
        again = await reader.read(CHAT_PATH, longer)
        assert reader._turns.used_bytes == 0
        turns = reader._large[0]
        assert turns.used_bytes > len(longer)
        reader.forget()
        assert reader._large[0] is not turns
    for told, said in ((read, messages), (again, [*messages, messages[0]])):
        assert told.prompts[0].packed == codec.chat_tokens(said, None, options={})


@given(
    ids=st.lists(st.integers(0, 9), max_size=60),
    shared=st.integers(0, 40),
    block=st.integers(1, 5),
    step=st.integers(1, 4),
)
def test_a_chain_made_in_steps_is_the_chain(
    ids: list[int], shared: int, block: int, step: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt.model, "STEP_BLOCKS", step)
        shared = min(shared, len(ids))
        run = TokenRun().extended(0, pack_tokens(ids[:shared]))
        rest = pack_tokens(ids[shared:])
        whole = PromptTokens(packed=pack_tokens(ids), is_exact=True).chain(ROOT, block, 7)
        for tokens in (
            PromptTokens(packed=pack_tokens(ids), is_exact=True),
            PromptTokens(run=RunTokens(run, shared, rest), is_exact=True),
        ):
            chain, pauses = _run_to_its_end(tokens.chain_steps(ROOT, block, 7))
            assert chain == whole
            assert pauses >= shared // (block * step)


def _run_to_its_end(
    steps: Generator[None, None, tuple[BlockId, ...]],
) -> tuple[tuple[BlockId, ...], int]:
    pauses = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, pauses
        pauses += 1
