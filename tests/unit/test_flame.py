"""Flame graphs: what is sampled, and what is drawn of it."""

import math
import re
import statistics
import threading
import time
from xml.etree import ElementTree as ET

from flame import (
    LEAST_SHARE,
    WIDTH,
    Place,
    Sampler,
    own_shares,
    share_below,
    shared_depth,
    svg,
    tree_of,
)

LOOP = Place("asyncio/runners.py", "Runner.run")
HANDLE = Place("router/proxy.py", "Proxy.handle")
READ = Place("prompt/reader.py", "PromptReader.read")
DECODE = Place("msgspec/json.py", "decode<&>")
STACKS: dict[tuple[Place, ...], int] = {
    (HANDLE,): 10,
    (HANDLE, READ): 20,
    (HANDLE, READ, DECODE): 30,
    (LOOP,): 40,
}
SPACE = "{http://www.w3.org/2000/svg}"


def boxes(picture: str) -> dict[str, tuple[float, float]]:
    """Return the left edge and the width of each box by what it says of itself."""
    found = {}
    for group in ET.fromstring(picture).iter(f"{SPACE}g"):  # noqa: S314 - our own
        title, box = group.find(f"{SPACE}title"), group.find(f"{SPACE}rect")
        assert title is not None
        assert box is not None
        found[title.text or ""] = (float(box.attrib["x"]), float(box.attrib["width"]))
    return found


def test_a_box_is_as_wide_as_the_samples_in_and_below_it() -> None:
    found = boxes(svg(STACKS, "some <work>"))
    assert found == {
        "router/proxy.py Proxy.handle: 60.0%, itself 10.0%": (0.0, 0.6 * WIDTH),
        "prompt/reader.py PromptReader.read: 50.0%, itself 20.0%": (0.0, 0.5 * WIDTH),
        "msgspec/json.py decode<&>: 30.0%, itself 30.0%": (0.0, 0.3 * WIDTH),
        "asyncio/runners.py Runner.run: 40.0%, itself 40.0%": (0.6 * WIDTH, 0.4 * WIDTH),
    }


def test_what_is_too_narrow_is_left_out() -> None:
    many: dict[tuple[Place, ...], int] = {
        (HANDLE,): 10_000,
        (READ,): int(10_000 * LEAST_SHARE) - 5,
        (DECODE,): 5_000,
    }
    found = boxes(svg(many, "much"))
    assert [told.split()[0] for told in found] == ["router/proxy.py", "msgspec/json.py"]
    assert tree_of(many).total == sum(many.values())


def test_time_in_a_library_is_that_of_the_function_that_called_it() -> None:
    shares = own_shares(STACKS)
    assert shares == {"prompt/reader.py": 0.5, "event loop": 0.4, "router/proxy.py": 0.1}


def test_the_share_of_a_function_is_that_of_all_that_it_calls() -> None:
    assert share_below(STACKS, "Proxy.handle") == 0.6
    assert share_below(STACKS, "PromptReader.read") == 0.5
    assert share_below(STACKS, "nobody") == 0


def test_frames_that_all_stacks_begin_with_are_not_drawn() -> None:
    assert shared_depth([(LOOP, HANDLE, READ), (LOOP, HANDLE)]) == 2
    assert shared_depth([(LOOP, HANDLE), (HANDLE,)]) == 0


def test_a_place_names_no_directory_of_the_machine() -> None:
    for function in (statistics.median, Place.of, threading.Thread.start, ET.fromstring):
        place = Place.of(function.__code__)
        assert re.fullmatch(r"[a-z_]+(/[a-zA-Z_]+)*\.py", place.file), place
    assert Place.of(Place.of.__code__).area == "bench"


def spin() -> None:
    math.sqrt(sum(range(100)))


def test_stacks_are_counted_while_the_sampler_is_on() -> None:
    deadline_s = time.monotonic() + 60
    with Sampler() as sampler:
        began_s = time.process_time()
        while time.process_time() < began_s + 0.05:
            spin()
        assert sampler.samples == 0
        sampler.is_on = True
        while sampler.samples < 20:
            spin()
            assert time.monotonic() < deadline_s
        sampler.is_on = False
        seen = sampler.samples
    stacks = sampler.stacks()
    assert sum(stacks.values()) == seen
    assert any(place.name == "spin" for stack in stacks for place in stack)
