"""What every request meets first: keys, names, limits, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import logging
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final

import openai
import pytest
from attrs import fields_dict
from uvicorn.protocols.http import auto
from uvicorn.protocols.http.h11_impl import H11Protocol

from paged_sdk import ConfigError, ModelStats, NumericalError, TextModelBuilder
from paged_sdk.server import JsonLines, ServerSettings, connection, create_app
from paged_sdk.server.metrics import COUNTERS, GAUGES
from paged_sdk.testing import fake_model
from serving import HI, Serving, serving
from slow_fakes import SLOW_TEXT, let_end, slow_fake

LONG: Final = "x" * 5000


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(fake_model("Hello!")) as served:
        yield served


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"messages": [{"role": "robot", "content": "Hi!"}]}, "role"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"n": 1000}, "n"),
        ({"stream": True, "n": 1000}, "n"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"prediction": {"type": "content", "content": "a"}, "n": 2}, "n"),
        ({"messages": [{"role": "user", "content": "x" * 20000}], "stream": True}, None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 1}}}},
            "response_format",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"unheard_of": None}, "unheard_of"),
    ],
)
def test_a_bad_request_is_400_and_names_the_field(served: Serving, body: dict[str, Any], param: str | None) -> None:
    response = served.post(**body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith((param or "-", "the prompt", "the constraint"))
    assert error["type"] == "invalid_request_error"
    assert not error["message"].endswith((" ", ":", "of"))


TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {}}}
STRICT: Final = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
BAD_SCHEMA: Final = {"name": "a", "schema": STRICT}


def function_tool(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": STRICT, **more}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"grammar": {"type": "regex", "value": "("}}, "grammar"),
        ("chat/completions", {"grammar": {"type": "regex", "value": "("}, "stream": True}, "grammar"),
        ("chat/completions", {"grammar": {"type": "lark", "value": ""}}, "grammar"),
        ("chat/completions", {"grammar": {"type": "json_schema", "value": ""}}, "grammar"),
        ("chat/completions", {"grammar": {"type": "json_schema", "value": {"type": 1}}}, "grammar"),
        ("chat/completions", {"grammar": {"type": "json_schema", "value": {"type": 1}}, "stream": True}, "grammar"),
        ("chat/completions", {"grammar": {"type": "regex", "value": "a"}, "tools": [TOOL]}, "grammar"),
        (
            "chat/completions",
            {
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": STRICT}},
                "tools": [TOOL],
            },
            "response_format",
        ),
        ("chat/completions", {"response_format": {"type": "json_object"}, "tools": [function_tool()]}, "tools"),
        ("chat/completions", {"tools": [function_tool(strict=True)]}, "tools"),
        ("completions", {"prompt": "a", "grammar": {"type": "regex", "value": "("}}, "grammar"),
        ("completions", {"prompt": "a", "grammar": {"type": "json_schema", "value": {"type": 1}}}, "grammar"),
        (
            "responses",
            {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": STRICT, "strict": True}]},
            "tools",
        ),
        (
            "responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 1}}}},
            "text.format",
        ),
    ],
)
def test_a_constraint_that_cannot_be_is_named_as_the_path_has_it(
    served: Serving, path: str, body: dict[str, Any], param: str
) -> None:
    response = served.post(f"/v1/{path}", **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_a_strict_tool_is_no_output_config(served: Serving) -> None:
    tool = {"name": "f", "input_schema": STRICT, "strict": True}
    response = served.post("/v1/messages", messages=HI, max_tokens=5, tools=[tool])
    assert response.status_code == 400
    assert "output_config" not in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"{", b"[1]", b'{"a": NaN}', b"\xff", b'{"a": "\\ud800"}', b"[" * 100_000, b"1" * 5000]
)
def test_what_is_no_json_is_400(served: Serving, body: bytes) -> None:
    response = served.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_http_is_spoken_by_h11_whatever_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """httptools loses the body of a request that offers HTTP/2, as all of Java's do."""
    monkeypatch.setattr(auto, "AutoHTTPProtocol", asyncio.Protocol)
    assert issubclass(runpy.run_path(connection.__file__)["Connection"], H11Protocol)


def test_a_request_that_offers_http_2_is_answered(served: Serving) -> None:
    body = json.dumps({"model": "fake", "messages": HI})
    headers = {"Content-Type": "application/json", "Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c"}
    assert served.http.post("/v1/chat/completions", content=body, headers=headers).status_code == 200


