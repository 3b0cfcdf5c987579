"""EndpointSlices of a service, as an API server tells them, well and badly."""

from __future__ import annotations

import asyncio
import contextlib
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from router.discovery import kube
from router.discovery.directory import Bouncer, Directory, Shelf
from router.discovery.kube import KubeWatch
from router.discovery.setting import KubernetesSource
from router.registration_setting import RegistrationSettings
from support import fleet
from support.kube_server import KubeServer, endpoint, endpoint_slice
from support.placed_engine import PlacedEngine
from support.placed_router import placed
from support.raw import with_both_loops
from support.tls import Authority, server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


def two() -> dict[str, Any]:
    return endpoint_slice("s1", endpoint("a", "10.0.0.1"), endpoint("b", "10.0.0.2"))


def source(folder: Path, api: KubeServer, **settings: Any) -> KubernetesSource:
    (folder / "token").write_text(f"{api.token}\n")
    (folder / "namespace").write_text("llm")
    told: dict[str, Any] = {"ca_file": None, "port": "http"} | settings
    return KubernetesSource(
        service="vllm",
        api_server=api.url,
        token_file=str(folder / "token"),
        namespace_file=str(folder / "namespace"),
        **told,
    )


@asynccontextmanager
async def watching(folder: Path, api: KubeServer, **settings: Any) -> AsyncIterator[Shelf]:
    shelf = Directory(2, lambda _: None).shelf("a service")
    bouncer = Bouncer(RegistrationSettings())
    watch = KubeWatch(source(folder, api, **settings), shelf, bouncer, random.Random(1))
    task = asyncio.create_task(watch.run())
    try:
        yield shelf
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(is_so: Callable[[], bool]) -> None:
    async def is_true() -> bool:
        return is_so()

    await fleet.until(is_true, "what the API server told")


def names(shelf: Shelf) -> list[str]:
    return [f"{m.replica}{'-' if m.is_draining else ''}" for m in shelf.members]


@with_both_loops
async def test_a_list_then_what_changes(tmp_path: Path) -> None:
    async with KubeServer() as api:
        api.put(two())
        async with watching(tmp_path, api) as shelf:
            await until(lambda: api.open_watches == 1)
            assert names(shelf) == ["a", "b"]
            assert shelf.members[0].endpoint.url == "http://10.0.0.1:8000"
            assert {m.source for m in shelf.members} == {"kubernetes"}
            api.put(endpoint_slice("s2", endpoint("c", "10.0.0.3")))
            await until(lambda: names(shelf) == ["a", "b", "c"])
            ending = endpoint("b", "10.0.0.2", ready=False, terminating=True)
            api.put(endpoint_slice("s1", endpoint("a", "10.0.0.1"), ending))
            await until(lambda: names(shelf) == ["a", "b-", "c"])
            api.delete("s1")
            await until(lambda: names(shelf) == ["c"])
            assert api.lists == 1


async def test_a_list_of_many_pages_is_one_list(tmp_path: Path) -> None:
    async with KubeServer(page_slices=1) as api:
        for number in range(3):
            api.put(endpoint_slice(f"s{number}", endpoint(f"p{number}", f"10.0.0.{number}")))
        async with watching(tmp_path, api) as shelf:
            await until(lambda: names(shelf) == ["p0", "p1", "p2"])
            assert api.lists == 1


async def test_a_dropped_watch_goes_on_at_the_version_of_the_last_event(tmp_path: Path) -> None:
    async with KubeServer() as api:
        api.put(two())
        async with watching(tmp_path, api) as shelf:
            await until(lambda: api.open_watches == 1)
            api.put(endpoint_slice("s2", endpoint("c", "10.0.0.3")))
            await until(lambda: names(shelf) == ["a", "b", "c"])
            api.drop()
            await until(lambda: not api.open_watches)
            api.put(endpoint_slice("s3", endpoint("d", "10.0.0.4")))
            await until(lambda: names(shelf) == ["a", "b", "c", "d"])
            assert [one["resourceVersion"] for one in api.watches] == ["101", "102"]
            assert api.lists == 1
            await until(lambda: shelf.fault is None)


async def test_a_bookmark_moves_the_version_and_nothing_else(tmp_path: Path) -> None:
    async with KubeServer() as api:
        api.put(two())
        async with watching(tmp_path, api) as shelf:
            await until(lambda: api.open_watches == 1)
            api.bookmark(555)
            api.drop()
            await until(lambda: len(api.watches) == 2)
            assert api.watches[1]["resourceVersion"] == "555"
            assert api.watches[1]["allowWatchBookmarks"] == "true"
            assert names(shelf) == ["a", "b"]


async def test_a_version_that_is_gone_makes_a_new_list(tmp_path: Path) -> None:
    async with KubeServer() as api:
        api.put(two())
        async with watching(tmp_path, api) as shelf:
            await until(lambda: api.open_watches == 1)
            api.put(endpoint_slice("s2", endpoint("c", "10.0.0.3")), is_announced=False)
            api.fail_watches(410)
            await until(lambda: names(shelf) == ["a", "b", "c"])
            assert api.lists == 2
            api.oldest = api.version + 1
            api.drop()
            await until(lambda: api.lists >= 3)
            api.oldest = 0
            await until(lambda: api.open_watches == 1)
            assert names(shelf) == ["a", "b", "c"]


