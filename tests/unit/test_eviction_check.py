"""What a server's memory settings mean for the state that it keeps."""

from __future__ import annotations

import pytest

from router.state_reader import build_mirror
from state.eviction_check import EvictionCheck, judge_memory


def _info(policy: str, limit: str = "1073741824") -> str:
    return f"# Memory\r\nused_memory:1\r\nmaxmemory:{limit}\r\nmaxmemory_policy:{policy}\r\n"


@pytest.mark.parametrize("policy", ["volatile-lru", "allkeys-lru", "volatile-lfu", "allkeys-lfu"])
def test_a_bounded_server_that_evicts_what_is_used_least_is_fine(policy: str) -> None:
    """R-10."""
    assert judge_memory(_info(policy)) is None


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (_info("noeviction"), "noeviction"),
        (_info("volatile-lru", "0"), "no maxmemory"),
        (_info("volatile-ttl"), "volatile-ttl"),
        (_info("allkeys-random"), "allkeys-random"),
    ],
)
def test_other_settings_are_warned_of(info: str, said: str) -> None:
    """R-10: full and without eviction nothing is taken; records have the shortest lives."""
    assert said in str(judge_memory(info))


def test_a_server_that_does_not_tell_is_believed() -> None:
    assert judge_memory("") is None
    assert judge_memory("# Memory\r\nused_memory:1\r\n") is None


async def test_a_router_looks_at_its_server() -> None:
    """R-10: with an index of its own and without."""
    for has_index in (True, False):
        check = build_mirror("redis://h:1", has_index=has_index).server_check
        assert isinstance(getattr(check, "__self__", None), EvictionCheck)
