"""The proxies that are measured: every one a process in front of the same two stub replicas."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meter import on_core
from peers.install import peer_python, wanted
from warmroute.local import Child, ChildFailedError, Processes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

EXACT = "warmroute, exact"
ROUGH = "warmroute, byte blocks"
RELAY = "warmroute's bare relay"
AIOHTTP = "aiohttp server + client"
NGINX = "nginx"
SGLANG = "sglang-router"
VLLM = "vllm-router"
HELD = ("exact, watched", "byte blocks, watched")
"""The router with a watch on its event loop (``held.py``)."""
NAMES = (NGINX, RELAY, AIOHTTP, SGLANG, VLLM, ROUGH, EXACT)
PROXY_CORE, LOAD_CORE = 0, 1
START_S = 120.0
NGINX_CONNECTIONS = 32_768
"""A stream takes two; a new client gets none, and is reset, where there are no more."""
STOP_S = 3.0
HTTP_OK = 200
CAPACITY_TOKENS = 64_000_000
"""What the router is told of each stub's KV cache: beyond all prompts of a run."""
BASELINE, WATCHED = (Path(__file__).with_name(name) for name in ("baseline.py", "held.py"))
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
"""No peer asks anything outside of this machine."""
PROBE = b'{"model":"bench","messages":[{"role":"user","content":"ready?"}]}'
NGINX_CONF = """\
daemon off; master_process off; worker_processes 1; pid {at}/nginx.pid; error_log {at}/error.log;
events {{ worker_connections {most}; }}
http {{
  access_log off;
  client_body_temp_path {at}/body; proxy_temp_path {at}/proxy; fastcgi_temp_path {at}/fastcgi;
  uwsgi_temp_path {at}/uwsgi; scgi_temp_path {at}/scgi;
  client_max_body_size 64m; client_body_buffer_size 2m;
  keepalive_requests 10000000;
  upstream replicas {{ {servers} keepalive 1024; keepalive_requests 10000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=1024;
    location / {{
      proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class Contender:
    """A running proxy; ``output`` is the file of its standard output."""

    name: str
    port: int
    pid: int
    output: Path

    def longest_hold_us(self) -> tuple[int, int]:
        """Return the longest hold of a watched router since the last call, see ``held.py``.

        In microseconds: of wall time, of CPU of the loop's thread. Raises ChildFailedError.
        """
        before = self.output.read_text(encoding="utf-8").count("\n")
        os.kill(self.pid, signal.SIGUSR1)
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            lines = self.output.read_text(encoding="utf-8").split("\n")[before:-1]
            if lines:
                _, wall_us, loop_us = lines[0].split()
                return int(wall_us), int(loop_us)
            time.sleep(0.01)
        message = f"{self.name} does not tell its longest hold"
        raise ChildFailedError(message)


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def missing(name: str) -> str | None:
    """Return why a proxy cannot be measured here, None when it can."""
    if name == NGINX and shutil.which("nginx") is None:
        return "not found on this machine"
    if name in (SGLANG, VLLM) and peer_python(name) is None:
        return "not installed: make bench-peers"
    return None


def label(name: str) -> str:
    """Return the name with the version, where that is a peer's."""
    return wanted(name).replace("==", " ") if name in (SGLANG, VLLM) else name


def _answers(port: int) -> bool:
    """Return whether a proxy answers a chat."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(
            "POST", "/v1/chat/completions", PROBE, {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        response.read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return response.status == HTTP_OK


class Field:
    """Starts proxies in front of the stub's ports; ``tokenizer`` is a model's directory."""

    def __init__(
        self, processes: Processes, directory: Path, ports: Sequence[int], tokenizer: Path
    ) -> None:
        self._processes = processes
        self._directory = directory
        self._ports = ports
        self._tokenizer = tokenizer

    @contextlib.contextmanager
    def running(
        self, names: Collection[str], core: int | None = PROXY_CORE
    ) -> Iterator[list[Contender]]:
        """Start those that this machine has, each on ``core`` alone; stop them at the end."""
        present = [name for name in names if missing(name) is None]
        started: list[tuple[str, Child, int | None]] = []
        try:
            with on_core(core):
                for name in present:
                    started.append((name, *self._start(name)))  # noqa: PERF401 - one may fail
            yield [self._when_ready(*one) for one in started]
        finally:
            for _, child, _ in reversed(started):
                self._processes.stop(child, grace_s=STOP_S)

    def _start(self, name: str) -> tuple[Child, int | None]:
        """Start one; returns it with its port, where that had to be chosen before."""
        if name in (ROUGH, EXACT, *HELD):
            words = ["--config", str(self._config()), "--listen", "127.0.0.1:0"]
            words += ["--admin", "127.0.0.1:0", "--log-level", "error"]
            words += ["--model", f"bench={self._tokenizer}"] if name in (EXACT, HELD[0]) else []
            serve = [str(WATCHED)] if name in HELD else ["-m", "warmroute", "serve"]
            return self._processes.start_command(name, [sys.executable, *serve, *words]), None
        if name in (RELAY, AIOHTTP):
            kind = "relay" if name == RELAY else "aiohttp"
            command = [sys.executable, str(BASELINE), kind, str(self._ports[0])]
            return self._processes.start_command(kind, command), None
        port = free_port()
        command = self._nginx(port) if name == NGINX else self._peer(name, port)
        return self._processes.start_command(name, command), port

    def _config(self) -> Path:
        """Return the router's configuration: a stub has no cache that the prompts could outgrow."""
        replicas = [{"url": url, "kv_capacity_tokens": CAPACITY_TOKENS} for url in self._urls()]
        path = self._directory / "warmroute.yaml"
        path.write_text(
            json.dumps({"replicas": replicas, "attend_sidecars": False}),
            encoding="utf-8",
        )
        return path

    def _urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def _nginx(self, port: int) -> list[str]:
        at = self._directory / f"nginx-{port}"
        at.mkdir()
        servers = " ".join(f"server 127.0.0.1:{replica};" for replica in self._ports)
        conf = at / "nginx.conf"
        conf.write_text(
            NGINX_CONF.format(at=at, servers=servers, port=port, most=NGINX_CONNECTIONS),
            encoding="utf-8",
        )
        return ["nginx", "-p", str(at), "-e", str(at / "error.log"), "-c", str(conf)]

    def _peer(self, name: str, port: int) -> list[str]:
        python = peer_python(name)
        if python is None:
            raise ChildFailedError(name)
        module = {VLLM: "vllm_router.launch_router", SGLANG: "sglang_router.launch_router"}[name]
        command = [str(python), "-m", module, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--policy", "cache_aware", "--worker-urls", *self._urls()]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        return [*command, "--log-level", "error"]

    def _when_ready(self, name: str, child: Child, port: int | None) -> Contender:
        """Wait until a proxy answers; raises ChildFailedError."""
        if port is None:
            port = int(asyncio.run(child.ready(START_S)).words[0].rpartition(":")[2])
        deadline_s = time.monotonic() + START_S
        while not _answers(port):
            if not child.is_alive() or time.monotonic() > deadline_s:
                message = f"{name} does not answer:\n{child.log_tail()}"
                raise ChildFailedError(message)
            time.sleep(0.05)
        return Contender(name, port, child.process.pid, child.output)
