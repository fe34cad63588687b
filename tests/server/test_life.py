"""How requests and servers end: clients that leave, full queues, and SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import httpx2
import openai
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from typer.testing import CliRunner

import tiny
from adapter_files import write_adapter
from paged_sdk import ChatCompletionResponse, Model, ModelClosedError, TextModelBuilder
from paged_sdk.cli.app import app as cli
from paged_sdk.server import ServerSettings, create_app
from paged_sdk.server.bodies import LARGE_BODY
from paged_sdk.server.running import listen, run
from paged_sdk.testing import fake_model
from paged_sdk.wire.chat_completions import ChatCompletionCall
from program import program
from serving import HI, idle, serving
from slow_fakes import SLOW_TEXT, let_end, slow_fake
from talk import until

LONG: Final = "x" * 5000


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_request(stream: bool) -> None:
    with serving(fake_model(LONG, delay=0.01)) as served:
        with served.hanging(stream=stream) as client:
            received = b"" if stream else b"data: "
            while b"data: " not in received:
                received += client.recv(4096)
            served.wait(lambda model: model.stats().running == 1)
        served.wait(idle)
        assert served.model.stats().completion_tokens < len(LONG) / 2


def test_a_client_that_hangs_up_in_the_queue_leaves_it() -> None:
    with serving(fake_model(LONG, delay=0.01, max_num_seqs=1)) as served, served.hanging():
        served.wait(lambda model: model.stats().running == 1)
        with served.hanging(stream=True):
            served.wait(lambda model: model.stats().waiting == 1)
        served.wait(lambda model: model.stats().waiting == 0)
        assert served.model.stats().running == 1


def test_a_full_queue_is_429_and_says_when_to_come_back() -> None:
    model = fake_model(LONG, delay=0.01, max_num_seqs=1, max_queue=1)
    with serving(model) as served, ExitStack() as stack:
        stack.enter_context(served.hanging(stream=True))
        served.wait(lambda model: model.stats().running == 1)
        stack.enter_context(served.hanging(stream=True))
        served.wait(lambda model: model.stats().waiting == 1)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as full:
                served.openai.chat.completions.create(model="fake", messages=HI, stream=stream)
            assert full.value.response.headers["retry-after"] == "1"


def test_a_whole_answer_is_written_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with the likeliest tokens of each of thousands of places takes seconds."""
    threads: list[str] = []
    response = ChatCompletionCall.response

    def noted(call: ChatCompletionCall, answer: ChatCompletionResponse) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return response(call, answer)

    monkeypatch.setattr(ChatCompletionCall, "response", noted)
    with serving(fake_model("Hello!")) as served:
        served.openai.chat.completions.create(model="fake", messages=HI)
    assert [name.startswith("AnyIO worker") for name in threads] == [True]


async def stream_to(send: Callable[[Any], Awaitable[None]], model: Model, **settings: Any) -> None:
    """Have a stream sent as a server would."""
    body = json.dumps({"model": "fake", "messages": HI, "stream": True}).encode()
    requests = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        if requests:
            return requests.pop()
        return await anyio.sleep_forever()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
    }
    await create_app(model, ServerSettings(**settings))(scope, receive, send)


@pytest.mark.anyio
async def test_what_a_slow_client_has_not_read_comes_together() -> None:
    sent: list[Any] = []
    text = "x" * 500

    async with fake_model(text) as model:

        async def send(message: Any) -> None:
            sent.append(message)
            while not idle(model):  # it takes nothing more until all has been said
                await anyio.lowlevel.checkpoint()

        await stream_to(send, model, keep_alive=3600)  # however long that takes
    events = [event for message in sent[1:] for event in message["body"].decode().split("\n\n") if event]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert len(chunks) < 10
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text


