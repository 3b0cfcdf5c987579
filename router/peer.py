"""Where clients connect from: who may speak for others, and how many connections each may have."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING

from router.address import network_of

if TYPE_CHECKING:
    from collections.abc import Iterable


class Peers:
    """The open connections of one listener, by the address that they come from.

    Not counted are those that anybody may be behind, or only this host: trusted proxies, loopback
    and unix sockets.
    """

    def __init__(self, most: int, trusted_proxies: Iterable[str]) -> None:
        self._most = most
        self._trusted = [ip_network(proxy) for proxy in trusted_proxies]
        self._open: dict[str, int] = {}

    def __len__(self) -> int:
        """Return how many addresses have a connection that counts."""
        return len(self._open)

    def is_trusted(self, peer: str | None) -> bool:
        """Return whether what ``peer`` says of the client before it is believed."""
        if not self._trusted or peer is None:
            return False
        try:
            address = ip_address(peer)
        except ValueError:
            return False
        return any(address in network for network in self._trusted)

    def enter(self, peer: str | None) -> int:
        """Count a connection; return how many its address has beyond its share, 0 or less: none."""
        name = self._counted(peer)
        if name is None:
            return 0
        count = self._open[name] = self._open.get(name, 0) + 1
        return count - self._most

    def leave(self, peer: str | None) -> None:
        """Forget a connection that was counted."""
        name = self._counted(peer)
        if name is not None:
            count = self._open[name] - 1
            if count:
                self._open[name] = count
            else:
                del self._open[name]

    def _counted(self, peer: str | None) -> str | None:
        if peer is None or peer == "::1" or peer.startswith("127.") or self.is_trusted(peer):
            return None
        return network_of(peer)
