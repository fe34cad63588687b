"""The OpenAPI document says what is served, and what it says is so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from jsonschema import Draft202012Validator, ValidationError
from starlette.routing import Route

from judge import Judge
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
    for schema in [*bodies, *document["components"]["schemas"].values()]:
        Draft202012Validator.check_schema(schema)
    judge = Draft202012Validator({**bodies[0], "components": document["components"]})
    judge.validate({"model": "m", "messages": HI, "stop": ["a"], "tool_choice": "auto", "max_tokens": None})
    for wrong in ({"model": "m", "messages": HI, "store": True}, {"messages": HI}):
        with pytest.raises(ValidationError):
            judge.validate(wrong)


def test_what_the_document_does_not_have_is_found(served: Serving, document: Any) -> None:
    """Every answer of every test of a server is held to its document; see the module ``judge``."""
    faults: list[str] = []
    judge = Judge(served.app, document, faults)
    chat, messages = (document["paths"][path]["post"]["responses"] for path in ("/v1/chat/completions", "/v1/messages"))

    def check(described: Any, body: str, kind: str = "application/json", status: int = 200) -> list[str]:
        faults.clear()
        start = {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]}
        judge.check("here", described, [start, {"type": "http.response.body", "body": body.encode()}])
        return faults

    whole = served.post().text
    assert not check(chat, whole)
    assert "'robot' is not one of ['assistant']" in check(chat, whole.replace('"assistant"', '"robot"'))[0]
    assert "'more' was unexpected" in check(chat, whole.replace('"usage"', '"more":1,"usage"'))[0]
    assert check(chat, whole, status=418)
    assert check(chat, whole, "text/plain")
    assert check(messages, whole)
    error = served.post(model="other").text
    assert not check(chat, error, status=404)
    assert check(messages, error, status=404)
    streamed = served.post(stream=True).text
    assert not check(chat, streamed, "text/event-stream")
    for one, other in (('"delta"', '"data"'), ("data: {", "event: a\ndata: {"), ("[DONE]", "{}")):
        assert check(chat, streamed.replace(one, other), "text/event-stream")
    named = served.post("/v1/messages", messages=HI, max_tokens=9, stream=True).text
    assert not check(messages, named, "text/event-stream")
    for one, other in (("event: ping\n", ""), ("event: ping", "event: pong"), ('"text_delta"', '"delta"')):
        assert check(messages, named.replace(one, other), "text/event-stream")


def test_a_key_is_asked_for_where_one_is_needed(document: Any) -> None:
    assert "security" not in document
    with serving(fake_model("a"), key="k", api_keys=("k",)) as served:
        assert served.http.get("/openapi.json").json()["security"] == [{"key": []}]


CHECKS: Final = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


@pytest.mark.parametrize("examples", [2, pytest.param(20, marks=pytest.mark.long)])
def test_no_request_makes_the_server_fail(tmp_path: Path, examples: int) -> None:
    """Schemathesis makes requests of the document, right ones and wrong ones; none may be a 5xx."""
    pytest.importorskip("schemathesis")
    (tmp_path / "adapters").mkdir()
    with serving(fake_model("Hello!"), adapter_folder=tmp_path / "adapters") as served:
        arguments = ["run", f"{served.url}/openapi.json", "--max-examples", str(examples), "--seed", "1", "--no-color"]
        arguments += [
            "--checks",
            ",".join(CHECKS),
            "--phases",
            "examples,fuzzing",
        ]
        command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", *arguments]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr[-2000:]
