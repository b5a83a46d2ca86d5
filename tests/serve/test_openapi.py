"""The OpenAPI document matches the gateway: every route, its key and its types."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from tests.serve.gateways import Running, running
from understudy.serve.api import JSON
from understudy.serve.routes import ROUTES, document

DOCUMENT = json.loads(json.dumps(document(ROUTES)))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("openapi")) as found:
        yield found


def operation(route: Any) -> dict[str, Any]:
    path = route.path.replace(":int", "")
    found: dict[str, Any] = DOCUMENT["paths"][path][route.method.lower()]
    return found


def test_the_document_is_served_and_every_reference_leads_somewhere(gateway: Running):
    assert gateway.ask("GET", "/v1/openapi.json", gateway.key("play")).json == DOCUMENT
    text = json.dumps(DOCUMENT)
    for name in DOCUMENT["components"]["schemas"]:
        assert f'"#/components/schemas/{name}"' in text
    assert text.count("#/components/schemas/") == sum(
        text.count(f'"#/components/schemas/{name}"') for name in DOCUMENT["components"]["schemas"]
    )


def test_every_route_is_in_it_and_nothing_else():
    listed = {
        (method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods
    }
    assert listed == {(route.method, route.path.replace(":int", "")) for route in ROUTES}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_an_operation_names_its_key_its_body_and_its_answers(route: Any):
    found = operation(route)
    assert found.get("x-scope") == route.scope
    assert found.get("security") == ([{"key": []}] if route.scope else None)
    assert ("requestBody" in found) == (route.takes is not None)
    assert {one["name"] for one in found.get("parameters", []) if one["in"] == "path"} == {
        part.strip("{}").partition(":")[0] for part in route.path.split("/") if part.startswith("{")
    }
    assert {"200", "default"} <= found["responses"].keys()
    assert ("204" in found["responses"]) == route.waits


def test_every_type_has_a_description_and_is_a_valid_schema():
    for name, schema in DOCUMENT["components"]["schemas"].items():
        assert schema["description"], name
        assert schema["additionalProperties"] is False, name
        jsonschema_rs.Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def test_answers_match_the_document(gateway: Running):
    gateway.release(gateway.register())
    key = gateway.key("admin")
    asked = {
        "act": {"obs": [0, 0, 0, 0]},
        "advise": {"obs": [0, 0, 0, 0], "action_mask": [True, False]},
        "promote": {"model_no": 1},
    }
    n_seen = 0
    for route in ROUTES:
        body = asked.get(route.endpoint.__name__)
        if isinstance(route.gives, str) or (route.method != "GET" and body is None):
            continue
        path = route.path.replace("{game}", "cart").replace("{model_no:int}", "1")
        schema = operation(route)["responses"]["200"]["content"][JSON]["schema"]
        validator = jsonschema_rs.Draft202012Validator(
            {**schema, "components": DOCUMENT["components"]}
        )
        validator.validate(gateway.ask(route.method, path, key, body).json)
        n_seen += 1
    assert n_seen >= 8
    failed = operation(ROUTES[0])["responses"]["default"]["content"][JSON]["schema"]
    validator = jsonschema_rs.Draft202012Validator({**failed, "components": DOCUMENT["components"]})
    validator.validate(gateway.ask("GET", "/v1/games").json)
