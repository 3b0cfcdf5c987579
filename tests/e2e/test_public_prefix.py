"""Two sharing gates at a real worker: public pages are everybody's, what follows is a tenant's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest
import zmq

from sidecar.setting import WorkerSettings
from support.worker import RunningWorker, get_text, post_json, running_worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL: Final = "tiny"
PAGE_TOKENS: Final = 16
SYSTEM: Final = {"role": "system", "content": "You are the clerk of a small office. " * 8}
OTHER: Final = {"role": "system", "content": "You are the clerk of a large office. " * 8}
TASK: Final = "The invoice of March is confidential: 4711 pieces at 12.50 each. " * 3
COMPUTES: Final[dict[str, dict[str, Any]]] = {
    "numpy": {"compute": "numpy", "threads": 1},
    "synthetic": {"compute": "synthetic", "preset": "instant"},
}


class Office:
    """One worker and its clients, who send the same system prompt."""

    def __init__(self, worker: RunningWorker) -> None:
        self.worker = worker

    def ask(
        self, salt: str | None, task: str = TASK, system: dict[str, str] = SYSTEM
    ) -> dict[str, Any]:
        """Return the answer to one chat."""
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [system, {"role": "user", "content": task}],
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if salt is not None:
            body["cache_salt"] = salt
        status, answer = post_json(self.worker, "/v1/chat/completions", body)
        assert status == 200, answer
        return dict(answer)

    def cached(self, salt: str | None, task: str = TASK) -> int:
        """Ask, and return the cached tokens of the prompt."""
        return int(self.ask(salt, task)["usage"]["prompt_tokens_details"]["cached_tokens"])

    def prompt_ids(self, task: str, system: dict[str, str] = SYSTEM) -> list[int]:
        """Return the tokens of a chat's prompt."""
        messages = [system, {"role": "user", "content": task}]
        status, told = post_json(self.worker, "/tokenize", {"model": MODEL, "messages": messages})
        assert status == 200
        return list(told["tokens"])

    @property
    def public_tokens(self) -> int:
        """What all prompts with the system prompt have in common, in full pages."""
        one, other = self.prompt_ids("a"), self.prompt_ids("b")
        shared = next(
            at for at, pair in enumerate(zip(one, other, strict=True)) if len({*pair}) > 1
        )
        return shared // PAGE_TOKENS * PAGE_TOKENS

    @property
    def reusable_tokens(self) -> int:
        """What of the whole prompt can come from the cache: full pages, not the last token."""
        return (len(self.prompt_ids(TASK)) - 1) // PAGE_TOKENS * PAGE_TOKENS


def settings(compute: str, public_prefixes: str | None) -> WorkerSettings:
    return WorkerSettings(
        model=MODEL,
        pages=512,
        page_tokens=PAGE_TOKENS,
        public_prefixes=public_prefixes,
        **COMPUTES[compute],
    )


@pytest.fixture
def allow_list(tmp_path: Path) -> str:
    path = tmp_path / "public.json"
    path.write_text(json.dumps([{"messages": [SYSTEM]}]))
    return str(path)


@pytest.fixture(params=COMPUTES)
def office(request: pytest.FixtureRequest, allow_list: str) -> Iterator[Office]:
    """Run a worker whose allow-list has the system prompt."""
    with running_worker(settings(request.param, allow_list)) as worker:
        yield Office(worker)


def test_a_tenant_hits_the_public_pages_that_another_computed_and_no_page_of_its_task(
    office: Office,
) -> None:
    """Both ask exactly the same; without the salts the second would hit all of it."""
    public, reusable = office.public_tokens, office.reusable_tokens
    assert PAGE_TOKENS < public < reusable - PAGE_TOKENS
    assert office.cached("a") == 0
    assert office.cached("b") == public
    assert [office.cached("a"), office.cached("b")] == [reusable, reusable]


