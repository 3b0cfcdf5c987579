"""``/openapi.json``: what a listener serves, made of its table of paths and of the types behind.

Bodies of inference calls are the engines' business: the document has what the router itself reads
of them. ``DESCRIBED`` says what a path is; a path that an operator added (``paths:``) is passed on.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Raw, Struct

from prompt.anthropic import MessagesHead
from prompt.request import ChatHead, CompletionHead
from prompt.response import ResponseHead
from router.reply import own_response
from router.server import FORM_PATHS, JSON_PATHS
from router.trace import DecisionRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from router.client import Handler
    from router.reply import Response
    from router.request import Request

OPENAPI_PATH: Final = "/openapi.json"
VERSION: Final = "3.1.0"
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
TEXT: Final = "text/plain"
ANY: Final = "*/*"
_PARAMETER: Final = re.compile(r"\{([a-z]+)\}")
_REFERENCE: Final = "#/components/schemas/{name}"
_ANYTHING: Final[dict[str, Any]] = {}
_OBJECT: Final[dict[str, Any]] = {"type": "object"}


class ErrorDetail(Struct, frozen=True):
    """What went wrong; ``param`` names the field of the body that is to blame.

    ``code`` is a word of the router's, and a number where an engine's own error is passed on.
    """

    message: str
    type: str
    param: str | None
    code: str | int | None


class Error(Struct, frozen=True):
    """Every error of the router, in the shape of the OpenAI API."""

    error: ErrorDetail


class NamesModel(Struct):
    """A body that is passed on by load."""

    model: str | None = None


class ModelCard(Struct, frozen=True):
    """One model of a list."""

    id: str
    object: str
    created: int
    owned_by: str


class ModelList(Struct, frozen=True):
    """The models of all live replicas."""

    object: str
    data: list[ModelCard]


class Readiness(Struct, frozen=True):
    """Whether requests can be served now, and why."""

    ready: bool
    draining: bool
    replicas_up: int
    replicas: int
    rung: str
    state_age_s: float


def _body_of(head: type[Struct]) -> type[Struct]:
    """Return ``head`` with any value where it keeps one raw."""
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for told in msgspec.structs.fields(head):
        kind = Any if told.type is Raw else told.type
        default = None if isinstance(told.default, Raw) else told.default
        fields.append((told.name, kind) if told.required else (told.name, kind, default))
    name = head.__name__.removesuffix("Head") + "Body"
    return msgspec.defstruct(name, fields, kw_only=True, namespace={"__doc__": head.__doc__})


_BODIES: Final = {
    "/v1/chat/completions": _body_of(ChatHead),
    "/v1/completions": _body_of(CompletionHead),
    "/v1/responses": _body_of(ResponseHead),
    "/v1/messages": _body_of(MessagesHead),
}
_TYPES: Final = (*_BODIES.values(), NamesModel, Error, ModelList, Readiness, DecisionRecord)


class Described(Struct, frozen=True):
    """What a path answers: its kind, and the schema or the type of it; ``query`` are parameters."""

    text: str
    kind: str = JSON
    told: type[Struct] | dict[str, Any] | None = None
    query: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    """Statuses of the same answer besides 200."""


_LIST: Final[dict[str, Any]] = {"type": "array", "items": _OBJECT}
_DECISIONS: Final[dict[str, Any]] = {
    "type": "array",
    "items": {"$ref": _REFERENCE.format(name="DecisionRecord")},
}
DESCRIBED: Final[dict[str, Described]] = {
    "/": Described("The operators' page", "text/html", _ANYTHING, also=("307",)),
    "/livez": Described("Whether the process runs", TEXT, {"type": "string"}),
    "/readyz": Described("Whether requests can be served", told=Readiness, also=("503",)),
    "/metrics": Described("Metrics of Prometheus", TEXT, {"type": "string"}),
    "/v1/models": Described("The models of all live replicas", told=ModelList),
    OPENAPI_PATH: Described("This document"),
    "/admin/replicas": Described("Every replica as the router knows it", told=_LIST),
    "/debug/replicas": Described("Every replica as the router knows it", told=_LIST),
    "/admin/router": Described("What the router was told, and how good its knowledge is"),
    "/admin/trust": Described("How far predictions come true", told=_ANYTHING),
    "/admin/diagnoses": Described("Why predictions fail, where they do", told=_ANYTHING),
    "/admin/billing": Described("What each tenant used", told=_ANYTHING),
    "/admin/scopes": Described("Every scope and its epoch", told=_LIST),
    "/admin/scopes/{name}": Described("Forget what a scope has cached", also=("202", "207")),
    "/admin/scopes/{name}/rotate": Described("Begin a new epoch", also=("202", "207")),
    "/debug/decisions": Described("The last decisions", told=_DECISIONS, query=("limit",)),
    "/debug/decisions/{id}": Described("One decision", told=DecisionRecord),
    "/admin/warmup": Described("What is kept to warm replicas, and what is done", told=_ANYTHING),
    "/admin/explain": Described("Why a request went where it went", query=("request",)),
    "/admin/recording": Described(
        "The next part of the last requests, as a trace",
        "application/zstd",
        _ANYTHING,
        query=("from", "minutes"),
    ),
    "/admin/shadow": Described("What the shadow policy would have chosen"),
    "/admin/events": Described("What happens, as it happens", EVENTS, _ANYTHING),
    "/admin/snapshot": Described("The fleet as it is", told=_ANYTHING),
    "/admin/settings": Described("The settings in force, or a change of them", told=_ANYTHING),
    "/admin/settings/history": Described("The last versions of the settings", told=_LIST),
    "/admin/settings/{version}": Described("One version of the settings", told=_ANYTHING),
    "/admin/settings/rollback": Described("Back to an earlier version", told=_ANYTHING),
    "/admin/replicas/{id}/drain": Described("Let a replica get nothing new", told=_ANYTHING),
    "/admin/replicas/{id}/undrain": Described("Let it be chosen again", told=_ANYTHING),
    "/admin/canary": Described("How a canary stands, or the start of one", told=_ANYTHING),
    "/admin/canary/promote": Described(
        "Put a candidate's policy in force; without force 409 where its verdict does not carry it",
        told=_ANYTHING,
    ),
    "/admin/canary/stop": Described("Let the policy in force decide all again", told=_ANYTHING),
    "/admin/history": Described("The last minutes", told=_ANYTHING),
}
PAGE_PATHS: Final = ("/dashboard",)
"""Below them: files of the operators' page."""
_PAGE: Final = Described("A file of the operators' page", ANY, _ANYTHING)


