"""A key that occurs twice in an object of JSON is found, wherever it stands."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.strict_json import key_twice

VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"a": 1, "a": 1}', "a"),
        ('{"a": 1, "\\u0061": 2}', "a"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "a.b"),
        ('{"a": [{"b": 1}, {"b": {"c": 1, "c": 2}}]}', "a[1].b.c"),
        ('{"a": 1, "b": {"a": 1}}', None),
        ('[{"a": 1}, {"a": 1}]', None),
        ('{"a": ' + "9" * 10_000 + ', "a": 1e999}', "a"),
        ("[]", None),
        ("3", None),
    ],
)
def test_the_first_such_key_is_named_with_its_path(text: str, where: str | None) -> None:
    assert key_twice(text.encode()) == where


def test_a_long_key_is_not_repeated_whole() -> None:
    key = "k" * 1_000
    assert key_twice(f'{{"{key}": 1, "{key}": 2}}'.encode()) == "k" * 100


@given(VALUES)
def test_what_was_written_from_values_has_none(value: object) -> None:
    assert key_twice(json.dumps(value).encode()) is None