@pytest.mark.anyio
async def test_nothing_comes_after_the_end_of_a_stream() -> None:
    """Not the sign of life either that waited while a slow client took the end."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()

    async with fake_model("Hello!") as model:
        await stream_to(send, model, keep_alive=1e-9)
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    assert any(message["body"].startswith(b": ") for message in sent[1:])


def test_a_client_that_reads_nothing_holds_nobody_up() -> None:
    with serving(fake_model(LONG)) as served:
        with served.hanging(stream=True, n=4):
            assert served.post(max_tokens=100).status_code == 200
            served.wait(idle)
        assert served.post(max_tokens=100).status_code == 200


def test_a_server_that_ends_finishes_what_is_under_way() -> None:
    answers: list[httpx2.Response] = []
    model = slow_fake()
    with serving(model) as served:
        thread = threading.Thread(target=lambda: answers.append(served.post()))
        thread.start()
        served.wait(lambda model: model.stats().running == 1)
        served.app.drain.begin()
        refused = httpx2.post(f"{served.url}/v1/chat/completions", json={"model": "fake", "messages": HI})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert httpx2.get(f"{served.url}/ready").status_code == 503
        assert httpx2.get(f"{served.url}/health").status_code == 200
        let_end(model)
        thread.join(30)
    assert answers[0].json()["choices"][0]["message"]["content"] == SLOW_TEXT


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/messages/count_tokens"])
def test_a_server_that_ends_waits_for_no_body(path: str) -> None:
    with serving(fake_model("Hello!")) as served, socket.create_connection(("127.0.0.1", served.port), 60) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
        client.sendall(f'{head}{{"model"'.encode())
        served.wait(lambda model: served.app.drain.in_flight > 0)
        assert served.http.get("/health").status_code == 200  # by when it is read
        served.app.drain.begin()
        assert client.recv(4096).startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        ("/v1/chat/completions", {"messages": HI}, "data: "),
        ("/v1/completions", {"prompt": "a", "max_tokens": 5000}, "data: "),
        ("/v1/responses", {"input": "a"}, "event: response.failed\ndata: "),
        ("/v1/messages", {"messages": HI, "max_tokens": 5000}, "event: error\ndata: "),
    ],
)
def test_what_does_not_finish_in_time_is_cut_off_and_says_so(
    path: str, body: dict[str, Any], last: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = fake_model(LONG, delay=0.01)
    with serving(model, drain_timeout=0.1) as served, ThreadPoolExecutor(1) as pool:
        ask = partial(httpx2.post, f"{served.url}{path}", json={"model": "fake", **body}, timeout=60)
        whole = pool.submit(ask)
        asked = {"model": "fake", "stream": True, **body}
        with httpx2.stream("POST", f"{served.url}{path}", json=asked, timeout=60) as streamed:
            texts = streamed.iter_text()
            text = next(texts)
            served.wait(lambda model: model.stats().running == 2)
            served.app.drain.begin()
            text += "".join(texts)
    assert (whole.result().status_code, whole.result().headers["content-type"]) == (503, "application/json")
    end = text.split("\n\n")[-2]
    assert end.startswith(last)
    for said in (whole.result().text, end):
        assert "the server is ending, and did not finish this" in said
    assert not caplog.records
    with pytest.raises(ModelClosedError):
        anyio.run(model.send_chat_request, HI)


@pytest.mark.anyio
async def test_what_comes_after_others_were_cut_off_was_not_begun() -> None:
    """Connections stay for a moment."""
    async with fake_model("Hello!") as model:
        app = create_app(model)
        app.drain.cut_off()
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://a") as client:
            refused = await client.post("/v1/chat/completions", json={"model": "fake", "messages": HI})
    assert refused.status_code == 503
    assert refused.json()["error"]["message"] == "the server is ending, and takes no more requests"


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/v1/responses", {"input": "a"}, ["response.created", "response.in_progress", "response.failed"]),
        ("/v1/messages", {"messages": HI, "max_tokens": 5}, ["message_start", "ping", "error"]),
    ],
)
def test_a_stream_that_is_cut_off_before_its_first_chunk_begins_as_others_do(
    path: str, body: dict[str, Any], names: list[str]
) -> None:
    """Though the client has heard that somebody is still there."""
    with serving(fake_model("Hello!", delay=30), drain_timeout=0.1, keep_alive=0.01) as served:
        asked = {"model": "fake", "stream": True, **body}
        with httpx2.stream("POST", f"{served.url}{path}", json=asked, timeout=60) as streamed:
            texts = streamed.iter_text()
            assert next(texts).startswith(": ")
            served.app.drain.begin()
            said = "".join(texts)
    assert [line.removeprefix("event: ") for line in said.split("\n") if line.startswith("event: ")] == names


@pytest.mark.anyio
async def test_it_runs_without_a_server_of_its_own_and_in_another_application() -> None:
    """Under asyncio and trio: an ASGI server of either may run it."""
    served = create_app({"fake": lambda: fake_model("Hello!")})
    app = Starlette(routes=[Mount("/llm", served)], lifespan=served.lifespan)
    transport = httpx2.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx2.AsyncClient(transport=transport, base_url="http://a") as client:
        for stream in (False, True):
            body: dict[str, Any] = {"model": "fake", "messages": HI, "stream": stream}
            answer = await client.post("/llm/v1/chat/completions", json=body)
            assert answer.status_code == 200
            assert '"finish_reason":"stop"' in answer.text
        assert (await client.post("/llm/v1/chat/completions", json={})).status_code == 400
        assert (await client.get("/llm/ready")).json() == {"status": "ready"}
        assert (await client.get("/llm/nothing")).status_code == 404
        figures = (await client.get("/llm/metrics")).text
        assert 'paged_sdk_http_requests_total{path="/v1/chat/completions",status="400"} 1.0' in figures
        assert 'paged_sdk_http_requests_total{path="other",status="404"} 1.0' in figures
    assert not served.models.are_ready


@pytest.mark.anyio
async def test_an_application_s_threads_may_all_wait_for_its_answers(tiny_checkpoint: Path) -> None:
    """As they do where its endpoints ask the server that is mounted in it."""
    builder = TextModelBuilder(tiny_checkpoint).with_force_cpu().with_num_threads(1)
    app = create_app({"tiny": builder.build, "fake": lambda: fake_model("Hello!")})
    long = [{"role": "user", "content": "Hi! " * LARGE_BODY}]
    done, limiter = threading.Event(), anyio.to_thread.current_default_thread_limiter()
    usual, limiter.total_tokens = limiter.total_tokens, 1
    transport = httpx2.ASGITransport(app)
    async with (
        app.lifespan(),
        httpx2.AsyncClient(transport=transport, base_url="http://a") as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(anyio.to_thread.run_sync, partial(done.wait, 60))
        try:
            await until(lambda: limiter.available_tokens == 0)
            with anyio.fail_after(30):
                chat = {"model": "fake", "messages": long, "truncate_sequence": True}
                assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
                vectors = await client.post("/v1/embeddings", json={"model": "tiny", "input": "Hi!"})
                assert vectors.status_code == 200, vectors.text
                assert (await client.get("/metrics")).status_code == 200
        finally:
            done.set()
            limiter.total_tokens = usual


@pytest.mark.anyio
async def test_a_model_that_is_loading_is_503_and_says_when_to_come_back(tmp_path: Path) -> None:
    loads, is_over = anyio.Event(), anyio.Event()

    @asynccontextmanager
    async def slow() -> AsyncIterator[Model]:
        loads.set()
        await is_over.wait()
        async with fake_model("Hello!") as model:
            yield model

    app = create_app({"one": lambda: fake_model("1"), "two": slow}, ServerSettings(adapter_folder=tmp_path))
    (tmp_path / "a").touch()
    client = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://a")

    async def ask(path: str, **body: Any) -> httpx2.Response:
        return await client.post(path, json=body)

    async def serve() -> None:
        async with app.lifespan():
            assert (await ask("/v1/chat/completions", model="two", messages=HI)).status_code == 200
            assert (await ask("/v1/chat/completions", model="poems", messages=HI)).status_code == 404

    async with client, anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        await loads.wait()
        assert (await ask("/v1/chat/completions", model="one", messages=HI)).status_code == 200
        for name in ("two", "poems"):  # which may be an adapter of it
            answer = await ask("/v1/chat/completions", model=name, messages=HI)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert answer.headers["retry-after"] == "5"
        answer = await ask("/v1/load_lora_adapter", lora_name="a", lora_path="a", base_model_name="two")
        assert answer.status_code == 503
        is_over.set()


@pytest.mark.long
def test_the_command_line_logs_lines_of_json(tiny_checkpoint: Path) -> None:
    with program("-m", str(tiny_checkpoint), "--served-model-name", "tiny", "--log-json") as (started, url):
        assert started.stderr is not None
        lines = map(json.loads, started.stderr)
        body = {"model": "tiny", "messages": HI, "max_tokens": 2, "ignore_eos": True}
        assert httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        assert next(lines)["completion_tokens"] == 2
        os.kill(started.pid, signal.SIGTERM)
        assert started.wait(60) == 0
        assert not list(lines)


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["-m", "no/such/model.gguf"], "--model-id: 'no/such/model.gguf' does not exist", 2),
        (["-m", "no/such/model.gguf", "--verbose"], "no/such/model.gguf", 2),
        (["--isq", "Q8_0", "--calibration-file", "no/such.txt"], "--calibration-file: 'no/such.txt'", 2),
        (["-m", "EMPTY"], "is not a model", 1),
        (["--host", "203.0.113.1", "--api-key", "k"], "cannot listen at 203.0.113.1:0", 2),
        # Before it looks at the model, or even at its own options.
        (["--isq", "Q99"], "--isq: 'Q99' is not allowed", 2),
        (["--pa-context-len", "64", "--pa-memory-mb", "64"], "--pa-context-len and --pa-memory-mb exclude", 2),
        (["--verbose", "--quiet"], "--verbose and --quiet exclude each other", 2),
        (["--config", "no/such.json"], "--config: no/such.json: No such file or directory", 2),
        (["--port", "100000"], "--port", 2),
        # Each of these is a process, and all of them are Typer's own errors.
        pytest.param(["--no-such-option"], "--no-such-option", 2, marks=pytest.mark.long),
        pytest.param(["--host"], "--host", 2, marks=pytest.mark.long),
    ],
)
def test_why_it_does_not_serve_is_a_line_of_json(arguments: list[str], said: str, code: int, tmp_path: Path) -> None:
    given = [str(tmp_path) if each == "EMPTY" else each for each in arguments]
    command = [sys.executable, "-m", "paged_sdk", "serve", "--port", "0", "--log-json", *given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == code
    *_, last = map(json.loads, ended.stderr.splitlines())
    assert (last["level"], last["logger"]) == ("error", "paged_sdk.server")
    assert said in last["message"]
    assert ("exception" in last) == ("no/such/model.gguf" in arguments and "--verbose" in arguments)


@pytest.mark.parametrize("sign", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_the_command_line_serves_until_a_signal(tiny_checkpoint: Path, sign: signal.Signals) -> None:
    with program("-m", str(tiny_checkpoint), "--served-model-name", "tiny") as (started, address):
        assert started.stderr is not None
        url = f"{address}/v1"
        body = {"model": "tiny", "messages": HI, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{url}/chat/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(started.pid, sign)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert started.wait(60) == 0
        assert started.stderr.read() == ""


def test_signals_are_heeded_once_it_says_where_it_is() -> None:
    app = create_app({"fake": lambda: fake_model("Hello!")})
    with listen("127.0.0.1", 0) as listener:
        assert asyncio.run(run(app, listener, lambda: signal.raise_signal(signal.SIGINT))) == 0


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6")
@pytest.mark.parametrize(("host", "reached"), [("::", ["::1", "127.0.0.1"]), ("::1", ["::1"])])
def test_every_address_is_of_ipv4_too(host: str, reached: list[str]) -> None:
    def is_reached(address: str) -> bool:
        try:
            socket.create_connection((address, listener.getsockname()[1]), timeout=5).close()
        except OSError:
            return False
        return True

    with listen(host, 0) as listener:
        assert list(filter(is_reached, ("::1", "127.0.0.1"))) == reached


@pytest.mark.long
def test_the_command_line_serves_several_models(tiny_checkpoint: Path) -> None:
    models = ("-m", str(tiny_checkpoint), "-m", str(tiny_checkpoint))
    with program(*models, "--served-model-name", "one", "--served-model-name", "two") as (started, address):
        url = f"{address}/v1"
        names = [each["id"] for each in httpx2.get(f"{url}/models").json()["data"]]
        assert names == ["one", "two"]
        for name in names:
            body = {"model": name, "messages": HI, "max_tokens": 2}
            assert httpx2.post(f"{url}/chat/completions", json=body, timeout=60).json()["model"] == name
        os.kill(started.pid, signal.SIGTERM)
        assert started.wait(60) == 0


def test_models_and_adapters_have_names_of_their_own(tiny_checkpoint: Path, tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--num-threads", "1", "--pa-context-len", "512", "--port", "0")
    twice = CliRunner().invoke(cli, ["serve", *flags, "-m", str(tiny_checkpoint), "-m", str(tiny_checkpoint)])
    assert twice.exit_code == 2
    assert f"another model is called {tiny_checkpoint.name}" in " ".join(twice.stderr.replace("│", " ").split())
    adapter = str(write_adapter(tmp_path / "own", tiny.build_model("llama")))
    each = {"model": str(tiny_checkpoint), "adapters": {"poems": adapter}}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"models": [{**each, "name": "one"}, {**each, "name": "two"}]}))
    same = CliRunner().invoke(cli, ["serve", *flags, "--config", str(config)])
    assert same.exit_code == 2
    assert "another model or adapter is called poems" in " ".join(same.stderr.replace("│", " ").split())


def test_a_port_in_use_is_one_line(tiny_checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(cli, ["serve", "-m", str(tiny_checkpoint), "--port", str(port)])
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: cannot listen at 127.0.0.1:{port}: Address already in use (choose another with --port; 0: any free "
        "one)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", "0.0.0.0", "--api-key", "a b"], "printable ASCII"),
        (["--timeout", "0"], "--timeout"),
        (["--mmproj", "x.gguf", "--format", "plain"], "--mmproj"),
        (["--image-host", "a b"], "--image-host"),
        (["plain", "-a", "phi3"], "--arch"),
        (["--adapter", "a/x", "--adapter", "b/x"], "--adapter"),
        (["--adapter-folder", "no/such/folder"], "--adapter-folder"),
        (["--adapter-folder", ""], "--adapter-folder"),
        (["--max-queue", "0"], "--max-queue"),
        (["--ranking-tokens", "a,a"], "--ranking-tokens"),
        (["--ranking-tokens", "a,not one token"], "--ranking-tokens"),
        (["--ranking-tokens", "a,e"], "--ranking-tokens"),  # the chat template has no role for documents
    ],
)
def test_settings_that_cannot_be_used(tiny_checkpoint: Path, arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["serve", "-m", str(tiny_checkpoint), "--port", "0", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
