from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from prompt.codec import load_codec
from state.prefix import unpack_tokens
from warmroute.corpus import write_tokenizer
from warmroute.driver import Reply
from warmroute.warmth import (
    REPLY_TOKENS,
    Probe,
    WarmthSettings,
    build_probes,
    measure_warmth,
    warmth_finding,
    warmth_of,
    warmth_table,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prompt.codec import Codec
    from warmroute.warmth import Warmth
    from warmroute.workload import Message

SETTINGS = WarmthSettings(prefixes=4, prefix_tokens=500)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    return load_codec(write_tokenizer(tmp_path_factory.mktemp("model"), seed=3))


def reply(ttft_s: float, cached: int, replica: str | None = "a") -> Reply:
    return Reply(
        text="",
        replica=replica,
        prompt_tokens=520,
        cached_tokens=cached,
        completion_tokens=REPLY_TOKENS,
        ttft_s=ttft_s,
        duration_s=ttft_s,
    )


def warmth_from(*pairs: tuple[Reply, Reply]) -> Warmth:
    return warmth_of(500, [Probe(501, (), ())] * len(pairs), pairs)


def tokens_of(messages: Sequence[Message], codec: Codec) -> tuple[int, ...]:
    return tuple(unpack_tokens(codec.chat_tokens(list(messages), None, options={})))


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    both = zip(one, other, strict=False)
    return next((place for place, (left, right) in enumerate(both) if left != right), 0)


def test_both_prompts_of_a_pair_share_the_prefix_and_no_more(codec: Codec) -> None:
    for probe in build_probes(SETTINGS, codec, seed=1):
        cold, warm = tokens_of(probe.cold, codec), tokens_of(probe.warm, codec)
        assert shared(cold, warm) == probe.shared_tokens
        assert 500 <= probe.shared_tokens < 510
        assert len(cold) - probe.shared_tokens < 100


def test_no_prefix_warms_another(codec: Codec) -> None:
    prompts = [tokens_of(probe.cold, codec) for probe in build_probes(SETTINGS, codec, seed=1)]
    assert len(prompts) == 4
    for index, one in enumerate(prompts):
        assert all(shared(one, other) < 16 for other in prompts[:index])


def test_a_seed_decides_the_prefixes(codec: Codec) -> None:
    assert build_probes(SETTINGS, codec, seed=1) == build_probes(SETTINGS, codec, seed=1)
    assert build_probes(SETTINGS, codec, seed=1) != build_probes(SETTINGS, codec, seed=2)
    assert build_probes(WarmthSettings(), codec, seed=1) == ()


def test_the_ratio_is_that_of_the_medians() -> None:
    warmth = warmth_from(
        (reply(2.0, 0), reply(0.5, 496)),
        (reply(9.0, 0), reply(0.1, 496)),
        (reply(1.0, 0), reply(0.4, 480)),
    )
    assert (warmth.cold_ttft_p50_s, warmth.warm_ttft_p50_s, warmth.ratio) == (2.0, 0.4, 5.0)
    assert warmth.shared_tokens == (501, 501, 501)
    assert [sample.cached_tokens for sample in warmth.warm] == [496, 496, 480]
    assert "cold is 5.0 times warm" in warmth_finding(warmth)


def test_a_pair_counts_as_on_one_replica_only_where_both_are_known_and_equal() -> None:
    warmth = warmth_from(
        (reply(1, 0, "a"), reply(1, 1, "a")),
        (reply(1, 0, "a"), reply(1, 1, "b")),
        (reply(1, 0, None), reply(1, 1, None)),
    )
    assert warmth.same_replica == 1


def test_nothing_measured_has_no_ratio() -> None:
    assert warmth_from().ratio is None
    assert "nothing was timed" in warmth_finding(warmth_from())


def test_the_table_shows_least_most_and_what_was_cached() -> None:
    warmth = warmth_from((reply(2, 0), reply(0.5, 496)), (reply(3, 0), reply(0.25, 1480)))
    console = Console(width=100)
    with console.capture() as capture:
        console.print(warmth_table(warmth))
    lines = capture.get().splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert cells == [
        ["cold", "2.000 s", "2.000 s", "3.000 s", "0"],
        ["warm", "0.250 s", "0.250 s", "0.500 s", "496 - 1,480"],
    ]
    assert "same worker 2 of 2 times" in capture.get().replace("\n", " ")


class Recorder:
    """A client, a fleet and a progress that write down what is asked of them."""

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[Message], int]] = []
        self.settled = 0
        self.advanced = 0

    async def settle(self) -> None:
        assert self.settled == len(self.asked)
        self.settled += 1

    async def chat(self, messages: Sequence[Message], max_tokens: int) -> Reply:
        self.asked.append((messages, max_tokens))
        assert self.settled == len(self.asked)
        return reply(1.0, len(self.asked))

    def begin(self, step: str, things: int | None = None) -> None:
        raise NotImplementedError

    def advance(self) -> None:
        self.advanced += 1

    def end(self) -> None:
        raise NotImplementedError


@pytest.mark.asyncio
async def test_each_prefix_is_asked_cold_then_warm_and_the_fleet_rests_before(codec: Codec) -> None:
    probes = build_probes(SETTINGS, codec, seed=1)
    recorder = Recorder()
    pairs = await measure_warmth(recorder, recorder.settle, probes, recorder)  # type: ignore[arg-type]
    expected = [prompt for probe in probes for prompt in (probe.cold, probe.warm)]
    assert recorder.asked == [(prompt, REPLY_TOKENS) for prompt in expected]
    assert [(cold.cached_tokens, warm.cached_tokens) for cold, warm in pairs] == [
        (1, 2),
        (3, 4),
        (5, 6),
        (7, 8),
    ]
    assert recorder.advanced == 8
