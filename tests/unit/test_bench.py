"""The parts of the bench that need no compiler: bodies, figures, meters."""

import itertools
import json
import os
import random
import struct
import subprocess
import sys
import time

import msgspec
import pytest

from contender import RELAY
from conversation import Conversations, long_message, write_bodies
from figures import Figures, ratio_table, slope_of, table
from history_bench import ROUTERS, above_relay, shown_slope, slopes_of
from meter import children, cpu_s, rss_kib
from native import Load, NativeError, parse_load
from publish import published

TURN_CHARS = 2_000
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the bench measures on Linux only")


def said(body: bytes) -> list[str]:
    return [message["content"] for message in json.loads(body)["messages"]]


def some(size: int, *, stamp: str | None = None, growth: float = 1.1) -> Conversations:
    return Conversations(size, 4, TURN_CHARS, 7, stamp=stamp, growth=growth)


@pytest.mark.parametrize("size", [1_024, 32 * 1_024])
def test_no_body_is_sent_twice(size: int) -> None:
    bodies = list(itertools.islice(some(size), 400))
    assert len(set(bodies)) == len(bodies)


@pytest.mark.parametrize("growth", [1.0, 1.1])
@pytest.mark.parametrize("size", [1_024, 32 * 1_024])
def test_every_body_is_a_known_conversation_and_one_new_turn(size: int, growth: float) -> None:
    known = some(size, growth=growth)
    sent = {tuple(said(body)) for body in known.openers()}
    assert len(sent) == 4
    for body in itertools.islice(known, 200):
        conversation = tuple(said(body))
        assert conversation[:-2] in sent
        sent.add(conversation)


def test_a_turn_and_a_body_have_the_size_that_was_asked_for() -> None:
    size = 64 * 1_024
    for body in itertools.islice(some(size), 100):
        assert 0.9 * size <= len(body) <= 1.15 * size
        assert sum(map(len, said(body)[-2:])) == pytest.approx(TURN_CHARS, abs=40)


def test_without_growth_every_body_has_the_same_history() -> None:
    known = some(32 * 1_024, growth=1.0)
    openers = [said(body) for body in known.openers()]
    for at, body in enumerate(itertools.islice(known, 40)):
        assert said(body)[:-2] == openers[at % 4]


def test_only_stamped_bodies_ask_for_a_stream() -> None:
    plain = next(iter(some(4_096)))
    stamped = next(iter(some(4_096, stamp="pace-3-20000")))
    assert b"pace-" not in plain
    assert "stream" not in json.loads(plain)
    assert json.loads(stamped)["stream"] is True
    assert said(stamped)[-1].startswith("pace-3-20000 ")


def test_a_long_message_fills_its_size() -> None:
    (text,) = said(long_message(20_000, 1))
    assert len(text) == 20_000
    assert text != said(long_message(20_000, 2))[0]


def test_bodies_are_written_after_their_length(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write_bodies(tmp_path_factory.mktemp("bodies") / "some", [b"one", b"", b"three"])
    data, read = path.read_bytes(), []
    while data:
        (length,) = struct.unpack_from("<I", data)
        read.append(data[4 : 4 + length])
        data = data[4 + length :]
    assert read == [b"one", b"", b"three"]


@pytest.mark.parametrize("slope", [0.2, 1.0, -0.5])
def test_the_slope_of_a_power_is_its_exponent(slope: float) -> None:
    points = [(x, 3.7 * x**slope) for x in (2e3, 4e3, 8e3, 128e3)]
    assert slope_of(points) == pytest.approx(slope)


def test_the_slope_is_that_of_the_least_squares_line() -> None:
    rng = random.Random(1)
    points = [(x, 50 * x**0.4 * rng.uniform(0.8, 1.25)) for x in (2**at for at in range(1, 60))]
    assert slope_of(points) == pytest.approx(0.4, abs=0.02)


def history(relay_us: dict[int, float], router_us: dict[int, float]) -> Figures:
    figures = Figures()
    for tokens, relayed_us in relay_us.items():
        figures.add(str(tokens), RELAY, relayed_us)
        for router in ROUTERS:
            figures.add(str(tokens), router, router_us[tokens])
    return figures


def test_the_slope_is_taken_above_the_relay() -> None:
    relay_us = {2_000: 50.0, 8_000: 90.0, 32_000: 400.0}
    router_us = {tokens: us + tokens**0.15 for tokens, us in relay_us.items()}
    figures = history(relay_us, router_us)
    tokens, above_us = above_relay(figures, ROUTERS[0])[1]
    assert tokens == 8_000
    assert above_us == pytest.approx(8_000**0.15)
    assert slopes_of(figures)[ROUTERS[0]] == pytest.approx(0.15)
    assert f"{ROUTERS[0]}: log-log slope above the relay 0.15." in shown_slope(figures)


def test_there_is_no_slope_where_the_router_is_below_the_relay() -> None:
    figures = history({2_000: 50.0, 4_000: 60.0}, {2_000: 70.0, 4_000: 55.0})
    assert slopes_of(figures)[ROUTERS[0]] is None
    assert "not above the relay everywhere" in shown_slope(figures)


def test_a_table_shows_medians_and_ratios_to_the_baseline() -> None:
    figures = Figures()
    for value in (30.0, 10.0, 20.0):
        figures.add("1 KiB", "base", value)
        figures.add("1 KiB", "other", 3 * value)
    figures.add("1 KiB", "raw", 7.0)
    columns = {"base": "plain proxy", "other": "other 1.0", "gone": "gone", "raw": "raw"}
    lines = ratio_table(figures, columns, "base", absolute={"raw"}).splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == ["", *columns.values()]
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells == ["1 KiB", "20 (x1.00)", "60 (x3.00)", "-", "7"]
    assert figures.spread() == pytest.approx(1.0)


def test_the_columns_of_a_table_are_aligned() -> None:
    lines = table(["", "a"], [["long name", "1"], ["b", "22,000"]]).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_the_load_generators_line_is_read() -> None:
    keys = [field.name for field in msgspec.structs.fields(Load)]
    load = parse_load(json.dumps({key: at for at, key in enumerate(keys)}))
    assert (load.answered, load.failed, load.connections, load.most_us) == (0, 1, 7, 10)
    with pytest.raises(NativeError, match="said ''"):
        parse_load("")


def test_tables_are_put_between_their_marks_and_nowhere_else() -> None:
    page = (
        "a\n<!-- bench:one -->\nold\n<!-- /bench:one -->\nb\n"
        "<!-- bench:two -->\nkept\n<!-- /bench:two -->\nc\n"
    )
    told = published(page, {"one": "| new \\1 |\n"}.get)
    assert told == page.replace("old", "\n| new \\1 |\n")
    assert published(told, {"one": "| new \\1 |\n"}.get) == told


@LINUX
def test_the_cpu_of_another_process_is_seen() -> None:
    code = "import sys, time\nwhile time.process_time() < 0.2: pass\nprint(1, flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        used_s = cpu_s(process.pid)
        assert process.pid in children(os.getpid())
        assert rss_kib(process.pid) > 1_000
        own_s = time.process_time()
        while time.process_time() < own_s + 0.2:
            pass
        assert 0.2 <= used_s <= cpu_s(process.pid) < used_s + 0.1
        process.communicate(b"\n")
