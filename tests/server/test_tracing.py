"""Requests are spans by OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from attrs import define, field
from opentelemetry import trace

from paged_sdk import NumericalError
from paged_sdk.testing import FakeRequest, fake_model
from serving import HI, serving


@define
class Recorded:
    """Is a span that remembers."""

    name: str
    parent: int
    attributes: dict[str, Any]
    status: Any = None
    ends: int = 0

    def set_attribute(self, key: str, value: Any) -> None:
        self.attributes[key] = value

    def set_status(self, status: Any) -> None:
        self.status = status

    def end(self) -> None:
        self.ends += 1


@define
class Recorder:
    """Stands in for a tracer."""

    spans: list[Recorded] = field(factory=list)

    def start_span(self, name: str, *, context: Any, kind: Any, attributes: dict[str, Any]) -> Recorded:
        assert kind is trace.SpanKind.SERVER
        parent = trace.get_current_span(context).get_span_context().trace_id
        self.spans.append(Recorded(name, parent, dict(attributes)))
        return self.spans[-1]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(trace, "get_tracer", lambda name: recorder)
    return recorder


def reply(request: FakeRequest) -> str:
    return "Hello!"


def test_answers_are_spans(recorder: Recorder) -> None:
    with serving(fake_model(reply)) as served:
        parent = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
        body = {"model": "fake", "messages": [{"role": "user", "content": "Hi!"}]}
        answer = served.http.post("/v1/chat/completions", json=body, headers=parent).json()
        served.post(stream=True)
        served.post("/v1/completions", prompt="a")
        served.post("/v1/embeddings", input="a")
        assert served.post(n=1000).status_code == 400
    names = ["chat fake", "chat fake", "text_completion fake", "embeddings fake", "chat fake"]
    assert [span.name for span in recorder.spans] == names
    assert [span.ends for span in recorder.spans] == [1] * 5
    assert [span.parent for span in recorder.spans] == [int("a" * 32, 16), 0, 0, 0, 0]
    first, streamed, text, vectors, refused = (span.attributes for span in recorder.spans)
    assert first["gen_ai.response.id"] == answer["id"]
    for attributes in (first, streamed, text):
        assert attributes["gen_ai.usage.output_tokens"] == len("Hello!") + 1
        assert attributes["gen_ai.usage.input_tokens"] > 0
        assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert vectors["gen_ai.usage.output_tokens"] == 0
    assert refused["error.type"] == "InvalidRequestError"
    assert [span.status is None for span in recorder.spans] == [True] * 4 + [False]
    assert "Hello!" not in str([span.attributes for span in recorder.spans])


def test_what_an_error_shows_of_a_prompt_is_not_in_the_span(recorder: Recorder) -> None:
    with serving(fake_model("Hello!")) as served:
        refused = served.post(messages=[{"role": "user", "content": "my secret"}], continue_final_message=True)
    assert (refused.status_code, "secret" in refused.text) == (400, True)
    (span,) = recorder.spans
    assert span.attributes["error.type"] == "InvalidRequestError"
    assert not span.status.is_ok
    assert "secret" not in f"{span.attributes}{span.status.description}"


def test_an_error_in_a_stream_ends_the_span(recorder: Recorder) -> None:
    with serving(fake_model("abc", delay=0.01, error=NumericalError("NaN"))) as served:
        served.post(stream=True)
    (span,) = recorder.spans
    assert (span.ends, span.attributes["error.type"]) == (1, "NumericalError")


def test_what_is_cut_off_is_an_error(recorder: Recorder) -> None:
    with serving(fake_model("x" * 5000, delay=0.01), drain_timeout=0.1) as served:
        asked = {"model": "fake", "stream": True, "messages": HI}
        with served.http.stream("POST", "/v1/chat/completions", json=asked) as streamed:
            texts = streamed.iter_text()
            assert next(texts).startswith("data: ")
            served.app.drain.begin()
            assert "did not finish this" in "".join(texts)
    (span,) = recorder.spans
    assert (span.ends, span.attributes.get("error.type")) == (1, "ProblemError")


def test_it_works_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with serving(fake_model("Hello!")) as served:
        assert served.post().status_code == 200
        assert served.post(stream=True).status_code == 200
        assert served.post(n=1000).status_code == 400
