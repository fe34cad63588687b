"""Images over HTTP: as data, and by address from hosts that are allowed."""

from __future__ import annotations

import base64
import http.server
import io
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from paged_sdk import BlockingModel, InvalidRequestError, RequestBuilder, SamplingParams, VisionModelBuilder
from paged_sdk.server import image_urls
from paged_sdk.server.image_urls import ImageUrls
from serving import serving
from tiny_vision import make_vision_checkpoint, picture


def png(seed: int) -> bytes:
    written = io.BytesIO()
    Image.fromarray(picture(28, 28, seed=seed)).save(written, "PNG")
    return written.getvalue()


def asked(url: str) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return [{"role": "user", "content": parts}]


@contextmanager
def web() -> Iterator[str]:
    """Run a web server with images and things that are none."""

    ended = threading.Event()  # nobody sets it: waiting for it is the rhythm of what drips

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            match self.path:
                case "/a.png?x=1":
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(png(1))
                case "/moved":
                    self.send_response(302)
                    self.send_header("Location", "/a.png?x=1")
                    self.end_headers()
                case "/loop" | "/away":
                    self.send_response(302)
                    self.send_header("Location", "/loop" if self.path == "/loop" else "http://169.254.169.254/x")
                    self.end_headers()
                case "/large":
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(bytes(2 << 16))
                case "/dripping" | "/dripping-head":
                    if self.path == "/dripping":
                        self.send_response(200)
                        self.end_headers()
                    try:
                        while True:
                            self.wfile.write(b"A")
                            ended.wait(0.05)
                    except OSError:
                        pass
                case "/bad":
                    self.wfile.write(b"no HTTP\r\n\r\n")
                case _:
                    self.send_error(404)

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_model_sees_images(tmp_path: Path) -> None:
    make_vision_checkpoint("llava", tmp_path)
    builder = VisionModelBuilder(tmp_path).with_dtype("float32").with_force_cpu().with_num_threads(1)
    greedy = SamplingParams(temperature=0, max_len=8)

    def url(seed: int) -> str:
        return f"data:image/png;base64,{base64.b64encode(png(seed)).decode()}"

    with BlockingModel(builder.build()) as model:
        expected = [
            model.send_chat_request(RequestBuilder.from_messages(asked(url(seed))).with_sampling(greedy))
            for seed in (1, 2)
        ]
    texts = [response.choices[0].message.content for response in expected]
    assert texts[0] != texts[1]
    with web() as site, serving({"v": builder.build}, image_hosts=(site.removeprefix("http://"),)) as served:

        def answer(address: str) -> str | None:
            response = served.openai.chat.completions.create(
                model="v", messages=asked(address), max_tokens=8, temperature=0
            )
            return response.choices[0].message.content

        def message(source: dict[str, str]) -> str:
            content = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
            body = {"max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": content}]}
            blocks: list[dict[str, str]] = served.post("/v1/messages", **{**body, "model": "v"}).json()["content"]
            return "".join(block["text"] for block in blocks)

        def response(address: str) -> str:
            part: Any = [{"type": "input_image", "image_url": address}, {"type": "input_text", "text": "What is this?"}]
            return served.openai.responses.create(
                model="v", input=[{"role": "user", "content": part}], max_output_tokens=8, temperature=0
            ).output_text

        assert response(url(1)) == response(f"{site}/a.png?x=1") == texts[0]
        data = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(1)).decode()}
        assert message(data) == message({"type": "url", "url": f"{site}/a.png?x=1"}) == texts[0]
        assert [answer(url(1)), answer(url(2))] == texts
        assert [answer(f"{site}/a.png?x=1"), answer(f"{site}/moved")] == [texts[0]] * 2
        for path in ("/absent", "/loop", "/away", "/bad"):
            with pytest.raises(openai.BadRequestError) as refused:
                answer(site + path)
            assert refused.value.param == "image_url"
        with pytest.raises(openai.BadRequestError, match="fetches images from"):
            answer(site.replace("127.0.0.1", "localhost") + "/a.png")
    with serving({"v": builder.build}) as closed, pytest.raises(openai.BadRequestError, match="data: URL"):
        closed.openai.chat.completions.create(model="v", messages=asked("http://127.0.0.1/a.png"))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2001:4860:4860::8888", True),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::8.8.8.8", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("::127.0.0.1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::10.0.0.1", False),
        ("64:ff9b:1::1", False),
        ("2002:7f00:1::", False),
        ("fe80::1%2", False),
        ("fd00:ec2::254", False),
        ("ff0e::1", False),
    ],
)
def test_which_addresses_are_public(address: str, expected: bool) -> None:
    assert image_urls.is_public(address) is expected


