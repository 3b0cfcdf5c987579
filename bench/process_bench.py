"""Several router processes against one: CPU per request, and how long a start takes.

    python bench/process_bench.py [--quick] [--processes 2] [--requests 4000] [--rounds 5]

``make bench-native`` first. The same load, kept-alive connections and warm conversations, goes in
turns to a router of one process and to one of several; the CPU is that of all processes together,
the supervisor's among them. A connection belongs to a process. *kept*: each conversation has a
connection of its own, as the clients of agents do (its first turn, which no process knows, is
counted too). *mixed*: its next turn goes on any connection that is free, so that each process reads
what another has read before. A start is from the program's own to the first 200 of ``/readyz``,
with one replica given by its address and the private state server.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from contender import ENVIRONMENT, free_port
from figures import REPORT_HELP, write_report
from meter import cpu_s
from native import run_load
from rig import rig
from warmroute.local import Processes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rig import Rig
    from warmroute.local import Child

BODY_BYTES = 32 * 1024
CONNECTIONS = 16
READY_S = 120.0
HTTP_OK = 200


@dataclass(frozen=True, slots=True)
class Router:
    """A running router of so many processes."""

    processes: int
    port: int
    admin: int
    child: Child

    def pids(self) -> list[int]:
        """Return all its processes: several have a supervisor besides."""
        own = self.child.process.pid
        if self.processes == 1:
            return [own]
        rows = json.loads(asked(self.admin, "/admin/processes")[1])
        return [own, *(row["pid"] for row in rows)]

    def cpu_s(self) -> float:
        """Return the CPU seconds of all of them so far."""
        return sum(map(cpu_s, self.pids()))


def asked(port: int, path: str) -> tuple[int, bytes]:
    """Return status and body of a GET; raises OSError where nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def started(
    folder: Processes, ports: Sequence[int], processes: int, *flags: str
) -> tuple[Router, float]:
    """Start a router; return it and how long it took until it was ready."""
    port, admin = free_port(), free_port()
    words = ["serve", "--listen", f"127.0.0.1:{port}", "--admin", f"127.0.0.1:{admin}"]
    words += [word for one in ports for word in ("--replica", f"http://127.0.0.1:{one}")]
    began_s = time.monotonic()
    child = folder.start("router", *words, "--processes", str(processes), *flags)
    while not is_ready(port):
        if not child.is_alive() or time.monotonic() - began_s > READY_S:
            message = f"a router of {processes} processes is not ready: {child.log_tail()}"
            raise SystemExit(message)
        time.sleep(0.002)
    return Router(processes, port, admin, child), time.monotonic() - began_s


def is_ready(port: int) -> bool:
    """Return whether ``/readyz`` answers 200 to clients."""
    try:
        return asked(port, "/readyz")[0] == HTTP_OK
    except (OSError, http.client.HTTPException):
        return False


def shares(
    on: Rig, routers: Sequence[Router], requests: int, rounds: int
) -> dict[str, dict[int, list[float]]]:
    """Return the CPU microseconds per request of each router, round by round, in turns."""
    found: dict[str, dict[int, list[float]]] = {
        way: {one.processes: [] for one in routers} for way in ("kept", "mixed")
    }
    for turn in range(rounds + 1):
        order = routers if turn % 2 else routers[::-1]
        for one, way in itertools.product(order, found):
            known = on.conversations(BODY_BYTES, CONNECTIONS)
            openers = known.openers()
            words: list[object]
            if way == "mixed":
                run_load(one.port, on.write(openers, len(openers)), 1, len(openers))
                count, words = requests, [on.write(known, requests)]
            else:  # a connection ends with its load, so it begins with the opener
                bodies = itertools.chain(openers, itertools.islice(known, requests))
                count = len(openers) + requests
                words = ["KEEP", on.write(bodies, count)]
            before_s = one.cpu_s()
            run_load(one.port, *words, CONNECTIONS, count)
            if turn:  # the first one warms up
                found[way][one.processes].append((one.cpu_s() - before_s) / count * 1e6)
    return found


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(
        description="CPU per request of several processes against one; the time of a start."
    )
    parser.add_argument("--quick", action="store_true", help="small amounts: does it work?")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--requests", type=int, default=4_000, help="of each round")
    parser.add_argument("--rounds", type=int, default=5, help="of both, in turns")
    parser.add_argument("--report", default="processes", help=REPORT_HELP)
    options = parser.parse_args()
    requests, rounds, starts = options.requests, options.rounds, options.rounds
    if options.quick:
        requests, rounds, starts = 200, 1, 1
    with rig(None) as on, tempfile.TemporaryDirectory() as name:
        folder, ports = Processes(Path(name), ENVIRONMENT), on.stub.ports
        flags = ("--no-sidecars",)
        try:
            routers = [started(folder, ports, count, *flags)[0] for count in (1, options.processes)]
            found = shares(on, routers, requests, rounds)
            for one in routers:
                folder.stop(one.child)
            times = []
            for _ in range(starts):
                router, took_s = started(folder, ports[:1], 1)
                times.append(took_s)
                folder.stop(router.child)
        finally:
            folder.stop_all()
    lines = ["| | measured | budget |", "|---|---:|---:|"]
    ratios: dict[str, list[float]] = {}
    for way, cpu_us in found.items():
        pairs = zip(cpu_us[1], cpu_us[options.processes], strict=True)
        ratios[way] = [several / single for single, several in pairs]
        for count, values in cpu_us.items():
            name = f"CPU per request, {way}, processes: {count}, us"
            lines.append(f"| {name} | {statistics.median(values):.0f} | |")
        ratio = statistics.median(ratios[way])
        lines.append(f"| ratio, {way} (median of {rounds} pairs) | {ratio:.3f} | 1.10 |")
    start = f"start to ready, one static replica, s (median of {starts})"
    lines.append(f"| {start} | {statistics.median(times):.2f} | 1.00 |")
    print("\n".join(lines))
    told = {"cpu_us": found, "ratios": ratios["kept"], "mixed": ratios["mixed"], "start_s": times}
    print(write_report(options.report, told, ["\n".join(lines)]))


if __name__ == "__main__":
    main()
