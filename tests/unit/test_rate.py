"""Rates of tenants: buckets that are filled with time, and what a client is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from prompt.model import Unroutable
from router.admission_setting import RateSettings
from router.error import error_body, error_headers
from router.observer import Usage
from router.rate import Rates, duration
from router.shed import RequestRateError, Shed, TokenRateError
from router.tenant import TenantSettings

if TYPE_CHECKING:
    from router.chooser import Routed
    from router.rate import RateSlot


class Desk:
    """One tenant's rate, a clock, and so many live routers."""

    def __init__(self, **rate: Any) -> None:
        self.now_s = 100.0
        self.routers = 1
        tenant = TenantSettings(name="a", key_digests=("0" * 64,), rate=RateSettings(**rate))
        self.rates = Rates([tenant], lambda: self.now_s, lambda: self.routers)

    def enter(self) -> RateSlot:
        slot = self.rates.enter("a")
        assert slot is not None
        return slot


def routed(tokens: int, unroutable: Unroutable | None = None) -> Routed:
    prompt = SimpleNamespace(unroutable=unroutable)
    return cast("Routed", SimpleNamespace(prompt=prompt, prompt_tokens=tokens))


def left(slot: RateSlot, what: str) -> int:
    return int(dict(slot.headers())[f"x-ratelimit-remaining-{what}"])


def test_requests_beyond_the_burst_wait_for_the_next_one() -> None:
    desk = Desk(requests_per_min=60, burst_s=2)
    desk.enter()
    desk.enter()
    with pytest.raises(RequestRateError) as refused:
        desk.enter()
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    assert refused.value.reason is Shed.RATE_REQUESTS
    desk.now_s += 0.99
    with pytest.raises(RequestRateError):
        desk.enter()
    desk.now_s += 0.02
    desk.enter()


def test_a_full_bucket_gets_no_fuller() -> None:
    desk = Desk(requests_per_min=60, burst_s=2)
    desk.now_s += 3_600.0
    desk.enter()
    assert left(desk.enter(), "requests") == 0
    with pytest.raises(RequestRateError):
        desk.enter()


def test_a_request_that_overdraws_the_tokens_is_served_and_the_next_one_waits() -> None:
    desk = Desk(tokens_per_min=600, burst_s=60)
    desk.enter().charge(routed(1_200), 5_000)
    with pytest.raises(TokenRateError) as refused:
        desk.enter()
    assert refused.value.reason is Shed.RATE_TOKENS
    assert refused.value.retry_after_s == 60, "600 tokens of debt, and never told to wait longer"
    desk.now_s += 59.0
    with pytest.raises(TokenRateError) as refused:
        desk.enter()
    assert refused.value.retry_after_s == 2
    desk.now_s += 2.0
    desk.enter()


def test_a_token_refusal_costs_no_request() -> None:
    desk = Desk(tokens_per_min=60, requests_per_min=60, burst_s=10)
    desk.enter().charge(routed(20), 0)
    for _ in range(20):
        with pytest.raises(TokenRateError):
            desk.enter()
    desk.now_s += 15.0
    assert left(desk.enter(), "requests") == 9


def test_what_the_engine_counted_takes_the_place_of_the_prediction_once() -> None:
    desk = Desk(tokens_per_min=6_000, burst_s=60)
    slot = desk.enter()
    slot.charge(routed(1_000), 0)
    slot.charge(routed(1_000), 0)
    assert left(slot, "tokens") == 5_000
    for _ in range(2):
        slot.end(Usage(900, 50, 0))
    assert left(slot, "tokens") == 6_000 - 950


@pytest.mark.parametrize(
    ("why", "tokens"), [(Unroutable.LOAD_ONLY, 0), (Unroutable.NO_TOKENIZER, 1_000)]
)
def test_a_prompt_that_cannot_be_read_counts_by_its_bytes(why: Unroutable, tokens: int) -> None:
    desk = Desk(tokens_per_min=6_000, burst_s=60)
    slot = desk.enter()
    slot.charge(routed(0, why), 4_000)
    assert left(slot, "tokens") == 6_000 - tokens


def test_a_request_without_an_answer_keeps_what_it_was_predicted_to_cost() -> None:
    desk = Desk(tokens_per_min=6_000, burst_s=60)
    slot = desk.enter()
    slot.end(None)
    assert left(slot, "tokens") == 6_000, "it was never routed"
    slot = desk.enter()
    slot.charge(routed(100), 0)
    slot.end(None)
    assert left(slot, "tokens") == 5_900


def test_live_routers_share_a_rate() -> None:
    desk = Desk(requests_per_min=240, burst_s=10)
    desk.routers = 4
    slot = desk.enter()
    told = dict(slot.headers())
    assert told["x-ratelimit-limit-requests"] == "10"
    assert told["x-ratelimit-remaining-requests"] == "9"
    for _ in range(9):
        desk.enter()
    with pytest.raises(RequestRateError):
        desk.enter()
    desk.now_s += 1.0
    desk.enter()
    with pytest.raises(RequestRateError):
        desk.enter()


def test_a_rate_below_one_unit_still_lets_one_through() -> None:
    desk = Desk(requests_per_min=1, burst_s=1)
    desk.routers = 8
    desk.enter()
    with pytest.raises(RequestRateError) as refused:
        desk.enter()
    assert refused.value.retry_after_s == 60


def test_a_refusal_has_openais_type_and_headers() -> None:
    desk = Desk(requests_per_min=60, tokens_per_min=60_000, burst_s=1)
    desk.enter()
    with pytest.raises(RequestRateError) as refused:
        desk.enter()
    headers = error_headers(refused.value)
    assert headers == {
        "Retry-After": "1",
        "x-ratelimit-limit-requests": "1",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "1000",
        "x-ratelimit-reset-tokens": "0ms",
    }
    assert b'"type":"rate_limit_exceeded"' in error_body(refused.value)


def test_who_has_no_rate_pays_nothing() -> None:
    desk = Desk()
    assert not desk.rates
    assert desk.rates.enter("a") is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0ms"),
        (0.0101, "11ms"),
        (1.0, "1s"),
        (1.25, "1.25s"),
        (59.5, "59.5s"),
        (366.2, "6m7s"),
    ],
)
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