def document(paths: Mapping[str, Iterable[str]], title: str) -> dict[str, Any]:
    """Return the OpenAPI document of a table: the methods of each path."""
    _, components = msgspec.json.schema_components(_TYPES, ref_template=_REFERENCE)
    described = {shown(path): _path_item(path, methods) for path, methods in sorted(paths.items())}
    return {
        "openapi": VERSION,
        "info": {"title": title, "version": "1"},
        "paths": described,
        "components": {
            "schemas": {name: _opened(schema) for name, schema in components.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def shown(path: str) -> str:
    """Return how a path of the table is written in the document."""
    return f"{path[:-1]}{{rest}}" if path.endswith("/*") else path


def _opened(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of an answer or a body: more fields than the named ones are the rule."""
    return {key: value for key, value in schema.items() if key != "additionalProperties"}


def _path_item(path: str, methods: Iterable[str]) -> dict[str, Any]:
    item: dict[str, Any] = {method.lower(): _operation(path, method) for method in sorted(methods)}
    names = [*_PARAMETER.findall(path), *(["rest"] if path.endswith("/*") else [])]
    if names:
        item["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return item


def _operation(path: str, method: str) -> dict[str, Any]:
    described = DESCRIBED.get(path)
    if described is None and path.startswith(PAGE_PATHS):
        described = _PAGE
    if described is None:
        return _passed_on(path)
    content = (
        {} if method == "HEAD" else {"content": {described.kind: {"schema": _told(described)}}}
    )
    answer = {"description": described.text, **content}
    operation: dict[str, Any] = {
        "summary": described.text,
        "responses": {"200": answer} | {s: _other(s, answer) for s in described.also} | _errors(),
    }
    if described.query:
        operation["parameters"] = [
            {"name": name, "in": "query", "schema": {"type": "string"}} for name in described.query
        ]
    return operation


def _other(status: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of another status: a redirection has none to speak of."""
    return {"description": "Elsewhere"} if status.startswith("3") else answer


def _told(described: Described) -> dict[str, Any]:
    if described.told is None:
        return _OBJECT
    if isinstance(described.told, dict):
        return described.told
    return {"$ref": _REFERENCE.format(name=described.told.__name__)}


def _passed_on(path: str) -> dict[str, Any]:
    """Return the operation of a path whose requests go to a replica."""
    kind = JSON if path in JSON_PATHS else "multipart/form-data" if path in FORM_PATHS else ANY
    body = _BODIES.get(path, NamesModel if kind == JSON else None)
    schema = _ANYTHING if body is None else {"$ref": _REFERENCE.format(name=body.__name__)}
    answer = {"description": "The replica's answer", "content": {ANY: {"schema": _ANYTHING}}}
    return {
        "summary": "Passed on to a replica",
        "requestBody": {"required": True, "content": {kind: {"schema": schema}}},
        "security": [{"key": []}, {}],
        "responses": {"2XX": answer} | _errors(),
    }


def _errors() -> dict[str, Any]:
    schema = {"$ref": _REFERENCE.format(name="Error")}
    answer = {"description": "An error", "content": {JSON: {"schema": schema}}}
    return {"4XX": answer, "5XX": answer}


def with_document(
    routes: Mapping[str, Mapping[str, Handler]], title: str
) -> dict[str, Mapping[str, Handler]]:
    """Return a table with the path that tells it, made when it is first asked for."""
    table: dict[str, Mapping[str, Handler]] = dict(routes)
    made: list[bytes] = []

    async def answer(_: Request) -> Response:
        if not made:
            made.append(msgspec.json.encode(document(table, title)))
        return own_response(made[0], JSON)

    table[OPENAPI_PATH] = {"GET": answer}
    return table
