"""How many bytes of a body follow: one number or chunks, whatever the parser let pass before."""

from __future__ import annotations

import pytest

from router.error import ClientError
from router.request import body_length, read_head

CODED = (b"Transfer-Encoding", b"chunked")
HOST = (b"Host", b"router")


def length_of(method: str, lengths: tuple[bytes, ...], *headers: tuple[bytes, bytes]) -> int | None:
    """Return what ``body_length`` says of such a head."""
    head = read_head(method, "/v1/completions", "1.1", (HOST, *headers), keep_alive=True)
    return body_length(head, lengths)


def test_a_body_has_the_length_that_it_declares_or_is_in_chunks() -> None:
    assert length_of("POST", (b"7",)) == 7
    assert length_of("POST", ()) == 0
    assert length_of("POST", (), CODED) is None


@pytest.mark.parametrize("lengths", [(b"7",), (b"0",), (b"7", b"7"), (b"",), (b"+7",), (b"7, 7",)])
def test_two_framings_are_refused_also_where_the_parser_takes_them(
    lengths: tuple[bytes, ...],
) -> None:
    """H-01: smuggling begins where two readers see two ends."""
    with pytest.raises(ClientError, match="Content-Length"):
        length_of("POST", lengths, CODED)


@pytest.mark.parametrize("lengths", [(b"7", b"7"), (b"",), (b"+7",), (b"-1",), (b"7, 7",)])
def test_a_length_that_is_no_one_number_is_refused(lengths: tuple[bytes, ...]) -> None:
    """H-02."""
    with pytest.raises(ClientError, match="Content-Length"):
        length_of("POST", lengths)


def test_a_body_that_means_nothing_is_refused() -> None:
    with pytest.raises(ClientError, match="no body"):
        length_of("GET", (b"7",))
    with pytest.raises(ClientError, match="no body"):
        length_of("GET", (), CODED)
