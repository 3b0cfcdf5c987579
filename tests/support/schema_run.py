"""Let schemathesis loose on a real router in front of a bundled worker: ``make test-schemathesis``.

``python -m support.schema_run --schemathesis PATH``: both listeners, by their own documents.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Final

from support.fleet import FleetPlan, LocalFleet

CHECKS: Final = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "response_headers_conformance"),
)
"""Not that bad bodies are refused: fields that the router does not read are the engine's."""
ENDLESS: Final = "/admin/events"
"""A stream without an end."""


async def run(program: Path, examples: int) -> int:
    """Run it on the clients' listener and on the operators'; return the worst status."""
    worst = 0
    with tempfile.TemporaryDirectory() as directory:
        async with LocalFleet(Path(directory), FleetPlan(replicas=1)) as fleet:
            for url in (fleet.router.url, fleet.router.admin_url):
                words = [str(program), "run", f"{url}/openapi.json", "--checks", ",".join(CHECKS)]
                words += ["--max-examples", str(examples), "--seed", "1", "--no-color"]
                words += ["--request-timeout", "30", "--warnings", "off"]
                if url == fleet.router.admin_url:
                    words += ["--exclude-path", ENDLESS, "--exclude-path-regex", "^/dashboard"]
                words += ["--header", "Connection: close"]
                process = await asyncio.create_subprocess_exec(*words)
                worst = max(worst, await process.wait())
    return worst


def main() -> None:
    """Run it and end with its status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemathesis", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=100)
    options = parser.parse_args()
    sys.exit(asyncio.run(run(options.schemathesis, options.examples)))


if __name__ == "__main__":
    main()
