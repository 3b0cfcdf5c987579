"""Connections by address, and who may speak for others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.peer import Peers

ADDRESSES = ("10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2", "2001:db8:0:1::1", "192.0.2.9")


def test_an_address_has_its_share_and_others_have_theirs() -> None:
    """L-03."""
    peers = Peers(2, ())
    assert [peers.enter("10.0.0.1") for _ in range(4)] == [-1, 0, 1, 2]
    assert peers.enter("10.0.0.2") == -1
    for _ in range(4):
        peers.leave("10.0.0.1")
    assert peers.enter("10.0.0.1") == -1


def test_a_client_has_a_whole_network_of_ipv6() -> None:
    """L-03: /64 is what one customer gets."""
    peers = Peers(1, ())
    assert peers.enter("2001:db8::1") == 0
    assert peers.enter("2001:db8::ffff:1") == 1
    assert peers.enter("2001:db8:0:1::1") == 0


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.1.2.3", "::1", None, "10.9.0.1", "fd00::7"])
def test_addresses_that_many_are_behind_are_not_counted(peer: str | None) -> None:
    """L-03: this host, unix sockets, trusted proxies."""
    peers = Peers(1, ("10.9.0.0/16", "fd00::/8"))
    assert [peers.enter(peer) for _ in range(3)] == [0, 0, 0]
    peers.leave(peer)
    assert len(peers) == 0


@pytest.mark.parametrize(
    ("peer", "is_trusted"),
    [
        *(("10.9.1.1", True), ("10.8.1.1", False), ("fd00::1", True), ("::1", False)),
        *((None, False), ("no address", False)),
    ],
)
def test_only_configured_networks_are_trusted(peer: str | None, is_trusted: bool) -> None:  # noqa: FBT001 - a column
    """H-42."""
    assert Peers(1, ("10.9.0.0/16", "fd00::/8")).is_trusted(peer) is is_trusted
    assert not Peers(1, ()).is_trusted(peer)


@given(st.lists(st.sampled_from(ADDRESSES), max_size=40))
def test_nothing_is_kept_of_addresses_that_left(order: list[str]) -> None:
    """No table grows with the addresses that ever came."""
    peers = Peers(3, ("192.0.2.0/24",))
    for peer in order:
        peers.enter(peer)
    assert len(peers) <= 4
    for peer in reversed(order):
        peers.leave(peer)
    assert len(peers) == 0
