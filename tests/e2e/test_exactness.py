"""Every kind of chat through a router and two workers that compute: predicted is what was cached.

``tests/vllm/test_exactness.py`` asks the same of real vLLM engines.
"""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Final

import pytest
import pytest_asyncio

from support.exact_case import CASES
from support.exact_stand import body_of, heard, write_styled, wrong_cases
from support.exact_template import STYLES
from support.vllm_stand import open_stand
from support.worker_engine import worker_command, write_numpy_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.vllm_stand import Stand

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGES: Final = 1024


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    folder = tmp_path_factory.mktemp("exact")
    model = write_styled(write_numpy_model(folder / "model"))
    async with open_stand(folder, worker_command(model, PAGES), model) as stand:
        yield stand


async def test_every_kind_of_chat_is_predicted_to_the_page(stand: Stand) -> None:
    """B42: what a template refuses is routed by load, and the worker says why."""
    wrong, refused = await wrong_cases(stand, zip(CASES, cycle(STYLES), strict=False))
    assert not wrong, "\n".join(wrong)
    assert 0 < refused < len(CASES) // 4


@pytest.mark.parametrize("style", STYLES)
async def test_a_salt_changes_nothing_but_who_shares(stand: Stand, style: str) -> None:
    """B19: another salt finds nothing, the same one everything."""
    body = body_of("a call and its result", style, 1_000 + STYLES.index(style))
    plain = [await heard(stand, body) for _ in range(2)]
    salted = [await heard(stand, {**body, "cache_salt": f"s-{style}"}) for _ in range(2)]
    other = await heard(stand, {**body, "cache_salt": f"t-{style}"})
    assert all(one.is_right for one in (*plain, *salted, other))
    assert [one.cached_tokens for one in (salted[0], other)] == [0, 0]
    assert plain[1].cached_tokens == salted[1].cached_tokens > 0
