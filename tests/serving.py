"""Serve fake models on a socket, for clients as users have them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import httpx2
import openai

from judge import Judge
from paged_sdk import Model
from paged_sdk.server import ModelServer, ServerSettings, create_app
from paged_sdk.server.running import listen, run

HI: Final[list[Any]] = [{"role": "user", "content": "Hi!"}]


class Serving:
    """Holds a server that runs, and what asks it."""

    def __init__(self, app: ModelServer, port: int, key: str) -> None:
        self.app = app
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)
        self.http = httpx2.Client(base_url=self.url, timeout=60, headers={"Authorization": f"Bearer {key}"})

    @property
    def model(self) -> Model:
        """Return the only model."""
        (model,) = self.app.models.all.values()
        return model

    def post(self, path: str = "/v1/chat/completions", **body: Any) -> httpx2.Response:
        chat = {"messages": HI} if path.endswith("chat/completions") else {}
        return self.http.post(path, json={"model": "fake", **chat, **body})

    def events(self, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
        """Return the data of a stream's events."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def wait(self, condition: Callable[[Model], bool]) -> None:
        """Wait for something that is going to be so, and fail if it is not though the model has long done nothing."""
        seen, deadline = self.model.stats(), time.monotonic() + 30
        while not condition(self.model):
            stats = self.model.stats()
            if stats != seen:
                seen, deadline = stats, time.monotonic() + 30
            assert time.monotonic() < deadline, stats
            time.sleep(0.002)

    @contextmanager
    def hanging(self, *, path: str = "/v1/chat/completions", **fields: Any) -> Iterator[socket.socket]:
        """Send a request from a client that hangs up without waiting for the end of the answer."""
        body = json.dumps({"model": "fake", "messages": HI, **fields})
        lines = [f"POST {path} HTTP/1.1", "Host: a", "Content-Type: application/json", f"Content-Length: {len(body)}"]
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.sendall("\r\n".join([*lines, "", body]).encode())
            yield client


@contextmanager
def serving(models: Any, *, key: str = "none", is_judged: bool = True, **settings: Any) -> Iterator[Serving]:
    """Serve models, and close those that are given as they are.

    :param is_judged: whether every answer is held to the OpenAPI document in the end, which takes a while
    """
    app = create_app(models, ServerSettings(**settings))
    ended: list[int] = []
    faults: list[str] = []
    if is_judged:
        app.add_middleware(Judge, document=app.openapi(), faults=faults)

    async def main() -> None:
        try:
            ended.append(await run(app, listener))
        finally:
            if isinstance(models, Model):
                await models.aclose()

    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        served = Serving(app, listener.getsockname()[1], key)
        try:
            served.http.get("/ready").raise_for_status()  # connections wait until the models are loaded
            yield served
        finally:
            served.openai.close()
            served.http.close()
            app.drain.begin()
            thread.join(60)
            assert not thread.is_alive()
    assert ended
    assert not faults, "\n".join(faults)


def idle(model: Model) -> bool:
    stats = model.stats()
    return (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
