"""A router process with TLS on every side, and the clients that people have."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import signal
import sys
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import httpx2
import openai
import pytest

from replay.target import model_of, open_http
from state.embedded import EmbeddedValkey
from state.tls import ClientTls, client_context
from support.placed_engine import MODEL, TEXT, PlacedEngine
from support.placed_router import curl, placed, ran, upstream
from support.raw import RawClient, get
from support.tls import Authority, client, server
from warmroute.local import Processes
from warmroute.tls_option import CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

    import aiohttp

ROTATIONS = 20


def sdk(url: str, http: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http, timeout=20
    )


async def streamed(asking: openai.AsyncOpenAI) -> str:
    chat = await asking.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    return "".join([event.choices[0].delta.content or "" async for event in chat])


@pytest.fixture(name="authority")
def own_authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


async def test_clients_operators_and_replicas_are_reached_through_tls(
    authority: Authority, tmp_path: Path
) -> None:
    """Mutual on every side: curl, the openai SDK, ``warmroute replicas``, a Python server."""
    own = authority.issue("router")
    person = authority.issue("person")
    tls = server(authority.issue(), authority.ca)
    asking = {"client_ca": authority.ca, "client_certificates": "required"}
    believed = ClientTls(ca=authority.ca, certificate=own.certificate, key=own.key)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(PlacedEngine(tls=tls))
        router = await stack.enter_async_context(
            placed(
                tmp_path,
                listen_tls=authority.listener(authority.issue(), **asking),
                admin_tls=authority.listener(authority.issue(), **asking),
                replicas=[{"url": engine.url}],
                upstream=upstream(believed),
            )
        )
        assert router.url.startswith("https://")
        assert router.admin_url.startswith("https://")
        words = ("--cacert", authority.ca, "--cert", person.certificate, "--key", person.key)
        [view] = await router.all_up(*words)
        assert view["endpoint"] == engine.url
        verified = client(authority.ca, person)
        http = await stack.enter_async_context(httpx2.AsyncClient(verify=verified))
        assert await streamed(sdk(router.url, http)) == TEXT
        plain = await stack.enter_async_context(httpx2.AsyncClient(verify=client(authority.ca)))
        with pytest.raises(openai.APIConnectionError):
            await streamed(sdk(router.url, plain))
        metrics = await curl(*words, f"{router.admin_url}/metrics")
        assert 'warmroute_tls_certificate_expiry_seconds{listener="listen"}' in metrics
        assert 'warmroute_tls_handshake_failures_total{listener="listen"} 1.0' in metrics
        told = {
            **os.environ,
            CA_VARIABLE: authority.ca,
            CERTIFICATE_VARIABLE: person.certificate,
            KEY_VARIABLE: person.key,
        }
        command = (sys.executable, "-m", "warmroute", "replicas", "--admin", router.admin_url)
        status, out, error = await ran(*command, environment=told)
        assert (status, error) == (0, "")
        assert engine.url.partition("//")[2] in out
        status, _, error = await ran(*command)
        assert status == 2
        assert "certificate verify failed" in error


async def test_a_replica_with_an_unknown_certificate_is_down_and_says_why(
    authority: Authority, tmp_path: Path
) -> None:
    """Told in the log once, to operators always, and to clients as an overload of all."""
    foreign = Authority(tmp_path / "foreign")
    async with (
        PlacedEngine(tls=server(foreign.issue())) as engine,
        placed(
            tmp_path,
            replicas=[{"url": engine.url, "name": "gpu-0"}],
            upstream=upstream(ClientTls(ca=authority.ca)),
            health={"interval_s": 0.1},
        ) as router,
    ):
        async with asyncio.timeout(20):
            while (await router.replicas())[0]["fault"] is None:  # noqa: ASYNC110 - from outside
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        [view] = await router.replicas()
        reason = "certificate verify failed: unable to get local issuer certificate"
        assert (view["up"], view["fault"]) == (False, reason)
        line = f"replica gpu-0 at {engine.url}: {reason}"
        assert router.child.log_tail().count(line) == 1
        command = (sys.executable, "-m", "warmroute", "replicas", "--admin", router.admin_url)
        _, out, _ = await ran(*command, environment={**os.environ, "COLUMNS": "200"})
        assert f"gpu-0: {reason}" in out


async def test_a_sidecar_registers_a_replica_with_tls_that_is_replayed_against(
    authority: Authority, tmp_path: Path
) -> None:
    """Engine, record, router and the commands all go through TLS, each with its own word for it."""
    told = {CA_VARIABLE: authority.ca}
    async with AsyncExitStack() as stack:
        tls = server(authority.issue())
        engine = await stack.enter_async_context(PlacedEngine(tls=tls))
        state = await stack.enter_async_context(EmbeddedValkey())
        sidecars = await stack.enter_async_context(Processes(tmp_path, told))
        words = ("--engine", engine.url, "--redis", state.url, "--replica", "gpu-0")
        await sidecars.start("sidecar", "sidecar", *words, "--advertise", engine.url).ready()
        router = await stack.enter_async_context(
            placed(
                tmp_path,
                listen_tls=authority.listener(authority.issue()),
                state={"redis": state.url},
                upstream=upstream(ClientTls(ca=authority.ca)),
            )
        )
        [view] = await router.all_up()
        assert (view["replica"], view["endpoint"]) == ("gpu-0", engine.url)
        assert view["registered"]
        context = client_context(ClientTls(ca=authority.ca))
        async with open_http(20.0, context) as http:
            assert await model_of(http, router.url) == MODEL
            assert await streamed_plain(http, router.url) == TEXT


async def streamed_plain(http: aiohttp.ClientSession, url: str) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
        return str((await answer.json())["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ("listen_tls.key", "listen_tls.key: "),
        ("admin_tls.client_ca", "admin_tls.client_ca: "),
        ("upstream.tls.ca", "upstream.tls.ca: "),
    ],
)
async def test_a_file_that_is_not_there_ends_the_start_with_status_2(
    authority: Authority, tmp_path: Path, lost: str, named: str
) -> None:
    pair = authority.issue()
    missing = str(tmp_path / "nowhere.pem")
    whole = f"certificate: {pair.certificate}, key: {pair.key}"
    section = {
        "listen_tls.key": f"listen_tls: {{certificate: {pair.certificate}, key: {missing}}}",
        "admin_tls.client_ca": f"admin_tls: {{{whole}, client_ca: {missing}, "
        "client_certificates: required}",
        "upstream.tls.ca": f"upstream: {{tls: {{ca: {missing}}}}}",
    }[lost]
    path = tmp_path / "router.yaml"
    path.write_text(f"listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\n{section}\n")
    command = (sys.executable, "-m", "warmroute", "serve", "--config", str(path))
    status, out, error = await ran(*command)
    assert (status, out) == (2, "")
    assert f"{named}{missing}: No such file or directory" in error


async def test_certificates_are_rotated_under_load_without_a_failed_request(
    authority: Authority, tmp_path: Path
) -> None:
    """Every file in its turn, as ACME clients do it: other files in their places, then SIGHUP."""
    pair = authority.issue()
    own = authority.issue("router")
    # The replica asks for certificates, so that those of the router count, too.
    tls = server(authority.issue(), authority.ca)
    believed = ClientTls(ca=authority.ca, certificate=own.certificate, key=own.key)
    async with (
        PlacedEngine(tls=tls) as engine,
        placed(
            tmp_path,
            listen_tls=authority.listener(pair),
            replicas=[{"url": engine.url}],
            upstream=upstream(believed) | {"pool_idle_s": 0.05},
        ) as router,
    ):
        await router.all_up()
        port = int(router.url.rpartition(":")[2])
        verify = client(authority.ca)
        answered, is_over = 0, False
        serials: set[str] = set()

        async def ask() -> None:
            nonlocal answered
            while not is_over:
                async with httpx2.AsyncClient(verify=verify) as http:
                    for _ in range(3):
                        assert await streamed(sdk(router.url, http)) == TEXT
                        answered += 1

        async def see() -> str:
            connected = await RawClient.connect(port, tls=verify)
            found = connected.writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
            connected.send(get("/livez"))
            await connected.reply()
            await connected.close()
            return str(found)

        load = [asyncio.create_task(ask()) for _ in range(3)]
        serials.add(await see())
        for number in range(ROTATIONS):
            fresh = authority.issue("127.0.0.1", ends_in=dt.timedelta(days=2 + number))
            pair.replace(fresh)
            own.replace(authority.issue("router"))
            router.child.process.send_signal(signal.SIGHUP)
            deadline_s = time.monotonic() + 10
            while (seen := await see()) in serials:
                assert time.monotonic() < deadline_s, "the old certificate is still shown"
                await asyncio.sleep(0.02)
            serials.add(seen)
        is_over = True
        await asyncio.gather(*load)  # raises what any request failed with
        assert len(serials) == 1 + ROTATIONS
        assert answered >= ROTATIONS
        assert "stays in use" not in router.child.log_tail()
