"""Processes that were started one by one, as on several machines, compute one model together."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from paged_sdk import BlockingModel, SamplingParams, TextModelBuilder
from program import PROGRAM
from rank_threads import free_port
from tiny import make_checkpoint

PROMPTS = ["What is the capital of France?", "def add(first, second): return first + second"]
GREEDY = SamplingParams(temperature=0.0, max_len=24, ignore_eos=True)

APPLICATION = """
import asyncio, sys, time
from paged_sdk import EngineDeadError, SamplingParams, TextModelBuilder

path, dtype, *prompts = sys.argv[1:]

async def main():
    builder = TextModelBuilder(path).with_dtype(dtype).with_num_threads(1).with_tensor_parallel("auto")
    async with builder.build() as model:
        greedy = SamplingParams(temperature=0.0, max_len=24, ignore_eos=True)
        for prompt in prompts:
            print(repr((await model.send_completion_request(prompt, greedy)).choices[0].text), flush=True)
        if not sys.stdin.readline():
            return
        endless = SamplingParams(temperature=0.0, max_len=1900, ignore_eos=True)
        try:
            while True:
                async for _ in model.stream_completion_request(prompts[0], endless):
                    print("on", flush=True)
        except EngineDeadError as error:
            print(error, flush=True)

asyncio.run(main())
print("was rank 0")
"""


@contextmanager
def ranks(size: int, *arguments: str) -> Iterator[Sequence[subprocess.Popen[str]]]:
    """Start an application as so many processes, each of which may be on a machine of its own."""
    common = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        started = []
        for rank in range(size):
            process = subprocess.Popen(
                [sys.executable, "-c", APPLICATION, *arguments],
                env={**common, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        yield started


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    return make_checkpoint("llama", tmp_path_factory.mktemp("launched"), **shape)


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().rstrip("\n") for _ in range(count)]


def test_the_same_texts(path: Path) -> None:
    with BlockingModel(TextModelBuilder(path).with_dtype("float64").with_num_threads(1).build()) as model:
        expected = [repr(model.send_completion_request(prompt, GREEDY).choices[0].text) for prompt in PROMPTS]
    with ranks(2, str(path), "float64", *PROMPTS) as (first, second):
        out, _ = first.communicate(timeout=100)
        assert out.splitlines() == [*expected, "was rank 0"]
        out, error = second.communicate(timeout=100)
        assert (out, error, first.returncode, second.returncode) == ("", "", 0, 0)


@pytest.mark.long
@pytest.mark.parametrize(("size", "victim"), [(2, 1), (3, 2), (3, 0)])
def test_a_rank_that_is_killed_ends_all(path: Path, size: int, victim: int) -> None:
    with ranks(size, str(path), "float32", PROMPTS[0]) as started:
        lines(started[0], 1)
        assert started[0].stdin is not None
        started[0].stdin.write("\n")
        started[0].stdin.flush()
        assert lines(started[0], 2) == ["on", "on"]
        start = time.monotonic()
        started[victim].kill()
        lost = f"rank {victim} of {size} was lost"
        if victim:
            assert started[0].stdout is not None
            assert lost in next(line for line in started[0].stdout if line != "on\n")
            assert time.monotonic() - start < 5
        for rank in set(range(1, size)) - {victim}:
            _, error = started[rank].communicate(timeout=60)
            assert lost in error
            assert started[rank].returncode == 1


@pytest.mark.long
def test_a_server_answers_on_rank_0(path: Path) -> None:
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    flags = ("--model", str(path), "--num-threads", "1", "--tensor-parallel", "auto", "--port", "0")
    second = subprocess.Popen([*PROGRAM, *flags], env={**common, "RANK": "1"}, stderr=subprocess.PIPE, text=True)
    first = subprocess.Popen([*PROGRAM, *flags], env={**common, "RANK": "0"}, stderr=subprocess.PIPE, text=True)
    with first, second:
        try:
            assert first.stderr is not None
            url = next(found.group() for line in first.stderr if (found := re.search(r"http://127[^/]+/v1", line)))
            body = json.dumps({"model": path.name, "prompt": PROMPTS[0], "max_tokens": 3}).encode()
            request = urllib.request.Request(f"{url}/completions", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 3
            first.send_signal(signal.SIGTERM)
            _, error = second.communicate(timeout=60)
            first.communicate(timeout=60)
            assert (first.returncode, second.returncode) == (0, 0)
            assert "http" not in error
        finally:
            first.kill()
            second.kill()


@pytest.mark.long
def test_torchrun_starts_them(path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    launcher += ["--master-port", str(free_port()), sys.executable, "-c", APPLICATION, str(path), "float64", PROMPTS[0]]
    finished = subprocess.run(launcher, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    with BlockingModel(TextModelBuilder(path).with_dtype("float64").with_num_threads(1).build()) as model:
        expected = repr(model.send_completion_request(PROMPTS[0], GREEDY).choices[0].text)
    assert finished.stdout.splitlines() == [expected, "was rank 0"]
