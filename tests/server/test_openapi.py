"""The OpenAPI document says what is served, and what it says is so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from starlette.routing import Route

from paged_sdk.testing import FakeRequest, fake_model
from serving import HI, Serving, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    def short(request: FakeRequest) -> str:
        return "Hello!"

    with serving(fake_model(short)) as served:
        yield served


@pytest.fixture(scope="module")
def document(served: Serving) -> Any:
    return served.http.get("/openapi.json").json()


def test_every_route_is_described(served: Serving, document: Any) -> None:
    routes = [route for route in served.app.routes if isinstance(route, Route) and route.include_in_schema]
    routes = [route for route in routes if route.path != "/openapi.json"]  # and the chat page is no API
    paths = {route.path.replace(":path}", "}"): (route.methods or set()) - {"HEAD"} for route in routes}
    assert paths == {path: {method.upper() for method in item} for path, item in document["paths"].items()}


def test_its_schemas_are_schemas_and_take_what_the_client_sends(document: Any) -> None:
    bodies = [
        operation["requestBody"]["content"]["application/json"]["schema"]
        for item in document["paths"].values()
        for operation in item.values()
        if "requestBody" in operation
    ]
    for schema in bodies:
        Draft202012Validator.check_schema(schema)
    judge = Draft202012Validator(bodies[0])
    judge.validate({"model": "m", "messages": HI, "stop": ["a"], "tool_choice": "auto", "max_tokens": None})
    for wrong in ({"model": "m", "messages": HI, "store": True}, {"messages": HI}):
        with pytest.raises(ValidationError):
            judge.validate(wrong)


def test_a_key_is_asked_for_where_one_is_needed(document: Any) -> None:
    assert "security" not in document
    with serving(fake_model("a"), key="k", api_keys=("k",)) as served:
        assert served.http.get("/openapi.json").json()["security"] == [{"key": []}]


@pytest.mark.long
def test_no_request_makes_the_server_fail(served: Serving, tmp_path: Path) -> None:
    """Schemathesis makes requests of the document, right ones and wrong ones; none may be a 5xx."""
    pytest.importorskip("schemathesis")
    checks = ["not_a_server_error", "status_code_conformance", "content_type_conformance"]
    arguments = ["run", f"{served.url}/openapi.json", "--max-examples", "40", "--seed", "1", "--no-color"]
    arguments += ["--checks", ",".join(checks)]
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr[-2000:]
