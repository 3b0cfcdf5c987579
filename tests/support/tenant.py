"""Tenants of tests: their keys, and the part of a router's file that knows them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

SECRET = b"a deployment key of tests, at least 32 bytes"


def key_of(tenant: str) -> str:
    """Return the API key of a tenant."""
    return f"sk-{tenant}-0123456789abcdef"


def digest_of(key: str) -> str:
    """Return what the configuration has in place of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def tenant_config(directory: Path, *names: str, **tenants: Any) -> dict[str, Any]:
    """Return the settings of a router for tenants: plain ``names``, and others with fields."""
    path = directory / "deployment.key"
    if not path.exists():
        path.write_bytes(SECRET)
        path.chmod(0o600)
    fields: dict[str, Any] = {name: {} for name in names} | tenants
    shares = {one["share"] for one in fields.values() if "share" in one}
    return {
        "deployment_key_file": str(path),
        "groups": sorted(shares),
        "tenants": [
            {"name": name, "key_digests": [digest_of(key_of(name))], **rest}
            for name, rest in fields.items()
        ],
    }
