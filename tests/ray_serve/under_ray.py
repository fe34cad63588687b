"""Try replicas under Ray Serve itself, in a process of its own: Ray warns of much, and leaves threads behind.

python tests/ray_serve/under_ray.py death      200 streams, of which one replica of two is killed; then both are
python tests/ray_serve/under_ray.py hang       a replica whose step does not end, and its replacement
python tests/ray_serve/under_ray.py stopped    a replica whose process is stopped, and its replacement
python tests/ray_serve/under_ray.py service    the server behind Ray Serve's proxy, which scales up and down
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import ray
from attrs import frozen
from ray import serve

from paged_sdk import EngineDeadError, HangLimits, Model
from paged_sdk.ray import RayReplicas, serve_app
from paged_sdk.testing import fake_model

TEXT = "A sentence that is said. " * 8
PORT = 8231
NO_PROCESSORS: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0}}  # a machine may have fewer than replicas


@frozen
class Talker:
    """Builds a model without weights."""

    def build(self) -> Any:
        return fake_model(TEXT, delay=0.01)


@frozen
class HangsAtFirst:
    """Builds a model whose steps do not end, and then others.

    :ivar mark: a file that tells that there was one
    """

    mark: Path

    def build(self) -> Any:
        is_first = not self.mark.exists()
        self.mark.touch()
        return fake_model(TEXT, delay=3600 if is_first else 0.01)


@contextmanager
def small_ray() -> Iterator[None]:
    """Run Ray on this machine with little memory."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=2,
            object_store_memory=100 << 20,
            include_dashboard=False,
            logging_level="warning",
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            serve.shutdown()
            ray.shutdown()


