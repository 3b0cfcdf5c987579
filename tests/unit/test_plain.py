"""Bodies of which only the model is read: strict where the path takes JSON."""

from __future__ import annotations

import pytest

from prompt.model import BadPromptError
from prompt.plain import read_plain

NO_JSON = [
    b"",
    b"--boundary\r\nnot JSON",
    b"[]",
    b'{"model":"m"} ',
    b"\xef\xbb\xbf{}",
    '{"model":"m"}'.encode("utf-16"),
    b'{"a":"\xff"}',
    b'{"a":"\xed\xa0\x80"}',
    b'{"a":"\\ud800"}',
    b'{"a":"\x00"}',
    b'{"a":NaN}',
    b'{"a":-Infinity}',
    b'{"a":%b}' % (b"[" * 100_000 + b"]" * 100_000),
]


@pytest.mark.parametrize("body", [body for body in NO_JSON if body != NO_JSON[3]])
def test_what_is_no_strict_json_object_is_refused_where_there_has_to_be_one(body: bytes) -> None:
    """F20, L-06: on every path; a form is taken where forms are."""
    with pytest.raises(BadPromptError) as caught:
        read_plain(body, is_json=True)
    assert caught.value.field in {"body", "a", "a[...]"}
    assert read_plain(body, is_json=False).model == ""


@pytest.mark.parametrize(
    ("number", "is_taken"),
    [
        (b"1e999", False),
        (b"-1E+0400", False),
        (b"9" * 5_000, False),
        (b"0." + b"9" * 5_000, True),
        (b"9" * 308, True),
        (b"1e308", True),
        (b"1e-999", True),
        (b'"1e999 ' + b"9" * 5_000 + b'"', True),
    ],
)
def test_a_number_that_no_double_holds_is_refused_by_its_field(
    number: bytes,
    is_taken: bool,  # noqa: FBT001 - a parameter
) -> None:
    body = b'{"model":"m","seed":[%b]}' % number
    if is_taken:
        assert read_plain(body, is_json=True).model == "m"
        return
    with pytest.raises(BadPromptError, match="range") as caught:
        read_plain(body, is_json=True)
    assert caught.value.field.startswith("seed")


def test_a_name_of_a_field_that_is_no_plain_word_is_not_repeated() -> None:
    with pytest.raises(BadPromptError) as caught:
        read_plain(b'{"sk-CANARY 1":1e999}', is_json=True)
    assert "CANARY" not in str(caught.value)


def test_a_model_may_be_left_out_and_may_not_be_anything() -> None:
    assert read_plain(b"{}", is_json=True).model == ""
    assert read_plain(b'{"model":null}', is_json=True).model == ""
    assert read_plain(b'{"model":1}', is_json=True).model == ""  # the engine's own to refuse
    for model in (b'"a\\nb"', b'"%b"' % (b"m" * 257)):
        with pytest.raises(BadPromptError) as caught:
            read_plain(b'{"model":%b}' % model, is_json=True)
        assert caught.value.field == "model"
