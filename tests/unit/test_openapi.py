"""The document of a listener has its paths, all of them, and nothing else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from router.admin import client_routes
from router.app import App
from router.config import decode_config
from router.error import ClientError, error_body
from router.openapi import (
    DESCRIBED,
    OPENAPI_PATH,
    PAGE_PATHS,
    Error,
    Readiness,
    document,
    shown,
    with_document,
)
from router.server import LOAD_PATHS, PREFIX_PATHS
from router.setting_life import SettingLife
from router.state_reader import build_mirror
from state.setting_store import MemorySettingStore
from support.tenant import SECRET, tenant_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from router.client import Handler

EXTRA = ["/pooling", "/v1/*"]


def tables(**config: Any) -> list[Mapping[str, Mapping[str, Handler]]]:
    """Return the tables of both listeners of a router, with tenants where they are configured."""
    raw = {"paths": EXTRA, **config}
    mirror = build_mirror("redis://127.0.0.1:1")
    app = App(decode_config(raw), {}, mirror, None, SECRET if "tenants" in config else None)
    routes = client_routes(app.proxy, app.admin, app.config.paths)
    if app.gate is not None:
        routes = app.gate.guarded(routes)
    app.settings = SettingLife(app, "redis://127.0.0.1:1", MemorySettingStore())
    return [routes, app.operator_routes()]


@pytest.mark.parametrize("has_tenants", [False, True])
async def test_every_path_of_a_table_is_in_its_document_and_no_other(
    tmp_path: Path,
    has_tenants: bool,  # noqa: FBT001 - a parameter
) -> None:
    config = tenant_config(tmp_path, "acme") if has_tenants else {}
    for table in tables(**config):
        routes = with_document(table, "x")
        answer = await routes[OPENAPI_PATH]["GET"](None)  # type: ignore[arg-type]
        told = json.loads(answer.body)  # type: ignore[union-attr]
        assert told["openapi"].startswith("3.1")
        methods = {path: set(one) - {"parameters"} for path, one in told["paths"].items()}
        assert methods == {
            shown(path): {method.lower() for method in one} for path, one in routes.items()
        }


async def test_every_path_of_the_router_itself_is_described() -> None:
    passed_on = PREFIX_PATHS | LOAD_PATHS | set(EXTRA)
    for table in tables():
        for path in table.keys() - passed_on:
            assert path in DESCRIBED or path.startswith(PAGE_PATHS), path


def test_every_reference_leads_somewhere_and_every_parameter_is_named() -> None:
    told = document({"/debug/decisions/{id}": ["GET"], "/v1/*": ["POST"], **_inference()}, "x")
    text = json.dumps(told)
    for name in {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
        assert name in told["components"]["schemas"]
    assert told["paths"]["/v1/{rest}"]["parameters"][0]["name"] == "rest"
    assert told["paths"]["/debug/decisions/{id}"]["parameters"][0]["in"] == "path"


def _inference() -> dict[str, list[str]]:
    return {path: ["POST"] for path in sorted(PREFIX_PATHS | LOAD_PATHS)}


def test_what_is_required_of_a_body_is_what_the_router_requires() -> None:
    schemas = document(_inference(), "x")["components"]["schemas"]
    assert schemas["ChatBody"]["required"] == ["model", "messages"]
    assert schemas["MessagesBody"]["required"] == ["model", "messages"]
    assert schemas["ResponseBody"]["required"] == ["model", "input"]
    assert schemas["CompletionBody"]["required"] == ["model"]
    assert "additionalProperties" not in schemas["ChatBody"]


def test_an_error_has_the_shape_that_is_documented() -> None:
    body = error_body(ClientError("x", param="model"))
    assert msgspec.json.decode(body, type=Error, strict=True).error.param == "model"
    assert msgspec.to_builtins(msgspec.json.decode(body, type=Error)) == json.loads(body)
    assert set(Readiness.__struct_fields__) >= {"ready", "rung"}
