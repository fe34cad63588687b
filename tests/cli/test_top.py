"""``paged-sdk top``: the figures of servers, of another program and of nobody."""

from __future__ import annotations

import io
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any, Final

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from rich.console import Console
from typer.testing import CliRunner, Result

from paged_sdk.cli import dashboard
from paged_sdk.cli.app import app
from paged_sdk.cli.dashboard import Dashboard
from paged_sdk.cli.server_figures import ServerFigures
from paged_sdk.testing import fake_model
from serving import HI, Serving, serving

ANSWER: Final = "Hello!"
COUNT: Final = len(ANSWER) + 1
"""Of the answer's tokens: a fake's is a byte, and there is one that ends it."""


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """Return a server that has answered two requests and refused one."""
    with serving(fake_model(ANSWER), key="secret", api_keys=("secret",)) as served:
        for _ in range(2):
            served.openai.chat.completions.create(model="fake", messages=HI)
        assert served.post(model="another").status_code == 404
        yield served


def top(*arguments: str, **variables: str | None) -> Result:
    return CliRunner().invoke(app, ["top", *arguments], env={"PAGED_SDK_API_KEY": None, **variables})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_here_is_not_asked_through_a_proxy(server: Serving, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        proxy.close()  # whoever asks there is refused
        shown = top(f"http://{host}:{server.port}", "--api-key", "secret", http_proxy=address, no_proxy=None)
        assert shown.exit_code == 0, shown.output
        elsewhere = top("http://203.0.113.1:9", http_proxy=address, no_proxy=None)
        assert "Connection refused" in elsewhere.output


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/metrics"])
def test_the_figures_are_the_model_s(server: Serving, suffix: str) -> None:
    shown = top(server.url + suffix, "--json", "--api-key", "secret")
    assert shown.exit_code == 0, shown.output
    said = json.loads(shown.stdout)
    stats = server.model.stats()
    model = said["models"]["fake"]
    counted = {name: getattr(stats, name) for name in model if hasattr(stats, name) and "per_sec" not in name}
    assert len(counted) >= 12
    assert {name: model[name] for name in counted} == counted
    assert model["completion_tokens"] == 2 * COUNT
    assert model["completion_tok_per_sec"] == 0  # of an engine that does nothing now
    assert model["first_token_seconds"] > 0
    assert (said["requests"]["200"] >= 2, said["requests"]["404"]) == (True, 1)


def test_one_table_where_no_terminal_is(server: Serving) -> None:
    shown = top(server.url.removeprefix("http://"), PAGED_SDK_API_KEY="secret")
    assert shown.exit_code == 0, shown.output
    assert "0 running" in shown.stdout
    assert f"{2 * COUNT} tokens so far" in shown.stdout
    assert "1 x 404" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_it_is_watched_until_ctrl_c_and_while_it_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    looks: list[float] = []
    with port_of_nobody() as nobody, serving(fake_model(ANSWER)) as served:
        watched = Dashboard(served.url, console=Console(file=out, force_terminal=True, width=100))

        def sleep(seconds: float) -> None:
            looks.append(seconds)
            if len(looks) == 1:
                served.openai.chat.completions.create(model="fake", messages=HI)
            elif len(looks) == 2:
                assert f"{COUNT} tokens so far" in out.getvalue()
                monkeypatch.setattr(watched, "_url", f"http://127.0.0.1:{nobody}")
            else:
                assert "no answer from" in out.getvalue()
                raise KeyboardInterrupt

        monkeypatch.setattr(dashboard, "time", SimpleNamespace(sleep=sleep))
        try:
            assert watched.is_live
            watched.watch(0.25)
        finally:
            monkeypatch.undo()
    assert looks == [0.25] * 3


def test_no_color(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        out = io.StringIO()
        Dashboard(server.url, key="secret", console=Console(file=out, force_terminal=True)).show()
        return out.getvalue()

    color = re.compile(r"\x1b\[[\d;]*3\d[;m]")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert color.search(shown())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not color.search(shown())


@contextmanager
def port_of_nobody() -> Iterator[int]:
    """Give a port where nobody answers, and that nobody else can get meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_server_that_wants_its_key(server: Serving, key: str | None) -> None:
    refused = top(server.url, "--once", PAGED_SDK_API_KEY=key)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "the server needs an API key: --api-key" in refused.stderr


def test_a_key_of_a_file_ends_in_a_line(server: Serving) -> None:
    assert top(server.url, "--once", PAGED_SDK_API_KEY="secret\n").exit_code == 0


@pytest.mark.parametrize("key", ["sec\nret", "geheimnisträger"])
def test_a_key_that_cannot_be_sent_is_not_shown(key: str) -> None:
    refused = top("http://127.0.0.1:1", "--once", PAGED_SDK_API_KEY=key)
    assert refused.exit_code == 2
    assert "--api-key" in refused.stderr
    assert key not in refused.stderr
    assert "geheim" not in refused.stderr


def test_nobody_there() -> None:
    with port_of_nobody() as port:
        refused = top(f"http://127.0.0.1:{port}", "--json")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "no answer from http://127.0.0.1:" in refused.stderr
    assert refused.stderr.endswith(": is paged-sdk serve running there?\n")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://[::1", "http://host:99999"])
def test_no_address(url: str) -> None:
    refused = top(url, "--once")
    assert refused.exit_code == 2
    assert "expected the address of a server" in " ".join(refused.stderr.replace("│", " ").split())


NAMED: Final = b'paged_sdk_http_requests_in_flight 1\npaged_sdk_running{model="[/b]"} 1\n'


class Other(BaseHTTPRequestHandler):
    """Answers as programs of other kinds do."""

    def do_GET(self) -> None:
        if self.path == "/cut/metrics":
            self.wfile.write(b"SSH-2.0-OpenSSH\r\n")
            return
        bodies = {"/metrics": b"up 1\n", "/broken/metrics": b"\xff", "/named/metrics": NAMED}
        body = bodies.get(self.path)
        self.send_response(500 if body is None else 200)
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "it is not a server of this package"),
        ("/broken", "codec can't decode"),
        ("/none", "500 Internal Server"),
        ("/cut", "SSH-2.0"),
    ],
)
def test_another_program(path: str, why: str) -> None:
    refused = top_of_other(path)
    assert refused.exit_code == 1
    assert why in refused.stderr


def top_of_other(path: str) -> Result:
    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        shown = top(f"http://127.0.0.1:{other.server_port}{path}", "--once")
        thread.join()
    return shown


def test_brackets_in_the_name_of_a_model_are_no_style() -> None:
    shown = top_of_other("/named")
    assert shown.exit_code == 0, shown.output
    assert "[/b]" in shown.stdout


@pytest.mark.parametrize("name", ["plain", 'with "quotes" and } {', "back\\slash\\n", "two\nlines", "a,b=c", "ünï"])
def test_models_of_any_name_are_read_as_prometheus_writes_them(name: str) -> None:
    registry = CollectorRegistry()
    Gauge("paged_sdk_http_requests_in_flight", "Requests.", registry=registry).set(3)
    Gauge("paged_sdk_running", "Sequences.", ("model",), registry=registry).labels(name).set(2)
    Gauge("paged_sdk_blocks_total", "Blocks.", ("model",), registry=registry).labels(name).set(7)
    Counter("paged_sdk_prefix_queries", "Tokens.", ("model",), registry=registry).labels(name).inc(4e7)
    Gauge("paged_sdk_completion_tok_per_sec", "Tokens.", ("model",), registry=registry).labels(name).set(12.5)
    figures = ServerFigures.from_text(generate_latest(registry).decode())
    assert figures is not None
    assert figures.in_flight == 2  # and the one that asked
    (found,) = figures.models
    assert found == name
    model = figures.models[name]
    assert (model.running, model.blocks_total, model.prefix_queries) == (2, 7, 40_000_000)
    assert model.completion_tok_per_sec == 12.5
    assert model.first_token_seconds is None
    assert model.prefix_hit_rate == 0
