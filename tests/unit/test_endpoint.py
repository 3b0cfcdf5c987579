"""Which addresses of the registry and the configuration can be a replica's."""

from __future__ import annotations

import pytest

from router.upstream import Endpoint


@pytest.mark.parametrize(
    "url",
    [
        "https://a:1",
        "ftp://a:1",
        "http://",
        "http://user:word@a:1",
        "http://a:1/path",
        "http://a:1?q",
        "http://a:1#f",
        "http://a:0",
        "http://a:65536",
        "http://a:x",
        "http://[::1",
        "http://a b:1",
        "http://a\0b:1",
        'http://a"b<c>:1',
        "http://a\\b:1",
        "http://ä:1",
        f"http://{'a' * 254}:1",
    ],
)
def test_an_address_that_is_no_bare_host_and_port_is_refused(url: str) -> None:
    """W-02, W-04: the text comes from the registry and goes into connections and heads."""
    with pytest.raises(ValueError, match=r"http|[Pp]ort|IPv6"):
        Endpoint.parse(url)


@pytest.mark.parametrize(
    ("url", "authority"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://gpu-0.pods_a.local", "gpu-0.pods_a.local:80"),
        ("http://[::1]:8000/", "[::1]:8000"),
    ],
)
def test_a_bare_host_and_port_is_taken(url: str, authority: str) -> None:
    assert Endpoint.parse(url).authority == authority