@pytest.mark.parametrize("status", [410, 429, 500, 503])
async def test_an_api_server_that_fails_changes_nothing_and_is_asked_again(
    tmp_path: Path, status: int
) -> None:
    async with KubeServer() as api:
        api.put(two())
        async with watching(tmp_path, api) as shelf:
            await until(lambda: api.open_watches == 1)
            api.status = status
            api.slices.clear()
            api.drop()
            asked = len(api.asked)
            await until(lambda: len(api.asked) > asked + 1)
            assert names(shelf) == ["a", "b"]
            api.status = None
            api.put(endpoint_slice("s2", endpoint("c", "10.0.0.3")))
            await until(lambda: "c" in names(shelf))


async def test_an_error_event_changes_nothing(tmp_path: Path) -> None:
    async with KubeServer() as api:
        api.put(two())
        async with watching(tmp_path, api) as shelf:
            await until(lambda: api.open_watches == 1)
            api.fail_watches(500)
            await until(lambda: len(api.watches) == 2)
            assert names(shelf) == ["a", "b"]


async def test_the_token_is_read_anew_for_each_request(tmp_path: Path) -> None:
    async with KubeServer() as api:
        api.put(two())
        async with watching(tmp_path, api) as shelf:
            await until(lambda: api.open_watches == 1)
            api.token = "second"  # noqa: S105 - the test's own
            api.drop()
            await until(lambda: shelf.fault == "the API server answered 401")
            assert names(shelf) == ["a", "b"]
            (tmp_path / "token").write_text("second")
            api.put(endpoint_slice("s2", endpoint("c", "10.0.0.3")))
            await until(lambda: names(shelf) == ["a", "b", "c"])


async def test_nobody_is_believed_after_a_second_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "AGAIN_S", 0.2)
    async with KubeServer() as api:
        api.put(two())
        async with watching(tmp_path, api) as shelf:
            await until(lambda: api.open_watches == 1)
            api.delete("s1")
            await asyncio.sleep(0.1)
            assert names(shelf) == ["a", "b"]
            await until(lambda: names(shelf) == [])
            assert api.lists == 2
            api.put(two())
            await until(lambda: names(shelf) == ["a", "b"])


async def test_everything_is_listed_anew_now_and_then(tmp_path: Path) -> None:
    """What a watch missed without knowing comes with the next list."""
    async with KubeServer() as api:
        api.put(two())
        async with watching(tmp_path, api, resync_s=0.5) as shelf:
            await until(lambda: api.open_watches == 1)
            api.put(endpoint_slice("s2", endpoint("c", "10.0.0.3")), is_announced=False)
            await until(lambda: names(shelf) == ["a", "b", "c"])
            assert api.lists >= 2
            del api.slices["s1"]
            await until(lambda: names(shelf) == ["c"])


async def test_a_slow_list_is_given_up_and_the_last_one_kept(tmp_path: Path) -> None:
    async with KubeServer() as api:
        api.put(two())
        async with watching(tmp_path, api, resync_s=0.3, timeout_s=0.5) as shelf:
            await until(lambda: len(shelf.members) == 2)
            api.delay_s = 2.0
            await until(lambda: shelf.fault is not None)
            assert names(shelf) == ["a", "b"]
            api.delay_s = 0.0
            await until(lambda: shelf.fault is None)


async def test_an_api_server_that_is_away_at_the_start_is_waited_for(tmp_path: Path) -> None:
    async with KubeServer(status=503) as api, watching(tmp_path, api) as shelf:
        await until(lambda: shelf.fault is not None)
        api.put(two())
        api.status = None
        await until(lambda: names(shelf) == ["a", "b"])


async def test_the_api_server_is_known_by_its_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    context = server(authority.issue())
    other = Authority(tmp_path / "other")
    async with KubeServer(context=context) as api:
        api.put(two())
        async with watching(tmp_path, api, ca_file=other.ca) as shelf:
            await until(lambda: shelf.fault is not None)
            assert shelf.members == ()
            assert api.asked == []
        async with watching(tmp_path, api, ca_file=authority.ca) as shelf:
            await until(lambda: names(shelf) == ["a", "b"])


async def test_a_router_serves_the_pods_of_a_service(tmp_path: Path) -> None:
    async with KubeServer() as api, PlacedEngine() as engine:
        port = int(engine.url.rpartition(":")[2])
        api.put(endpoint_slice("s1", endpoint("pod-1", "127.0.0.1"), port=port))
        async with placed(tmp_path, discovery={"kubernetes": source(tmp_path, api)}) as router:
            (view,) = await router.all_up()
            assert (view["replica"], view["source"]) == ("pod-1", "kubernetes")
            ending = endpoint("pod-1", "127.0.0.1", ready=False, terminating=True)
            api.put(endpoint_slice("s1", ending, port=port))

            async def is_draining() -> bool:
                return bool((await router.replicas())[0]["draining"])

            await fleet.until(is_draining, "draining")
