"""``warmroute weights``: what its words are read as."""

from __future__ import annotations

import pytest

from warmroute.cli import UsageError
from warmroute.weights import patch_of


@pytest.mark.parametrize("text", ["NaN", "nan", "Infinity", "-inf", "1e999", ".5", "+1", "1_000"])
def test_a_number_that_json_has_not_is_refused_by_its_key(text: str) -> None:
    """As text it would be refused, too, but for being text."""
    with pytest.raises(UsageError, match=r"^policy\.w_copy: expected a finite number"):
        patch_of([f"policy.w_copy={text}"])
    assert patch_of([f'policy.kind="{text}"']) == {"policy": {"kind": text}}
