"""The example of a service, over a real socket: with OpenAI's own client, and with clients that hang up."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import anyio
import httpx2
import openai
import pytest
import uvicorn

from paged_sdk import ModelClosedError, NumericalError
from paged_sdk.testing import FakeModel, FakeRequest, fake_model

EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "fastapi_service.py"
HI: Final = [{"role": "user", "content": "Hi!"}]
LONG: Final = "x" * 5000


@pytest.fixture(scope="module")
def service() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("example_fastapi_service", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pydantic looks the names in annotations up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


class Served:
    """Holds a service that runs, and what asks it."""

    def __init__(self, model: FakeModel, port: int) -> None:
        self.model = model
        self.port = port
        url = f"http://127.0.0.1:{port}"
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        self.http = httpx2.Client(base_url=url, timeout=60)

    def post(self, **body: Any) -> httpx2.Response:
        return self.http.post("/v1/chat/completions", json={"messages": HI, **body})

    def wait(self, condition: Callable[[FakeModel], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition(self.model):
            assert time.monotonic() < deadline
            time.sleep(0.002)


@contextmanager
def serving(service: ModuleType, model: FakeModel, **settings: Any) -> Iterator[Served]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = service.create_app(lambda: model, **settings)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on", loop="asyncio"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        served = Served(model, listener.getsockname()[1])
        try:
            yield served
        finally:
            served.openai.close()
            served.http.close()
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


@contextmanager
def hanging(served: Served, *, stream: bool) -> Iterator[socket.socket]:
    """Send a request from a client that hangs up without waiting for the end of the answer."""
    body = json.dumps({"messages": HI, "stream": stream})
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: a", "Content-Type: application/json"]
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall("\r\n".join([*lines, f"Content-Length: {len(body)}", "", body]).encode())
        yield client


def idle(model: FakeModel) -> bool:
    stats = model.stats()
    return (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)


@pytest.fixture(scope="module")
def echo(service: ModuleType) -> Iterator[Served]:
    def upper(request: FakeRequest) -> str:
        return request.messages[-1].content.upper()

    with serving(service, fake_model(upper)) as served:
        yield served


def ask(served: Served, text: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return served.openai.chat.completions.create(model="any", messages=messages, **fields)


def test_a_prediction_is_passed_on(service: ModuleType) -> None:
    with serving(service, fake_model("one two three", "four")) as served:
        response = served.openai.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "Hi!"}],
            prediction={"type": "content", "content": "one two four"},
        )
        details = response.usage.completion_tokens_details if response.usage is not None else None
        assert details is not None
        assert details.accepted_prediction_tokens == len("one two ")
        assert details.rejected_prediction_tokens == len("four")
        assert served.post(prediction={"type": "content", "content": ""}).status_code == 400


def test_openais_client_gets_its_answer(echo: Served) -> None:
    answer = ask(echo, "héllo ☃", n=2, logprobs=True, top_logprobs=2, seed=1)
    assert [choice.message.content for choice in answer.choices] == ["HÉLLO ☃"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert echo.openai.models.list().data[0].id == "fake"


def test_openais_client_reads_the_stream(echo: Served) -> None:
    chunks = list(ask(echo, "héllo ☃", stream=True, max_tokens=7, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "HÉLLO "
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == 7
    sent = echo.post(stream=True).text
    assert sent.endswith("data: [DONE]\n\n")
    assert echo.post(stream=True).headers["content-type"].startswith("text/event-stream")


def test_openais_helper_joins_the_stream(echo: Served) -> None:
    messages: Any = HI
    with echo.openai.chat.completions.stream(model="any", messages=messages) as stream:
        message = stream.get_final_completion().choices[0].message
    assert (message.role, message.content) == ("assistant", "HI!")


def test_many_clients_are_served_at_once(echo: Served) -> None:
    answers: dict[str, str] = {}

    def client(text: str) -> None:
        answers[text] = ask(echo, text).choices[0].message.content

    threads = [threading.Thread(target=client, args=(f"question {number}",)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {f"question {number}": f"QUESTION {number}" for number in range(16)}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"messages": [{"role": "robot", "content": "Hi!"}]}, "role"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"n": 1000}, "n_choices"),
        ({"stream": True, "n": 1000}, "n_choices"),
        ({"messages": [{"role": "user", "content": "x" * 20000}], "stream": True}, "tokens"),
    ],
)
def test_a_bad_request_is_400_and_says_why(echo: Served, body: dict[str, Any], message: str) -> None:
    response = echo.post(**body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_what_the_service_does_not_know_is_refused(echo: Served) -> None:
    with pytest.raises(openai.UnprocessableEntityError):
        ask(echo, "Hi!", tools=[{"type": "function", "function": {"name": "f"}}])


def test_a_request_that_takes_too_long_is_504(service: ModuleType) -> None:
    with serving(service, fake_model(LONG, delay=0.01), timeout=0.1) as served:
        with pytest.raises(openai.InternalServerError) as caught:
            ask(served, "Hi!")
        assert caught.value.status_code == 504


def test_a_full_queue_is_429_and_says_when_to_come_back(service: ModuleType) -> None:
    model = fake_model(LONG, delay=0.01, max_num_seqs=1, max_queue=1)
    with serving(service, model) as served, hanging(served, stream=True):
        served.wait(lambda model: model.stats().running == 1)
        with hanging(served, stream=True):
            served.wait(lambda model: model.stats().waiting == 1)
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError) as full:
                    ask(served, "Hi!", stream=stream)
                assert full.value.response.headers["retry-after"] == "1"


def test_a_dead_engine_is_503(service: ModuleType) -> None:
    with serving(service, fake_model(error=RuntimeError("device lost"))) as served:
        assert served.post().status_code == 503
        assert served.post(stream=True).status_code == 503


def test_an_error_in_a_stream_is_an_event(service: ModuleType) -> None:
    with serving(service, fake_model("abc", delay=0.01, error=NumericalError("NaN"))) as served:
        lines = served.post(stream=True).text.split("\n\n")
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "server_error"
        with pytest.raises(openai.APIError, match="NaN"):
            list(ask(served, "Hi!", stream=True))
    slow = fake_model(LONG, delay=0.01)
    with serving(service, slow, timeout=0.2) as served, pytest.raises(openai.APIError, match="timeout"):
        list(ask(served, "Hi!", stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_request(service: ModuleType, stream: bool) -> None:
    with serving(service, fake_model(LONG, delay=0.01)) as served:
        with hanging(served, stream=stream) as client:
            received = b"" if stream else b"data: "
            while b"data: " not in received:
                received += client.recv(4096)
            served.wait(lambda model: model.stats().running == 1)
        served.wait(idle)
        assert served.model.stats().completion_tokens < len(LONG) / 2


def test_a_client_that_hangs_up_in_the_queue_leaves_it(service: ModuleType) -> None:
    with serving(service, fake_model(LONG, delay=0.01, max_num_seqs=1)) as served:
        with hanging(served, stream=True):
            served.wait(lambda model: model.stats().running == 1)
            with hanging(served, stream=True):
                served.wait(lambda model: model.stats().waiting == 1)
            served.wait(lambda model: model.stats().waiting == 0)
            assert served.model.stats().running == 1
        served.wait(idle)


def test_ending_the_service_closes_the_model(service: ModuleType) -> None:
    with serving(service, fake_model("hello")) as served:
        assert served.post().status_code == 200
    with pytest.raises(ModelClosedError):
        anyio.run(served.model.send_chat_request, HI)