def resolving(*addresses: str) -> Any:
    """Return a ``getaddrinfo`` that knows these addresses of every name."""
    real = socket.getaddrinfo

    def found(host: str, port: int, *arguments: Any, **options: Any) -> list[Any]:
        known = [host] if host in addresses else addresses
        return [each for address in known for each in real(address, port, type=socket.SOCK_STREAM)]

    return found


@pytest.mark.anyio
async def test_a_slow_lookup_of_a_host_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        ended.wait(5)
        raise OSError

    monkeypatch.setattr(image_urls, "SECONDS", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with pytest.raises(InvalidRequestError, match=r"within 0\.05 s"):
        await ImageUrls(("*",)).fill({"messages": asked("http://slow.example/a.png")})
    ended.set()


@pytest.mark.anyio
async def test_a_host_of_several_addresses_is_reached_at_any(monkeypatch: pytest.MonkeyPatch) -> None:
    with web() as site:
        port = site.rpartition(":")[2]
        body: dict[str, Any] = {"messages": asked(f"http://two.example:{port}/a.png?x=1")}
        monkeypatch.setattr(socket, "getaddrinfo", resolving("::1", "127.0.0.1"))  # nobody listens at the first
        await ImageUrls((f"two.example:{port}",)).fill(body)
    (part, _) = body["messages"][0]["content"]
    assert part["image_url"]["url"].endswith(base64.b64encode(png(1)).decode())


@pytest.mark.anyio
async def test_only_the_public_addresses_of_a_host_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def refuse(address: tuple[str, int], timeout: float) -> Any:
        tried.append(address[0])
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", resolving("10.0.0.1", "8.8.8.8", "::1", "1.1.1.1"))
    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(InvalidRequestError, match="ConnectionRefusedError"):
        await ImageUrls(("*",)).fill({"messages": asked("http://mixed.example/a.png")})
    assert tried == ["8.8.8.8", "1.1.1.1"]


@pytest.mark.anyio
async def test_nobody_reaches_the_server_s_own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = ImageUrls(("*",))
    with web() as site:
        for host in ("127.0.0.1", "localhost", "0x7f.1", "[::ffff:10.0.0.1]", "169.254.169.254", "[::1]", "10.0.0.1"):
            address = f"http://{host}/a"
            with pytest.raises(InvalidRequestError, match="public address"):
                await everywhere.fill({"messages": asked(address)})
        for address in (site, "http://localhost:22/", "http://127.0.0.1:x/", "http://user@127.0.0.1:6379/"):
            with pytest.raises(InvalidRequestError):
                await everywhere.fill({"messages": asked(address)})
        for address in ("http://", "http://a:b/", "http://no-such-host.invalid/"):
            with pytest.raises(InvalidRequestError):
                await everywhere.fill({"messages": asked(address)})
        monkeypatch.setattr(image_urls, "MAX_BYTES", 1 << 16)
        with pytest.raises(InvalidRequestError, match="at most 65536 bytes"):
            await ImageUrls((site.removeprefix("http://"),)).fill({"messages": asked(f"{site}/large")})
        with pytest.raises(InvalidRequestError, match="fetches images from"):  # a host is one at its usual port
            await ImageUrls(("127.0.0.1",)).fill({"messages": asked(f"{site}/a.png?x=1")})
        address = f"{site}/a.png?x=1"
        few = ImageUrls((site.removeprefix("http://").upper(),), 3 * len(png(1)))
        await few.fill({"messages": [*asked(address), *asked(address), *asked(address)]})
        with pytest.raises(InvalidRequestError, match="at most 0 bytes"):
            await few.fill({"messages": [*asked(address), *asked(address), *asked(address), *asked(address)]})
        monkeypatch.setattr(image_urls, "SECONDS", 0.2)
        for path in ("/dripping", "/dripping-head"):
            with pytest.raises(InvalidRequestError, match="image"):  # by itself it would go on for an hour
                await ImageUrls((site.removeprefix("http://"),)).fill({"messages": asked(site + path)})
    many = {"messages": asked("http://a/") * 33}
    with pytest.raises(InvalidRequestError, match="at most 32"):
        await everywhere.fill(many)
    others: list[Any] = [[], {"messages": 1}, {"messages": [1, {"content": [1]}]}, {"messages": asked("data:a")}]
    for body in others:
        assert await everywhere.fill(body) is body
