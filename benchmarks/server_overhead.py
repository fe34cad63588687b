"""Measure the overhead of the HTTP server: 16 streams over HTTP against the same 16 streams in process, of one model.

python -m benchmarks.server_overhead --model path/or/hub-id --rounds 5

The model is loaded once. Rounds alternate between streams that tasks of this process read, and streams that a client
reads over sockets. The client is another process, which reads bytes without parsing them, so that it takes little CPU
time; this is measured and subtracted, since a client on another machine would take none. Each round generates the same
number of tokens, ignoring end tokens. The time to the first byte is measured one request at a time, alternating, over a
persistent connection.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from attrs import frozen
from rich.console import Console
from rich.table import Table

from paged_sdk import Model, RequestBuilder, SamplingParams, TextModelBuilder, embedded_model_path
from paged_sdk.server import ServerSettings, create_app
from paged_sdk.server.running import listen, run

__all__ = ["Overhead", "measure"]

PATH: Final = "/v1/chat/completions"
PROMPT: Final = "Tell a long story about a lighthouse, number {}."
PROGRAM: Final = str(Path(__file__).resolve())
CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


@frozen(kw_only=True)
class Overhead:
    """Holds the measurements.

    :ivar in_process: tokens per second of each round in process
    :ivar served: tokens per second of each round over HTTP
    :ivar without_client: as ``served``, with the client's CPU time subtracted
    :ivar first_in_process: seconds to each first chunk in process
    :ivar first_served: seconds to each first byte over HTTP
    """

    in_process: tuple[float, ...]
    served: tuple[float, ...]
    without_client: tuple[float, ...]
    first_in_process: tuple[float, ...]
    first_served: tuple[float, ...]

    @property
    def share(self) -> float:
        """Return the fraction by which the server is slower, without the client's CPU time."""
        return 1 - statistics.median(self.without_client) / statistics.median(self.in_process)

    @property
    def added_ms(self) -> float:
        """Return the milliseconds that the server adds before the first byte."""
        return (statistics.median(self.first_served) - statistics.median(self.first_in_process)) * 1000


async def measure(model: Model, *, streams: int, tokens: int, rounds: int, firsts: int) -> Overhead:
    """Measure a model in process and over HTTP.

    :param streams: number of concurrent texts
    :param tokens: tokens of each text
    :param firsts: number of requests of each kind that measure the time to the first byte
    """
    app = create_app({"model": model}, ServerSettings())
    with listen("127.0.0.1", 0) as listener:
        server = asyncio.create_task(run(app, listener))
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            PROGRAM,
            str(listener.getsockname()[1]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            in_process, served, without_client = [], [], []
            await _in_process(model, streams, tokens)  # caches the prompts, and warms up
            await _over_http(client, streams, tokens)
            for _ in range(rounds):
                in_process.append(streams * tokens / await _in_process(model, streams, tokens))
                answer = await _over_http(client, streams, tokens)
                served.append(streams * tokens / answer["seconds"])
                without_client.append(streams * tokens / (answer["seconds"] - answer["cpu_seconds"] / CORES))
            first_in_process, first_served = [], []
            for _ in range(firsts):
                first_in_process.append(await _first_chunk(model))
                first_served.append((await _over_http(client, 1, 1))["first"])
        finally:
            assert client.stdin is not None
            client.stdin.close()
            await client.wait()
            app.drain.begin()
            await server
    return Overhead(
        in_process=tuple(in_process),
        served=tuple(served),
        without_client=tuple(without_client),
        first_in_process=tuple(first_in_process),
        first_served=tuple(first_served),
    )


def _request(number: int, tokens: int) -> RequestBuilder:
    sampling = SamplingParams(temperature=0, max_len=tokens, ignore_eos=True)
    return RequestBuilder().add_message("user", PROMPT.format(number)).with_sampling(sampling)


async def _in_process(model: Model, streams: int, tokens: int) -> float:
    """Return the seconds that streams take."""

    async def read(number: int) -> None:
        async with model.stream_chat_request(_request(number, tokens)) as stream:
            async for _ in stream:
                pass

    start = time.perf_counter()
    await asyncio.gather(*map(read, range(streams)))
    return time.perf_counter() - start


async def _first_chunk(model: Model) -> float:
    start = time.perf_counter()
    async with model.stream_chat_request(_request(0, 1)) as stream:
        await stream.__anext__()
        return time.perf_counter() - start


async def _over_http(client: asyncio.subprocess.Process, streams: int, tokens: int) -> Any:
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(json.dumps([streams, tokens]).encode() + b"\n")
    return json.loads(await client.stdout.readline())


def read_streams(connections: Sequence[socket.socket], tokens: int) -> dict[str, float]:
    """Send a request on each connection and read the answers to their ends, as the client."""
    requests = []
    for number in range(len(connections)):
        fields = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        messages = [{"role": "user", "content": PROMPT.format(number)}]
        body = json.dumps({"model": "model", "messages": messages, **fields})
        head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        requests.append(f"{head}\r\n\r\n{body}".encode())
    selector = selectors.DefaultSelector()
    cpu, start, first = time.process_time(), time.perf_counter(), 0.0
    ends: dict[socket.socket, bytes] = {}
    for connection, request in zip(connections, requests, strict=True):
        connection.sendall(request)
        selector.register(connection, selectors.EVENT_READ, connection)
        ends[connection] = b""
    while ends:
        for key, _ in selector.select():
            connection = key.data
            received = connection.recv(1 << 16)
            first = first or time.perf_counter() - start
            ends[connection] = (ends[connection] + received)[-5:]
            assert received, "the server has hung up"
            if ends[connection] == b"0\r\n\r\n":  # the last chunk of the answer
                selector.unregister(connection)
                del ends[connection]
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "cpu_seconds": time.process_time() - cpu, "first": first}


def main(
    model: Annotated[str | None, typer.Option(help="A directory, a GGUF file or a hub id.")] = None,
    streams: int = 16,
    tokens: int = 128,
    rounds: int = 5,
    firsts: int = 30,
) -> None:
    """Measure the overhead of the HTTP server."""

    async def run_all() -> Overhead:
        builder = TextModelBuilder(model or embedded_model_path())
        async with builder.build() as built:
            return await measure(built, streams=streams, tokens=tokens, rounds=rounds, firsts=firsts)

    found = asyncio.run(run_all())
    table = Table("", "in process", "over HTTP", "without the client's time", "added")
    rates = [f"{statistics.median(each):.1f}" for each in (found.in_process, found.served, found.without_client)]
    table.add_row(f"tokens/s, {streams} streams", *rates, f"{found.share:.1%}")
    first = [f"{statistics.median(each) * 1000:.2f}" for each in (found.first_in_process, found.first_served)]
    table.add_row("first byte, ms", *first, "", f"{found.added_ms:.2f}")
    Console(width=120).print(table)


def _client(port: int) -> None:
    """Execute the commands on stdin. Connections are opened anew, since the server closes unused ones."""
    kept = [_connected(port)]
    for line in sys.stdin:
        streams, tokens = json.loads(line)
        if streams > 1:
            connections = [_connected(port) for _ in range(streams)]
            answer = read_streams(connections, tokens)
            for connection in (*connections, *kept):
                connection.close()
            kept = [_connected(port)]
        else:
            answer = read_streams(kept, tokens)
        print(json.dumps(answer), flush=True)


def _connected(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].isdecimal():
        _client(int(sys.argv[1]))
    else:
        typer.run(main)
