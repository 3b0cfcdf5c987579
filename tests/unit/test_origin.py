"""The guard of the operators' listener: what pages in an operator's browser may ask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from router.config import Config, ConfigError, decode_config
from router.error import ForbiddenError, MisdirectedError
from router.origin import OriginGuard, open_guard

GUARD = OriginGuard(["router.example.org", "Warmroute-Admin"])


def request(method: str = "GET", path: str = "/admin/replicas", **headers: str) -> Any:
    received = [
        (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
    ]
    return SimpleNamespace(
        method=method,
        path=path,
        headers=SimpleNamespace(received=received, request_id=None),
    )


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:8081",
        "10.1.2.3:8081",
        "[::1]:8081",
        "[fd00::17]",
        "localhost",
        "LOCALHOST:80",
        "localhost.:8081",
        "router.example.org:8081",
        "ROUTER.example.org.",
        "warmroute-admin:8081",
    ],
)
def test_an_address_localhost_and_the_configured_names_are_this_listener(host: str) -> None:
    for method in ("GET", "POST"):
        GUARD.check(request(method, Host=host))
        GUARD.check(request(method, Host=host, Origin=f"http://{host}"))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8081",
        "router",
        "example.org",
        "a.router.example.org",
        "router.example.org.evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "127.0.0.1.",
        "0x7f000001.evil.example",
        "2130706433.example",
    ],
)
def test_any_other_name_may_be_one_that_was_made_to_lead_here(host: str) -> None:
    for method in ("GET", "HEAD", "POST", "DELETE"):
        with pytest.raises(MisdirectedError, match="admin_hosts") as refused:
            GUARD.check(request(method, Host=host))
        assert host not in refused.value.message
    OriginGuard([], has_names=False).check(request(Host=host))  # no name leads to a unix socket


def test_a_client_of_http_1_0_need_not_name_a_host() -> None:
    GUARD.check(request())


@pytest.mark.parametrize("site", ["cross-site", "same-site", "Cross-Site", ""])
def test_another_sites_page_reads_and_changes_nothing(site: str) -> None:
    for method in ("GET", "POST"):
        with pytest.raises(ForbiddenError, match="Sec-Fetch-Site"):
            GUARD.check(request(method, Host="127.0.0.1", Sec_Fetch_Site=site))


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_a_page_of_its_own_and_an_address_that_was_typed_in_are_welcome(site: str) -> None:
    GUARD.check(request(Host="127.0.0.1", Sec_Fetch_Site=site))


def test_a_link_of_another_site_may_be_followed_and_not_framed_or_posted() -> None:
    link = {"Host": "127.0.0.1", "Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    GUARD.check(request(path="/dashboard", Sec_Fetch_Dest="document", **link))
    for method, target in (("GET", "iframe"), ("POST", "document")):
        with pytest.raises(ForbiddenError):
            GUARD.check(request(method, Sec_Fetch_Dest=target, **link))


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://127.0.0.1:9", "ftp://127.0.0.1:8081", "http://"],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_origin_is_this_listener_or_refused(method: str, origin: str) -> None:
    """Browsers without Fetch Metadata tell of a page by its origin only."""
    with pytest.raises(ForbiddenError, match="Origin"):
        GUARD.check(request(method, Host="127.0.0.1:8081", Origin=origin))


def test_a_proxy_in_front_may_change_the_host_but_not_what_the_page_is_called() -> None:
    GUARD.check(request("POST", Host="10.0.0.9:8081", Origin="https://router.example.org"))
    with pytest.raises(ForbiddenError):
        GUARD.check(request("POST", Host="10.0.0.9:8081", Origin="https://evil.example"))


def test_scopes_are_changed_by_no_page_at_all() -> None:
    own = {"Host": "127.0.0.1:8081", "Origin": "http://127.0.0.1:8081"}
    GUARD.check(request("GET", "/admin/scopes/tenant:a", **own))
    with pytest.raises(ForbiddenError, match="expected none"):
        GUARD.check(request("DELETE", "/admin/scopes/tenant:a", **own))


async def test_every_path_of_a_table_is_behind_the_guard() -> None:
    async def answer(_: Any) -> Any:
        return "answered"

    routes = GUARD.guarded({"/a": {"GET": answer, "HEAD": answer}, "/b": {"POST": answer}})
    assert {path: set(methods) for path, methods in routes.items()} == {
        "/a": {"GET", "HEAD"},
        "/b": {"POST"},
    }
    for methods in routes.values():
        for method, handler in methods.items():
            assert await handler(request(method, Host="localhost")) == "answered"  # type: ignore[comparison-overlap]
            refused: Any = await handler(request(method, Host="evil.example"))
            assert refused.status == 421


@pytest.mark.parametrize(
    ("config", "host", "is_own"),
    [
        ({"admin": "router.internal:8081"}, "router.internal:8081", True),
        ({"admin": "0.0.0.0:8081"}, "router.internal", False),
        ({"admin": "0.0.0.0:8081", "admin_hosts": ["router.internal"]}, "router.internal", True),
        ({"admin": "unix:/run/wr.sock"}, "anything.example", True),
    ],
)
def test_the_configuration_says_which_names_there_are(
    config: dict[str, Any], host: str, *, is_own: bool
) -> None:
    guard = open_guard(decode_config(config))
    if is_own:
        guard.check(request(Host=host))
    else:
        with pytest.raises(MisdirectedError):
            guard.check(request(Host=host))


@pytest.mark.parametrize("name", ["router:8081", "http://router", "*.example.org", "", "a b"])
def test_a_name_that_is_none_is_refused_by_its_key(name: str) -> None:
    with pytest.raises(ConfigError, match="admin_hosts"):
        decode_config({"admin_hosts": [name]})
    assert Config().admin_hosts == ()
