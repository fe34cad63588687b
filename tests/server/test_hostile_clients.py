"""Clients that mean no good: they send slowly, or nothing, or too much, or ask for what is not theirs."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest

from paged_sdk.server import bodies, connection
from paged_sdk.server.running import allow_connections, listen
from paged_sdk.testing import fake_model
from serving import HI, Serving, serving

BODY = json.dumps({"model": "fake", "messages": HI})
HEAD = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}"


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(fake_model("Hello!")) as served:
        yield served


def connect(served: Serving) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=30)


def rest(client: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection.

    :raises ConnectionResetError: it has closed it before it has read everything, and nothing of an answer has come
    """
    pieces = []
    try:
        while piece := client.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:
        if not pieces:
            raise
    return b"".join(pieces)


@pytest.mark.parametrize("sent", ["", "POST", HEAD])
def test_headers_have_to_come(served: Serving, monkeypatch: pytest.MonkeyPatch, sent: str) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)
    with connect(served) as client:
        client.sendall(sent.encode())
        assert rest(client) == b""


def test_the_headers_of_a_second_request_have_to_come(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(served) as client:
        client.sendall(f"{HEAD}\r\n\r\n{BODY}".encode())
        assert client.recv(1) == b"H"
        served.wait(lambda model: not served.app.drain.in_flight)
        monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)  # the first may take its time
        client.sendall(b"GET /hea")
        assert rest(client).startswith(b"TTP/1.1 200 OK")


def test_answers_take_as_long_as_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    seconds = 0.05
    while len(texts) < 2:
        texts.clear()
        model = fake_model("Hello!", delay=0.4 * seconds)
        with serving(model) as served, monkeypatch.context() as patch:
            served.http.headers["Connection"] = "close"
            assert served.http.get("/ready").status_code == 200  # which ends the connection that there is
            patch.setattr(connection, "HEAD_SECONDS", seconds)
            try:
                texts.append(served.post().text)
                texts.append(served.post(stream=True).text)
            except httpx2.TransportError:  # the machine is so busy that the head came too late
                assert len(model.requests) == len(texts), "it was cut off while it was answered"
                seconds *= 4
    assert json.loads(texts[0])["choices"][0]["message"]["content"] == "Hello!"
    lines = [line.removeprefix("data: ") for line in texts[1].split("\n\n")]
    choices = [choice for line in lines if line.startswith("{") for choice in json.loads(line)["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello!"


def test_a_body_has_to_come(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.05)
    with connect(served) as client:
        client.sendall(f"{HEAD}\r\n\r\n{BODY[:10]}".encode())
        answer = rest(client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert re.search(rb"the body arrives too slowly: 10 bytes in \d+ s", answer)


def test_a_body_may_take_longer_the_longer_it_is(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.05)
    monkeypatch.setattr(bodies, "SLOWEST_BODY", 1)  # what has come is worth hours
    with connect(served) as client:
        client.sendall(f"{HEAD}\r\nConnection: close\r\n\r\n{BODY[:-1]}".encode())
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(30)
        client.sendall(BODY[-1:].encode())
        assert rest(client).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "head",
    [
        "GET / HTTP/1.1\r\nHost: a\r\nX: " + "x" * 1_000_000,
        "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2",
        "GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip",
        "GET / HTTP/1.1\r\nHost : a",
        "\x16\x03\x01\x02\x00",
    ],
)
def test_what_is_no_request_ends_the_connection(served: Serving, head: str) -> None:
    with connect(served) as client:
        try:
            client.sendall(f"{head}\r\n\r\n".encode("latin-1"))
            answer = rest(client)
        except (ConnectionResetError, BrokenPipeError):  # it was closed before all was sent
            return
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 ", b"HTTP/1.1 501 ")), answer


def test_a_length_that_is_said_is_not_waited_for(served: Serving) -> None:
    """No memory is taken before so much comes."""
    with connect(served) as client:
        client.sendall(HEAD.rpartition(" ")[0].encode() + b" 60000000\r\n\r\n{")
    served.wait(lambda model: not served.app.drain.in_flight)


@pytest.mark.parametrize("kind", ["Content-Length: 400000", "Transfer-Encoding: chunked"])
def test_the_connection_stays_when_a_body_is_too_long(kind: str) -> None:
    """Whoever ends one that somebody still sends on resets it, and the client may never read why."""
    piece = b"x" * 200_000
    piece = piece if "Length" in kind else b"%x\r\n%b\r\n" % (len(piece), piece)
    head = HEAD.rpartition("\r\n")[0]
    with serving(fake_model("Hello!"), max_body_bytes=100_000) as served, connect(served) as client:
        client.sendall(f"{head}\r\n{kind}\r\n\r\n".encode() + piece)
        answer = b""
        while b"body_too_large" not in answer:
            received = client.recv(65536)
            assert received, answer
            answer += received
        assert answer.startswith(b"HTTP/1.1 413 ")
        client.sendall(piece + (b"" if "Length" in kind else b"0\r\n\r\n"))
        client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert b"HTTP/1.1 200 OK" in rest(client)


def test_what_is_too_long_need_not_be_sent(served: Serving) -> None:
    """A client that asks first, as curl does, is told before it has sent anything."""
    with connect(served) as client:
        client.sendall(f"{HEAD}0000000\r\nExpect: 100-continue\r\n\r\n".encode())
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "path",
    [
        "/page/../settings.py",
        "/page/%2e%2e/settings.py",
        "/page/..%2fsettings.py",
        "/page//etc/passwd",
        "/page/%00",
        "/v1/models/../../etc/passwd",
        "/v1/models/%2e%2e%2f%00",
        "//v1/models",
    ],
)
def test_paths_lead_to_nothing_else(served: Serving, path: str) -> None:
    with connect(served) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        answer = rest(client)
    assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 405 ")), answer
    assert b"root:" not in answer


def test_adapters_are_within_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    (tmp_path / "secret").mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    with serving(fake_model("Hello!"), adapter_folder=folder) as served:
        for path in ("../secret", "link", str(tmp_path / "secret"), ".", "", "x/../../secret", "a\0b", "x" * 4000, "~"):
            refused = served.http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": path})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path"), refused.text
            assert "secret" not in refused.json()["error"]["message"].replace(path, "")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other options")
