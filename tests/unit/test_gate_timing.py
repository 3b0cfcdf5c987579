"""How long a wrong key takes says nothing of how much of it is right (S-09)."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from router.error import RouterError
from router.gate import Gate
from router.request import read_headers
from router.tenant import TenantSettings
from support.tenant import SECRET, digest_of
from warmroute.two_sample import ks_distance, ks_p_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from router.request import Request

KEY = "sk-0123456789abcdefghijklmnopqrstuvwxyzABCDEFGH"
SAMPLES = 10_000
PREFIXES = (0, 3, 16, 32, len(KEY) - 1)
LIKELY = 0.01


def asked(key: str) -> Request:
    received = ((b"Host", b"router"), (b"Authorization", b"Bearer " + key.encode()))
    plain: Any = SimpleNamespace(headers=read_headers(received), peer="10.0.0.1", keep_alive=True)
    request: Request = plain
    return request


def wrong_key(right: int, rng: random.Random) -> str:
    """Return a key of the same length of which exactly the first ``right`` characters are right."""
    rest = [rng.choice([c for c in "0123456789abcdef" if c != KEY[right]])]
    rest += [rng.choice("0123456789abcdef") for _ in KEY[right + 1 :]]
    return KEY[:right] + "".join(rest)


def likelihood(left: Sequence[int], right: Sequence[int]) -> float:
    """Return how likely the distance is where both are drawn from one distribution."""
    return ks_p_value(ks_distance(left, right), len(left), len(right))


def timed(check: Callable[[Request], object]) -> dict[int, list[int]]:
    """Return the nanoseconds of refusals by the length of the right prefix, in a random order.

    All requests are made before: what goes before a measurement shows in it.
    """
    rng = random.Random(11)
    order = [right for right in PREFIXES for _ in range(SAMPLES)]
    rng.shuffle(order)
    tries = [(right, asked(wrong_key(right, rng))) for right in order]
    rng.shuffle(tries)
    taken: dict[int, list[int]] = {right: [] for right in PREFIXES}
    for right, request in tries:
        began_ns = time.perf_counter_ns()
        with suppress(RouterError):
            check(request)
        taken[right].append(time.perf_counter_ns() - began_ns)
    return taken


@pytest.mark.heavy
def test_a_wrong_key_takes_as_long_whatever_part_of_it_is_right() -> None:
    """S-09: ten thousand tries per prefix; a comparison that stops early is told apart."""
    settings = TenantSettings(name="acme", key_digests=(digest_of(KEY),))
    gate = Gate([settings], SECRET, clock=time.monotonic, unix_clock=time.time)
    taken = timed(gate.admit)
    others = PREFIXES[1:]
    told = {right: likelihood(taken[0], taken[right]) for right in others}
    print({right: round(p, 3) for right, p in told.items()})  # noqa: T201 - the figures
    assert min(told.values()) > LIKELY / len(others)

    def stops_early(request: Request) -> bool:
        shown = request.headers.api_key or b""
        return all(ours == theirs for ours, theirs in zip(KEY.encode(), shown, strict=False))

    taken = timed(stops_early)
    assert likelihood(taken[0], taken[PREFIXES[-1]]) < LIKELY / len(others)