def test_a_client_without_a_salt_hits_the_public_pages_and_no_tenants_task(office: Office) -> None:
    assert office.cached("a") == 0
    assert office.cached(None) == office.public_tokens
    assert office.cached(None) == office.reusable_tokens
    assert office.cached("b") == office.public_tokens


def test_tenants_hit_the_public_pages_that_a_client_without_a_salt_computed(
    office: Office,
) -> None:
    assert office.cached(None) == 0
    assert office.cached("a") == office.public_tokens
    assert office.cached("a") == office.reusable_tokens


def test_answers_are_the_same_whoever_computed_the_public_pages(office: Office) -> None:
    """Greedy tokens from shared pages are those from pages of one's own."""
    answers = [office.ask(salt)["choices"][0]["token_ids"] for salt in ("a", "b", None, "c")]
    post_json(office.worker, "/reset_prefix_cache", {})
    alone = office.ask("c")
    assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answers == [alone["choices"][0]["token_ids"]] * 4


def test_a_private_tail_is_its_tenants_and_a_public_head_is_nobodys(
    office: Office,
) -> None:
    office.cached("a")
    office.cached("b")
    [device] = json.loads(get_text(office.worker, "/debug/kv"))["tiers"]
    owned = [sum(states.values()) for states in device["tenants"].values()]
    public = office.public_tokens // PAGE_TOKENS
    assert owned == [len(office.prompt_ids(TASK)) // PAGE_TOKENS - public] * 2
    assert device["states"]["evictable"] == public + sum(owned)


@pytest.mark.parametrize("compute", COMPUTES)
def test_without_an_allow_list_tenants_share_nothing(compute: str) -> None:
    with running_worker(settings(compute, None)) as worker:
        office = Office(worker)
        assert [office.cached(salt) for salt in ("a", "b", None, "c")] == [0, 0, 0, 0]
        assert office.cached("a") == office.reusable_tokens


def test_a_system_prompt_that_is_not_on_the_list_is_private(office: Office) -> None:
    """Also where it begins like a public one: a prefix is public as a whole, or not."""
    longer = {"role": "system", "content": SYSTEM["content"] + "And kind. " * 8}
    office.ask("a")
    for salt, system in (("b", OTHER), ("c", OTHER), ("d", longer), ("e", longer)):
        usage = office.ask(salt, TASK, system)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_events_announce_the_private_tail_with_its_salt_and_the_public_head_without(
    office: Office,
) -> None:
    """A router that reads them keys the tail by ``extra_keys``, and the head for all."""
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVTIMEO, 5000)
        dealer.connect(office.worker.address.replay)
        office.cached("a")
        office.cached("b")
        events = replayed(dealer)
    finally:
        context.destroy(linger=0)
    assert {event["type"] for event in events} == {"BlockStored"}
    ids, public = office.prompt_ids(TASK), office.public_tokens
    heads = [event for event in events if event["parent_block_hash"] is None]
    [head] = heads  # of the second tenant only the tail is new
    assert head["token_ids"] == ids[:public]
    assert head["extra_keys"] == [None] * (public // PAGE_TOKENS)
    tails = [event for event in events if event["extra_keys"][0] is not None]
    assert [event["extra_keys"][0] for event in tails] == [["a"], ["b"]]
    for tail in tails:
        assert tail["parent_block_hash"] == head["block_hashes"][-1]
        assert tail["token_ids"] == ids[public : public + len(tail["token_ids"])]
        assert tail["extra_keys"][1:] == [None] * (len(tail["block_hashes"]) - 1)
    assert not set(tails[0]["block_hashes"]) & set(tails[1]["block_hashes"])


def replayed(dealer: zmq.Socket[bytes]) -> list[dict[str, Any]]:
    """Return all events so far, as the replay socket tells them."""
    dealer.send_multipart([b"", (0).to_bytes(8, "big")])
    events: list[dict[str, Any]] = []
    while True:
        *_, payload = dealer.recv_multipart()
        if not payload:
            return events
        events += msgspec.msgpack.decode(payload)[1]