def test_other_types_are_415(served: Serving) -> None:
    body = json.dumps({"model": "fake", "messages": HI})
    response = served.http.post("/v1/chat/completions", content=body, headers={"Content-Type": "text/plain"})
    assert response.status_code == 415


def test_what_is_not_there_is_404(served: Serving) -> None:
    assert served.http.get("/v1/nothing").json()["error"]["message"] == "there is nothing at /v1/nothing"
    for path in ("/chat/completions", "/v1/v1/chat/completions"):  # a base address without /v1, or with two
        said = served.http.post(path, json={}).json()["error"]["message"]
        assert said == f"there is nothing at {path}: is /v1/chat/completions meant?"
    assert served.http.get("/v1/chat/completions").status_code == 405
    assert served.post(model="other").json()["error"]["code"] == "model_not_found"


def test_requests_have_names(served: Serving) -> None:
    assert served.http.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("", "a b", "x" * 200, "a\tb"):
        named = served.http.get("/health", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert named.startswith("req-")


@contextmanager
def logged() -> Iterator[list[dict[str, Any]]]:
    """Collect the lines of JSON of requests of chats."""
    lines: list[dict[str, Any]] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = json.loads(self.format(record))
            if "chat" in line["message"]:
                lines.append(line)

    logger, collector = logging.getLogger("paged_sdk.server"), Collector()
    collector.setFormatter(JsonLines())
    before = logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(collector)
        logger.setLevel(before)


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_says_who_asked_and_what_it_took(stream: bool) -> None:
    """The figures are those of the answer's usage, which metrics and spans show too."""
    with serving(fake_model("Hello!")) as served, logged() as lines:
        served.post(user="alice\n", stream=stream, n=2)
        served.wait(lambda model: bool(lines))
    (line,) = lines
    assert line["message"].startswith(f"{line['request_id']} POST /v1/chat/completions 200 in ")
    assert line["message"].endswith('cached) and 14 more, stop for "alice\\n"')
    said = ("level", "logger", "path", "status", "model", "user", "stream", "error")
    assert {name: line[name] for name in said} == {
        "level": "info",
        "logger": "paged_sdk.server",
        "path": "/v1/chat/completions",
        "status": 200,
        "model": "fake",
        "user": "alice\n",
        "stream": stream,
        "error": None,
    }
    assert (line["completion_tokens"], line["finish_reason"]) == (14, ["stop"])
    assert line["prompt_tokens"] > line["cached_tokens"] >= 0
    assert line["seconds"] >= line["time_to_first_token_seconds"] >= line["queue_seconds"] >= 0
    assert datetime.fromisoformat(line["time"]).tzinfo is not None


def test_a_long_label_is_shortened_in_the_log() -> None:
    with serving(fake_model("Hello!")) as served, logged() as lines:
        served.post(user="a" * 100_000)
        served.wait(lambda model: bool(lines))
    assert lines[0]["user"] == "a" * 256
    assert len(lines[0]["message"]) < 1000


def test_the_log_says_what_went_wrong() -> None:
    with serving(fake_model("abc", error=NumericalError("NaN"))) as served, logged() as lines:
        for fields in ({"stream": True}, {"stream": False}, {"model": "other"}, {"n": 0}):
            served.post(**fields)
        served.wait(lambda model: len(lines) == 4)
    assert [(line["status"], line["error"]) for line in lines] == [
        (200, "server_error"),
        (500, "server_error"),
        (404, "model_not_found"),
        (400, "invalid_request_error"),
    ]
    assert [line.get("finish_reason") for line in lines] == [["canceled"], None, None, None]


def test_the_log_says_that_a_client_has_left() -> None:
    with serving(fake_model(LONG, delay=0.01)) as served, logged() as lines:
        with served.hanging(stream=True) as client:
            assert client.recv(4096)
            served.wait(lambda model: model.stats().running == 1)
        served.wait(lambda model: bool(lines))
    assert (lines[0]["status"], lines[0]["finish_reason"]) == (200, ["canceled"])
    assert lines[0]["completion_tokens"] < len(LONG)


def test_an_exception_is_in_its_line() -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        record = logging.LogRecord("a", logging.ERROR, "", 1, "it %s", ("failed ☃",), (ValueError, error, None))
    line = JsonLines().format(record)
    assert "☃" in line
    assert json.loads(line)["exception"] == "ValueError: no"
    assert json.loads(line)["message"] == "it failed ☃"


def test_keys() -> None:
    with serving(fake_model("Hello!"), key="right", api_keys=("other", "right")) as served:
        assert served.post().status_code == 200
        assert served.http.get("/metrics").status_code == 200
        for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": "right"}, {"x-api-key": "wrong"}):
            denied = served.http.get("/v1/models", headers={"Authorization": "", **headers})
            assert denied.status_code == 401
            assert denied.json()["error"]["code"] == "invalid_api_key"
        assert served.http.get("/v1/models", headers={"Authorization": "", "x-api-key": "other"}).status_code == 200
        assert served.http.get("/health", headers={"Authorization": ""}).status_code == 200
        assert served.http.get("/metrics", headers={"Authorization": ""}).status_code == 401
        odd = {"Authorization": "Bearer wr\u00f6ng".encode()}
        assert served.http.get("/v1/models", headers=odd).status_code == 401  # type: ignore[arg-type]  # bytes are sent


def test_what_is_refused_counts_for_its_path(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paged_sdk.server")
    with serving(fake_model("Hello!"), key="right", api_keys=("right",), allowed_hosts=("127.0.0.1",)) as served:
        for path in ("/v1/chat/completions", "/v1/models/a/b", "/secrets"):
            assert served.http.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert served.http.get("/health", headers={"Host": "evil.example"}).status_code == 400
        served.app.drain.begin()
        assert served.post().status_code == 503
        served.wait(lambda model: " 503 in " in caplog.text)  # which comes after the answer
        figures = served.app._metrics.text().decode()
    for path, status in (
        ("/v1/chat/completions", 401),
        ("/v1/models/{model:path}", 401),
        ("other", 401),
        ("/health", 400),
        ("/v1/chat/completions", 503),
    ):
        assert f'paged_sdk_http_requests_total{{path="{path}",status="{status}"}} 1.0' in figures
    assert "POST /v1/chat/completions 503" in caplog.text
    assert "secrets" not in caplog.text


def test_a_server_answers_by_its_own_names_alone() -> None:
    with serving(fake_model("Hello!"), allowed_hosts=("127.0.0.1",)) as served:
        assert served.post().status_code == 200
        assert served.http.get("/health", headers={"Host": "evil.example:80"}).status_code == 400


def test_web_pages_of_allowed_origins_may_ask() -> None:
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with serving(fake_model("Hello!"), api_keys=("k",), cors_origins=("https://a.example",)) as served:
        allowed = served.http.options("/v1/chat/completions", headers=preflight)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        refused = served.http.options("/v1/chat/completions", headers={**preflight, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in refused.headers


def test_a_long_body_is_413() -> None:
    with serving(fake_model("Hello!"), max_body_bytes=100_000) as served:
        assert served.post(messages=[{"role": "user", "content": "x" * 100_000}]).status_code == 413
        assert served.post(messages=[{"role": "user", "content": "x" * 70_000}]).json()["error"]["code"] == (
            "context_length_exceeded"
        )
        assert served.post().status_code == 200


def test_what_does_not_fit_is_said_in_the_request_s_own_words() -> None:
    with serving(fake_model("Hello!", max_model_len=64)) as served:
        plain = {"model": "fake", "prompt": ["a", "b" * 70]}
        error = served.http.post("/v1/completions", json=plain).json()["error"]
        assert error["message"] == "prompt[1] has 70 tokens, 63 fit: shorten it"
        assert (error["param"], error["code"]) == ("prompt[1]", "context_length_exceeded")
        error = served.http.post("/v1/embeddings", json={"model": "fake", "input": ["a", "b" * 70]}).json()["error"]
        assert error["message"] == "input[1] has 70 tokens, 64 fit: shorten it"
        assert error["param"] == "input[1]"


def test_every_figure_of_a_model_is_shown() -> None:
    assert GAUGES.keys() | COUNTERS.keys() == fields_dict(ModelStats).keys()


def test_the_metrics_are_the_models_own(served: Serving) -> None:
    served.post().raise_for_status()
    figures = dict(
        line.rsplit(" ", 1) for line in served.http.get("/metrics").text.splitlines() if not line.startswith("#")
    )
    stats = served.model.stats()
    assert float(figures['paged_sdk_completion_tokens_total{model="fake"}']) == stats.completion_tokens > 0
    assert float(figures['paged_sdk_blocks_total{model="fake"}']) == stats.blocks_total
    assert float(figures['paged_sdk_http_requests_total{path="/v1/chat/completions",status="200"}']) > 0
    assert float(figures['paged_sdk_time_to_first_token_seconds_count{model="fake"}']) > 0


def test_a_request_that_takes_too_long_is_504() -> None:
    with serving(fake_model(LONG, delay=0.01), timeout=0.1) as served:
        assert served.post().status_code == 504
        with pytest.raises(openai.APIError, match="timeout"):
            list(served.openai.chat.completions.create(model="fake", messages=HI, stream=True))


def test_a_dead_engine_is_503(caplog: pytest.LogCaptureFixture) -> None:
    with serving(fake_model(error=RuntimeError("device lost"))) as served:
        assert served.http.get("/health").status_code == 200
        assert served.post().status_code == 503
        assert served.post(stream=True).status_code == 503
        for path in ("/health", "/ready"):  # whoever watches it starts another
            watched = served.http.get(path)
            assert (watched.status_code, watched.json()) == (503, {"status": "failed", "models": ["fake"]})
    assert "device lost" in caplog.text


def test_what_nobody_foresaw_is_500_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    with serving(fake_model("Hello!")) as served:
        served.app.models.find = None  # type: ignore[assignment, method-assign]  # raises a TypeError
        response = served.post()
        assert response.status_code == 500
        assert "NoneType" not in response.text
    assert "'NoneType' object is not callable" in caplog.text


def test_an_error_in_a_stream_is_an_event() -> None:
    with serving(fake_model("abc", delay=0.01, error=NumericalError("NaN"))) as served:
        lines = served.post(stream=True).text.split("\n\n")
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "server_error"
        with pytest.raises(openai.APIError, match="NaN"):
            list(served.openai.chat.completions.create(model="fake", messages=HI, stream=True))


def test_a_silent_stream_is_kept_alive() -> None:
    model = slow_fake()
    with serving(model, keep_alive=0.01) as served:
        body = {"model": "fake", "messages": HI, "stream": True}
        with served.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            while next(lines) != ": still here":
                pass
            let_end(model)
            assert [line for line in lines if line][-1] == "data: [DONE]"
    model = slow_fake()
    with serving(model, keep_alive=0.01) as served:
        chunks = served.openai.chat.completions.create(model="fake", messages=HI, stream=True)
        text = next(chunks).choices[0].delta.content or ""
        let_end(model)
        assert text + "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SLOW_TEXT


@pytest.mark.parametrize(
    "settings",
    [
        {"api_keys": ("",)},
        {"api_keys": ("a b",)},
        {"cors_origins": (1,)},
        {"timeout": 0},
        {"keep_alive": None},
        {"drain_timeout": float("inf")},
        {"max_body_bytes": 0},
        {"adapter_folder": "no/such/folder"},
    ],
)
def test_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings(**settings)
    assert caught.value.setting in settings


@pytest.mark.parametrize(
    "origin",
    ["https://a.example/", "https://A.example", "https://a.example:443", "a.example", "//a.example", "https://[::"],
)
def test_origins_that_no_browser_says_are_refused(origin: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings(cors_origins=("https://a.example", origin))
    assert (caught.value.setting, caught.value.value) == ("cors_origins", origin)


def test_origins() -> None:
    told = ("*", "null", "https://a.example", "http://127.0.0.1:8080", "http://[::1]:3000", "chrome-extension://abcd")
    assert ServerSettings(cors_origins=told).cors_origins == told


def test_models_are_checked() -> None:
    for models in ({}, {"": lambda: fake_model("a")}, {"a": 1}):
        with pytest.raises(ConfigError):
            create_app(models)  # type: ignore[arg-type]  # no models


@pytest.mark.parametrize("models", [TextModelBuilder("some/model"), TextModelBuilder("some/model").build(), None])
def test_a_builder_is_not_a_model_to_serve(models: Any) -> None:
    with pytest.raises(ConfigError, match=r'models = .* such as {"small": builder\.build}'):
        create_app(models)


def test_settings_of_a_server_are_server_settings() -> None:
    settings: Any = {"timeout": 60}
    with pytest.raises(ConfigError, match=r"settings = .* ServerSettings or None"):
        create_app({"small": TextModelBuilder("some/model").build}, settings)
