"""Whatever a client's body looks like, an engine reads one salt in it: the router's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from router.error import ClientError
from router.salt import _SALT, SALT_KEY, salt_field, salted
from router.top_key import MAX_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable

SALT = "router-salt_0"
FIELD = salt_field(SALT)

names = st.sampled_from([SALT_KEY, "cache_sal", "cache_salt#", '"cache_salt', "a\\", "model", ""])
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.text(max_size=8),
    st.sampled_from([SALT_KEY, '"cache_salt": "x"', '{"cache_salt":"x"}', '\\"cache_salt":', "\\"]),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(st.tuples(names, inner), max_size=3).map(tuple)
    ),
    max_leaves=8,
)
members = st.lists(st.tuples(names, values), max_size=5)


class Writer:
    """Writes JSON with spaces and escapes wherever the grammar allows them. Tuples are objects."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def space(self) -> str:
        return str(self._draw(st.sampled_from(["", "", " ", "\n", "\t \r\n"])))

    def text(self, text: str) -> str:
        written = json.dumps(text, ensure_ascii=self._draw(st.booleans()))[1:-1]
        if self._draw(st.booleans()):
            at = self._draw(st.integers(0, max(0, len(text) - 1)))
            if text and text[at].isascii() and text[at] not in '"\\' and text.isprintable():
                code = f"{ord(text[at]):04x}"
                code = code.upper() if self._draw(st.booleans()) else code
                pieces = [json.dumps(letter, ensure_ascii=False)[1:-1] for letter in text]
                pieces[at] = f"\\u{code}"
                written = "".join(pieces)
        return f'"{written}"'

    def value(self, value: Any) -> str:
        if isinstance(value, tuple):
            return self.object(value)
        if isinstance(value, list):
            return "[" + ",".join(self.padded(self.value(one)) for one in value) + "]"
        return self.text(value) if isinstance(value, str) else json.dumps(value)

    def padded(self, written: str) -> str:
        return self.space() + written + self.space()

    def object(self, pairs: Any) -> str:
        written = [
            self.padded(self.text(name)) + ":" + self.padded(self.value(value))
            for name, value in pairs
        ]
        return "{" + (",".join(written) or self.space()) + "}"


def pairs_of(body: bytes) -> list[tuple[str, Any]]:
    """Return what any parser sees on the top level, in order; objects below are tuples of pairs."""
    read = json.loads(body, object_pairs_hook=tuple)
    assert isinstance(read, tuple)
    return list(read)


@given(members, st.data())
def test_an_engine_reads_the_router_s_salt_once_and_all_else_as_it_was(
    pairs: list[tuple[str, Any]], data: st.DataObject
) -> None:
    """S-04: escaped spellings, nested keys of the name, texts that look like the key."""
    write = Writer(data.draw)
    body = write.padded(write.object(pairs)).encode("utf-8", "surrogatepass")
    assume(len(_SALT._pattern.findall(body)) <= MAX_KEYS)
    sent = pairs_of(body)
    if [name for name, _ in sent].count(SALT_KEY) > 1:
        with pytest.raises(ClientError, match="cache_salt: expected one value"):
            salted(body, FIELD)
        return
    got = pairs_of(salted(body, FIELD))
    assert [value for name, value in got if name == SALT_KEY] == [SALT]
    if SALT_KEY in dict(sent):
        expected = [(name, SALT if name == SALT_KEY else value) for name, value in sent]
    else:
        expected = [(SALT_KEY, SALT), *sent]
    assert got == expected


@given(members, st.data())
def test_bytes_besides_the_salt_stay_as_they_came(
    pairs: list[tuple[str, Any]], data: st.DataObject
) -> None:
    write = Writer(data.draw)
    others = [pair for pair in pairs if pair[0] != SALT_KEY]
    before, after = (
        [
            write.padded(write.text(name)) + ":" + write.padded(write.value(value))
            for name, value in o
        ]
        for o in (others[::2], others[1::2])
    )
    own = (
        write.text(SALT_KEY) + ":" + write.padded(write.value(data.draw(values))).rstrip(" \t\r\n")
    )
    head = "".join(f"{one}," for one in before)
    tail = "".join(f",{one}" for one in after)
    body = "{%s%s%s}"  # the client's own between the others
    sent = (body % (head, own, tail)).encode("utf-8", "surrogatepass")
    assume(len(_SALT._pattern.findall(sent)) <= MAX_KEYS)
    assert salted(sent, FIELD) == (body % (head, FIELD.decode(), tail)).encode(
        "utf-8", "surrogatepass"
    )


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'"cache_salt"', b"null", b"--form\r\n", b"\xef\xbb\xbf{}"]
)
def test_a_body_without_room_for_a_salt_is_refused(body: bytes) -> None:
    with pytest.raises(ClientError, match="body: expected a JSON object"):
        salted(body, FIELD)


@pytest.mark.parametrize(
    "body",
    [b'{"cache_salt":"x"', b'{"cache_salt":"x",}', b'{"cache_salt" "x"}', b"{'cache_salt':'x'}"],
)
def test_a_salt_in_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(ClientError, match="body: expected a JSON object"):
        salted(body, FIELD)


def test_a_flood_of_keys_of_that_name_is_refused() -> None:
    nested = b",".join([b'{"cache_salt":1}'] * (MAX_KEYS + 1))
    with pytest.raises(ClientError, match=f"at most {MAX_KEYS} keys"):
        salted(b'{"tools":[%b]}' % nested, FIELD)


@pytest.mark.parametrize("key", ["kv_transfer_params", "kv\\u005ftransfer_params"])
def test_a_client_tells_no_engine_which_pages_to_take(key: str) -> None:
    """S-05: an engine that is told another one's page numbers would hand over anybody's."""
    with pytest.raises(ClientError, match="kv_transfer_params: expected none"):
        salted(b'{"%b":{"remote_block_ids":[1]}}' % key.encode(), FIELD)
    nothing = b'{"%b":null}' % key.encode()
    assert salted(nothing, FIELD) == b"{%b,%b" % (FIELD, nothing[1:])
    nested = b'{"a":{"%b":{}}}' % key.encode()
    assert salted(nested, FIELD) == b"{%b,%b" % (FIELD, nested[1:])