def replica_processes() -> list[int]:
    """Return the processes of the engines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:  # it has ended
            continue
        if command.startswith(b"ray::ServeReplica:") and b":engine" in command:
            found.append(int(path.parent.name))
    return found


def hello(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"Hi {number}!"}]


async def death() -> None:
    heard, texts, errors, last = [0] * 200, [], [], 0.0

    async def ask(model: Model, number: int) -> None:
        nonlocal last
        text = ""
        try:
            async with model.stream_chat_request(hello(number)) as stream:
                async for chunk in stream:
                    text += "".join(choice.delta.content or "" for choice in chunk.choices)
                    heard[number] = len(text)
            texts.append(text)
        except EngineDeadError as error:
            last = time.monotonic()
            assert heard[number], "a request was lost that had not started"
            assert error.partial_response is not None
            assert TEXT.startswith(error.partial_response.choices[0].message.content)  # type: ignore[union-attr]
            errors.append(error)

    async with RayReplicas(Talker(), num_replicas=2, **NO_PROCESSORS) as model:
        before = replica_processes()
        assert len(before) == 2, before
        async with anyio.create_task_group() as tasks:
            for number in range(200):
                tasks.start_soon(ask, model, number)
            while sum(map(bool, heard)) < 64:
                await anyio.sleep(0.01)
            os.kill(before[0], signal.SIGKILL)
            killed = time.monotonic()
        assert len(texts) + len(errors) == 200
        assert set(texts) == {TEXT}
        assert 0 < len(errors) <= 32, len(errors)
        assert last - killed < 5, last - killed
        with anyio.fail_after(60):  # Ray Serve starts another
            while len(model.replicas) < 2:
                await anyio.sleep(0.1)
        responses = await model.send_chat_requests([hello(number) for number in range(20)])
        assert {each.choices[0].message.content for each in responses} == {TEXT}
        assert all(each.completion_tokens for each in model.replica_stats())
        print(f"{len(texts)} whole, {len(errors)} errors within {last - killed:.2f} s")
        for each in replica_processes():
            os.kill(each, signal.SIGKILL)
        killed = time.monotonic()
        with anyio.fail_after(60):
            while model.replicas:
                await anyio.sleep(0.01)
        responses = await model.send_chat_requests([hello(number) for number in range(20)])
        assert {each.choices[0].message.content for each in responses} == {TEXT}
        print(f"20 texts {time.monotonic() - killed:.1f} s after the last replica was killed")
    assert not replica_processes()


async def hang() -> None:
    limits = HangLimits(step_seconds=2)
    with tempfile.TemporaryDirectory() as folder:
        builder = HangsAtFirst(Path(folder, "mark"))
        async with RayReplicas(builder, hang_limits=limits, graceful_shutdown_timeout_s=5, **NO_PROCESSORS) as model:
            before, start = replica_processes(), time.monotonic()
            with anyio.fail_after(120):
                responses = await model.send_chat_requests([hello(number) for number in range(5)])
            assert {each.choices[0].message.content for each in responses} == {TEXT}
            after = replica_processes()
            print(f"5 texts by its replacement after {time.monotonic() - start:.1f} s; {before} {after}")
            with anyio.fail_after(120):
                while set(before) & set(replica_processes()):
                    await anyio.sleep(0.1)
    assert not replica_processes()


async def stopped() -> None:
    limits = HangLimits(silent_seconds=6, step_seconds=None)
    async with RayReplicas(Talker(), hang_limits=limits, graceful_shutdown_timeout_s=5, **NO_PROCESSORS) as model:
        (before,) = replica_processes()
        os.kill(before, signal.SIGSTOP)
        start = time.monotonic()
        with anyio.fail_after(120):
            responses = await model.send_chat_requests([hello(number) for number in range(5)])
        taken = time.monotonic() - start
        assert {each.choices[0].message.content for each in responses} == {TEXT}
        assert taken > 4, taken
        with anyio.fail_after(120):  # Ray Serve asks it to end first
            while before in replica_processes():
                await anyio.sleep(0.1)
        gone = time.monotonic() - start
        print(f"gone after {gone:.1f} s; 5 texts in place of one that was stopped after {taken:.1f} s")
    assert not replica_processes()


def service() -> None:
    serve.start(http_options={"port": PORT})
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 4,
        "upscale_delay_s": 1,
        "downscale_delay_s": 2,
        "metrics_interval_s": 1,
        "look_back_period_s": 2,
    }
    engines = {"autoscaling_config": scaling, **NO_PROCESSORS}
    serve.run(serve_app(Talker(), model_name="talker", engines=engines, faces=NO_PROCESSORS), name="llm")
    assert json.loads(asked("/health"))["status"] == "ok"
    answer = json.loads(asked("/v1/chat/completions", {"model": "talker", "messages": hello(0)}))
    assert answer["choices"][0]["message"]["content"] == TEXT
    events = asked("/v1/chat/completions", {"model": "talker", "messages": hello(1), "stream": True}).splitlines()
    said = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in said) == TEXT
    enough = threading.Event()

    def keep_asking(number: int) -> None:
        while not enough.is_set():
            whole = json.loads(asked("/v1/chat/completions", {"model": "talker", "messages": hello(number)}))
            texts.append(whole["choices"][0]["message"]["content"])

    texts: list[str] = []
    threads = [threading.Thread(target=keep_asking, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    until(lambda: blocks() == 2 * 4096)
    enough.set()
    for thread in threads:
        thread.join()
    until(lambda: blocks() == 4096)
    assert set(texts) == {TEXT}
    print(f"{len(texts)} texts, scaled up and down")


def asked(path: str, body: object = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", data, {"content-type": "application/json"} if data else {}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = answer.read().decode()
    return text


def blocks() -> float:
    """Return how many blocks of KV all replicas have that the server knows."""
    line = next(line for line in asked("/metrics").splitlines() if line.startswith("paged_sdk_blocks_total{"))
    return float(line.rsplit(" ", 1)[1])


def until(condition: Any) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def main() -> None:
    with small_ray():
        if sys.argv[1] == "service":
            service()
        else:
            anyio.run({"death": death, "hang": hang, "stopped": stopped}[sys.argv[1]])


if __name__ == "__main__":
    main()