def test_connections_of_clients_that_are_gone_end() -> None:
    with (
        listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 300_000


def test_a_process_may_hold_as_many_connections_as_the_system_lets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append(both))
    for soft, hard in ((1024, 4096), (1024, 1 << 20), (1024, resource.RLIM_INFINITY), (4096, 4096), (1 << 20, 1 << 20)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, both=(soft, hard): both)
        allow_connections()
    assert limits == [(4096, 4096), (65536, 1 << 20), (65536, resource.RLIM_INFINITY)]


MANY: Final[dict[str, tuple[str, dict[str, Any], str]]] = {
    "prompts": ("/v1/completions", {"prompt": ["a"] * 1025}, "prompt"),
    "prompts of ids": ("/v1/completions", {"prompt": [[1]] * 1025}, "prompt"),
    "ids": ("/v1/completions", {"prompt": [1] * ((1 << 20) + 1)}, "prompt"),
    "texts": ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
    "lists": ("/v1/chat/completions", {"messages": [[]] * 1_000_001}, "body"),
    "stop strings": ("/v1/chat/completions", {"messages": HI, "stop": ["a"] * 5000}, "stop"),
    "end tokens": ("/v1/chat/completions", {"messages": HI, "stop_token_ids": [1] * 65_537}, "stop_token_ids"),
    "tools": ("/v1/chat/completions", {"messages": HI, "tools": [{"type": "function"}] * 5000}, "tools"),
}


@pytest.mark.parametrize("case", MANY)
def test_too_many_of_anything_is_400(served: Serving, case: str) -> None:
    """Taking them would keep the server from answering others for seconds."""
    path, fields, param = MANY[case]
    refused = served.post(path, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert len(refused.text) < 1000
