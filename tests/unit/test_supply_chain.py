"""What is installed: locked by digest, listed in the bill of materials, and free to use."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

import pytest

from support.sbom import LOCK, ROOT, VENDOR, Pin, bill, licence_of, pins_of

if TYPE_CHECKING:
    from pathlib import Path

PERMISSIVE: Final = frozenset(
    {
        *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "CNRI-Python", "ISC"),
        *("MIT", "MIT-0", "PSF-2.0", "Zlib"),
    }
)
BY_FILE: Final = {
    "certifi": "MPL-2.0",  # a list of certificates
    "tqdm": "MPL-2.0 AND MIT",  # comes with huggingface-hub
}
"""Copyleft of their own files only: used as they are, it asks for nothing of ours."""
PINS: Final = pins_of(LOCK.read_text(encoding="utf-8"))


def names_of(requirements: list[str]) -> set[str]:
    """Return the package names in requirements."""
    found = (re.match(r"[A-Za-z0-9._-]+", line) for line in requirements)
    return {name[0].lower().replace("_", "-") for name in found if name}


def test_everything_that_running_needs_is_locked_by_digest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert names_of(project["dependencies"]) <= {pin.name for pin in PINS}
    assert all(pin.hashes for pin in PINS)
    text = LOCK.read_text(encoding="utf-8")
    assert text.count("--hash=sha256:") == sum(len(pin.hashes) for pin in PINS)
    assert text.count("==") - text.count(" == '") >= len(PINS)


@pytest.mark.parametrize(
    "text",
    ["aiohttp>=3\n", "aiohttp==3.1 \\\n    --hash=md5:0\n", "aiohttp==3.1 \\\n", "-e .\n", ""],
)
def test_a_lock_file_with_anything_unlocked_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="nothing else"):
        pins_of(text)


@pytest.mark.parametrize("path", sorted(LOCK.parent.glob("*.lock")), ids=lambda path: path.name)
def test_every_lock_file_is_locked_by_digest(path: Path) -> None:
    assert pins_of(path.read_text(encoding="utf-8"))


def test_the_bill_has_every_locked_package_with_its_version_and_digests() -> None:
    made = bill()
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    assert made == bill()
    listed = {one["bom-ref"]: one for one in made["components"]}
    assert len(listed) == len(made["components"])
    for pin in PINS:
        one = listed.pop(f"pkg:pypi/{pin.name}@{pin.version}")
        assert pinned(one) == pin
    vendored = {path.name for path in VENDOR.iterdir()} - {"LICENSE", "README.md"}
    assert {one["name"] for one in listed.values()} == vendored
    assert all(one["hashes"] and one["version"] for one in listed.values())


def pinned(component: dict[str, Any]) -> Pin:
    """Return what a component of the bill says of its package."""
    [files] = component["externalReferences"]
    marks = {each["name"]: each["value"] for each in component.get("properties", ())}
    return Pin(
        component["name"],
        component["version"],
        marks.get("warmroute:marker", ""),
        tuple(one["content"] for one in files["hashes"] if one["alg"] == "SHA-256"),
    )


@pytest.mark.parametrize("name", sorted({pin.name for pin in PINS}))
def test_a_package_is_free_to_use(name: str) -> None:
    licence = licence_of(name)
    if licence is None:
        marked = [pin for pin in PINS if pin.name == name]
        assert all(pin.marker for pin in marked), "locked for everywhere, and not installed"
    elif name in BY_FILE:
        assert licence == BY_FILE[name]
    else:
        assert set(re.split(r" AND | OR ", licence)) <= PERMISSIVE


def test_what_is_installed_is_what_is_locked() -> None:
    versions: dict[str, set[str]] = {}
    for pin in PINS:
        versions.setdefault(pin.name, set()).add(pin.version)
    for name, locked in versions.items():
        if licence_of(name) is not None:
            assert metadata.version(name) in locked, name
