"""How much each tenant may ask for: token buckets for requests and tokens, refused before any work.

A bucket is filled with time, with the tenant's rate divided by the number of live routers. A
request takes one from the first; its prompt's tokens, as predicted when it is routed, are taken
from the second, and its completion's when it ends, with what the engine counted in place of the
prediction. A request that overdraws it is served and the next ones wait: no estimate of a request
is needed before its body is read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from prompt.model import Unroutable
from router.outlook import BYTES_PER_TOKEN
from router.shed import RequestRateError, TokenRateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from router.admission_setting import RateSettings
    from router.chooser import Routed
    from router.observer import Usage
    from router.tenant import TenantSettings

MINUTE_S: Final = 60.0
LONGEST_RETRY_S: Final = 60


class Bucket:
    """Units that come with time, up to ``burst_s`` seconds' worth; negative for a debt."""

    __slots__ = ("_burst_s", "_filled_s", "_left", "per_min")

    def __init__(self, per_min: float, burst_s: float, now_s: float) -> None:
        self.per_min = per_min
        self._burst_s = burst_s
        self._filled_s = now_s
        self._left = self.most(1)

    def most(self, routers: int) -> float:
        """Return what a full bucket of one of so many routers has; one unit at the least."""
        return max(1.0, self.per_min / MINUTE_S * self._burst_s / routers)

    def left(self, now_s: float, routers: int) -> float:
        """Return what is there now."""
        new = self.per_min / MINUTE_S / routers * max(0.0, now_s - self._filled_s)
        self._left = min(self.most(routers), self._left + new)
        self._filled_s = now_s
        return self._left

    def take(self, units: float) -> None:
        """Take units out, or give them back."""
        self._left -= units

    def wait_s(self, wanted: float, routers: int) -> float:
        """Return how long it takes until ``wanted`` are there, as of the last look."""
        return max(0.0, wanted - self._left) * MINUTE_S * routers / self.per_min


class RateSlot:
    """One request's account; ``end`` settles it, once."""

    __slots__ = ("_account", "_charged_tokens", "_is_ended")

    def __init__(self, account: _Account) -> None:
        self._account = account
        self._charged_tokens: int | None = None
        self._is_ended = False

    def charge(self, routed: Routed, body_bytes: int) -> None:
        """Take the prompt's tokens; a second try is no second prompt."""
        tokens = self._account.tokens
        if tokens is None or self._charged_tokens is not None:
            return
        self._charged_tokens = routed.prompt_tokens
        if routed.prompt.unroutable is not None:
            is_prompt = routed.prompt.unroutable is not Unroutable.LOAD_ONLY
            self._charged_tokens = body_bytes // BYTES_PER_TOKEN * is_prompt
        tokens.take(self._charged_tokens)

    def end(self, usage: Usage | None) -> None:
        """Take the completion's tokens, and the prompt's as the engine counted them."""
        tokens = self._account.tokens
        if tokens is None or self._is_ended or self._charged_tokens is None:
            return
        self._is_ended = True
        if usage is None:
            return
        if usage.prompt_tokens is not None:
            tokens.take(usage.prompt_tokens - self._charged_tokens)
        tokens.take(usage.completion_tokens or 0)

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Return what the tenant has left, as OpenAI's API tells it."""
        return self._account.headers()


class _Account:
    """The buckets of one tenant."""

    __slots__ = ("_clock", "_routers", "requests", "tokens")

    def __init__(
        self, settings: RateSettings, clock: Callable[[], float], routers: Callable[[], int]
    ) -> None:
        self._clock, self._routers = clock, routers

        def bucket(per_min: float | None) -> Bucket | None:
            return None if per_min is None else Bucket(per_min, settings.burst_s, clock())

        self.requests = bucket(settings.requests_per_min)
        self.tokens = bucket(settings.tokens_per_min)

    def enter(self) -> RateSlot:
        """Take one request; raises RequestRateError and TokenRateError, which take nothing."""
        now_s, routers = self._clock(), self._routers()
        requests, tokens = self.requests, self.tokens
        if tokens is not None and tokens.left(now_s, routers) <= 0.0:
            message = f"tokens: this tenant may have {tokens.per_min:g} per minute"
            wait_s = tokens.wait_s(1.0, routers)
            raise TokenRateError(
                message, retry_after_s=_retry_after_s(wait_s), headers=dict(self.headers())
            )
        if requests is not None:
            if requests.left(now_s, routers) < 1.0:
                message = f"requests: this tenant may send {requests.per_min:g} per minute"
                wait_s = requests.wait_s(1.0, routers)
                raise RequestRateError(
                    message, retry_after_s=_retry_after_s(wait_s), headers=dict(self.headers())
                )
            requests.take(1.0)
        return RateSlot(self)

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Return the headers of every bucket that there is."""
        now_s, routers = self._clock(), self._routers()
        found: list[tuple[str, str]] = []
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is None:
                continue
            left, most = bucket.left(now_s, routers), bucket.most(routers)
            full_s = bucket.wait_s(most, routers)
            found.append((f"x-ratelimit-limit-{name}", str(int(most))))
            found.append((f"x-ratelimit-remaining-{name}", str(max(0, int(left)))))
            found.append((f"x-ratelimit-reset-{name}", duration(full_s)))
        return tuple(found)


class Rates:
    """The accounts of the tenants that have a rate. ``routers`` is how many are live, with us."""

    def __init__(
        self,
        tenants: Iterable[TenantSettings],
        clock: Callable[[], float],
        routers: Callable[[], int],
    ) -> None:
        self._accounts = {
            one.name: _Account(one.rate, clock, routers)
            for one in tenants
            if one.rate.requests_per_min is not None or one.rate.tokens_per_min is not None
        }

    def __bool__(self) -> bool:
        return bool(self._accounts)

    def enter(self, tenant_name: str) -> RateSlot | None:
        """Admit one request of a tenant; None where it has no rate. Raises RequestRateError."""
        account = self._accounts.get(tenant_name)
        return account.enter() if account is not None else None


def _retry_after_s(wait_s: float) -> int:
    return max(1, min(LONGEST_RETRY_S, math.ceil(wait_s)))


def duration(seconds: float) -> str:
    """Return a time as OpenAI writes it: ``250ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1.0:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest_s = divmod(seconds, MINUTE_S)
    if not minutes:
        return f"{rest_s:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{int(minutes)}m{math.ceil(rest_s)}s"
