"""What the package consists of besides its own code: a bill of materials, and the licences.

``python -m support.sbom FILE`` writes CycloneDX 1.6 (JSON) from the lock file of running and the
table of vendored files. The same inputs make the same bytes: there is no time in it.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tomllib
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgspec

ROOT: Final = Path(__file__).resolve().parents[2]
LOCK: Final = ROOT / "requirements" / "runtime.lock"
VENDOR: Final = ROOT / "router" / "dashboard" / "vendor"
_PIN: Final = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9._+!-]+)(?: ; ([^\\\n]+?))? \\\n")
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_VENDORED: Final = re.compile(r"\| `([^`]+)` \| .+ \| ([0-9.]+) \| `([0-9a-f]{64})` \|")
_OTHER_NAMES: Final = {
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
}
"""How metadata without an SPDX expression calls a licence."""
_SPDX: Final = re.compile(r"[A-Za-z0-9.+-]+(?: (?:AND|OR) [A-Za-z0-9.+-]+)*")


class Pin(msgspec.Struct, frozen=True):
    """One locked package. ``marker`` says where it is installed; empty: everywhere."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]


def pins_of(text: str) -> list[Pin]:
    """Return the packages of a lock file; raises ValueError for a line that is none of one."""
    heads = list(_PIN.finditer(text))
    if not heads or text[: heads[0].start()].strip():
        message = "expected packages and nothing else"
        raise ValueError(message)
    ends = [head.start() for head in heads[1:]] + [len(text)]
    pins = []
    for head, end in zip(heads, ends, strict=True):
        rest = text[head.end() : end]
        hashes = tuple(_HASH.findall(rest))
        if not hashes or _HASH.sub("", rest).strip(" \\\n"):
            message = f"{head[1]}: expected hashes and nothing else"
            raise ValueError(message)
        pins.append(Pin(head[1], head[2], head[3] or "", hashes))
    return pins


def licence_of(name: str) -> str | None:
    """Return the SPDX expression of an installed package; None where it is not installed."""
    try:
        told = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    fields = ("License-Expression", "License")
    text = next((told[field].strip() for field in fields if field in told), "")
    first = text.splitlines()[0].strip() if text else ""
    if not first:
        marks = [mark for mark in told.get_all("Classifier") or () if mark.startswith("License ::")]
        first = marks[0].rpartition(" :: ")[2] if marks else ""
    named = _OTHER_NAMES.get(first, first)
    return named if _SPDX.fullmatch(named) else f"unknown: {named!r}"


def _component(pin: Pin) -> dict[str, Any]:
    files = [{"alg": "SHA-256", "content": digest} for digest in pin.hashes]
    purl = f"pkg:pypi/{pin.name}@{pin.version}"
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": pin.name,
        "version": pin.version,
        "purl": purl,
        "externalReferences": [
            {
                "type": "distribution",
                "url": f"https://pypi.org/project/{pin.name}/{pin.version}/",
                "comment": "digests of all files that may be installed",
                "hashes": files,
            }
        ],
    }
    if pin.marker:
        found["properties"] = [{"name": "warmroute:marker", "value": pin.marker}]
    licence = licence_of(pin.name)
    if licence is not None:
        found["licenses"] = [{"expression": licence}]
    return found


def _vendored() -> list[dict[str, Any]]:
    """Return the files of others that are part of the package."""
    return [
        {
            "type": "file",
            "bom-ref": f"file:{match[1]}",
            "name": match[1],
            "version": match[2],
            "hashes": [{"alg": "SHA-256", "content": match[3]}],
            "licenses": [{"expression": "MIT"}],
        }
        for match in _VENDORED.finditer((VENDOR / "README.md").read_text(encoding="utf-8"))
        if match[1] != "LICENSE"
    ]


def bill() -> dict[str, Any]:
    """Return the bill of materials."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lock = LOCK.read_bytes()
    components = [_component(pin) for pin in pins_of(lock.decode())] + _vendored()
    name = f"{project['version']} {hashlib.sha256(lock).hexdigest()}"
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, name)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": project["name"],
                "version": project["version"],
                "licenses": [{"expression": project["license"]}],
            }
        },
        "components": components,
    }


def main() -> None:
    """Write the bill to the file that is named."""
    [path] = map(Path, sys.argv[1:])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(bill()), indent=2) + b"\n")


if __name__ == "__main__":
    main()
