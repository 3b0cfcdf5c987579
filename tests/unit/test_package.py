"""The generic top-level names must be this checkout's, not some other distribution's."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["state", "policies", "prompt", "router", "sidecar", "warmroute"])
def test_a_top_level_name_is_of_this_checkout(name: str) -> None:
    file = import_module(name).__file__
    assert file is not None
    assert Path(file).parent == ROOT / name
