"""The OpenAPI document, made from the routes and their types."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from understudy.core.version import version
from understudy.serve import wire
from understudy.serve.api import JSON, ApiRoute

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_IN_PATH: dict[str, dict[str, Any]] = {
    "game": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"},
    "schema": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    "model_no": {"type": "integer", "minimum": 1},
}
_IN_QUERY: dict[str, dict[str, Any]] = {
    "after": {"type": "integer", "minimum": 0, "maximum": 999_999_999_999_999},
    "wait_s": {"type": "number", "minimum": 0, "exclusiveMaximum": 1e6},
}


def document(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    """OpenAPI 3.1 of these routes."""
    types = [kind for route in routes for kind in (route.takes, route.gives) if isinstance(kind, type)]
    unique = list(dict.fromkeys([*types, wire.Failed]))
    schemas, components = msgspec.json.schema_components(unique, ref_template="#/components/schemas/{name}")
    found = dict(zip(unique, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, found)
    return {
        "openapi": "3.1.0",
        "info": {"title": "understudy", "version": version(), "description": "Games, experience and bots."},
        "paths": paths,
        "components": {
            # Nothing is taken or given beyond what is named; dataclasses cannot say so themselves.
            "schemas": {name: schema | {"additionalProperties": False} for name, schema in components.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: ApiRoute, schemas: dict[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": route.summary, "operationId": route.endpoint.__name__}
    if route.scope is not None:
        operation |= {"security": [{"key": []}], "x-scope": route.scope}
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if route.takes is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.takes, schemas)}
    success = {"description": "As asked"} | ({"content": _content(route.gives, schemas)} if route.gives else {})
    failed = {"description": "Why not", "content": _content(wire.Failed, schemas)}
    operation["responses"] = {"200": success, "default": failed}
    if route.waits:
        operation["responses"]["204"] = {"description": "Nothing newer came in that time"}
    return operation


def _parameters(route: ApiRoute) -> list[dict[str, Any]]:
    found = [
        {"name": name, "in": "path", "required": True, "schema": _IN_PATH[name]}
        for name in _PARAMETER.findall(route.path)
    ]
    return found + [
        {"name": name, "in": "query", "schema": kind} for name, kind in _IN_QUERY.items() if route.waits
    ]  # fmt: skip


def _content(kind: type[Any] | str, schemas: dict[Any, Any]) -> dict[str, Any]:
    if isinstance(kind, str):
        binary = {"type": "string", "format": "binary"}
        return {kind: {"schema": {"type": "object"} if kind == JSON else binary}}
    return {JSON: {"schema": schemas[kind]}}
