"""Which addresses of the registry and the configuration can be a replica's."""

from __future__ import annotations

import re

import pytest

from router.endpoint import Endpoint
from state.model import NAME_PATTERN


@pytest.mark.parametrize(
    "url",
    [
        "https://",
        "https://a:1/path",
        "unix:/run/engine.sock",
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
        ("https://a", "a:443"),
        ("https://[fd00::1]:8443", "[fd00::1]:8443"),
    ],
)
def test_a_bare_host_and_port_is_taken(url: str, authority: str) -> None:
    endpoint = Endpoint.parse(url)
    assert endpoint.authority == authority
    assert endpoint.is_tls is url.startswith("https")
    assert Endpoint.parse(endpoint.url) == endpoint


def test_only_a_configured_replica_may_be_a_unix_socket() -> None:
    """The registry's word must not make a router open a path of its host."""
    endpoint = Endpoint.configured("unix:/run/vllm/0.sock")
    assert (endpoint.path, endpoint.authority, endpoint.url) == (
        "/run/vllm/0.sock",
        "localhost",
        "unix:/run/vllm/0.sock",
    )
    with pytest.raises(ValueError, match="http"):
        Endpoint.parse("unix:/run/vllm/0.sock")


@pytest.mark.parametrize("url", ["unix:", "unix:run/x", "unix:/a b", "unix:/a\nb", "unix:/a/"])
def test_a_unix_address_is_an_absolute_plain_path(url: str) -> None:
    with pytest.raises(ValueError, match="unix:/path"):
        Endpoint.configured(url)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://[::1]:8000", "0::1:8000"),
        ("https://[2001:db8::7]", "2001:db8::7:443"),
        ("http://[fe80::1%25eth0]:1", "fe80::1@25eth0:1"),
        ("unix:/run/vllm/0.sock", "run.vllm.0.sock"),
        ("http://gpu-0:8000", "gpu-0:8000"),
    ],
)
def test_a_replica_without_a_name_gets_one_that_is_a_key_and_a_label(url: str, name: str) -> None:
    found = Endpoint.configured(url).name
    assert found == name
    assert re.fullmatch(NAME_PATTERN, found)
