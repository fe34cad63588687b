"""Measure the overhead of Ray Serve: streams of one replica against the same model in this process.

    python -m benchmarks.ray_cost

The model returns scripted tokens, one per text every 5 ms, so that only the transport of tokens is measured. Each
figure is the median of five runs, in turns. CPU time is that of the calling process, which in one case also runs the
engine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable
from typing import Final

import anyio
import ray
from attrs import frozen

from paged_sdk import Model, RequestBuilder
from paged_sdk.ray import RayReplicas
from paged_sdk.testing import fake_model

TEXT: Final = "A sentence that is said one byte after the other. " * 4
DELAY: Final = 0.005
RUNS: Final = 5


@frozen
class Talker:
    """Builds the model."""

    def build(self) -> Awaitable[Model]:
        return fake_model(TEXT, delay=DELAY)


@frozen
class Figures:
    """Holds the figures of one run.

    :ivar step: seconds per token of a text
    :ivar processor: CPU seconds per token of all texts
    :ivar first: median seconds until the first token
    """

    step: float
    processor: float
    first: float


async def run(model: Model, num_texts: int) -> Figures:
    """Generate texts concurrently."""
    firsts: list[float] = []

    async def listen(number: int) -> None:
        request = RequestBuilder.from_messages([{"role": "user", "content": f"Hi {number}!"}])
        start = time.perf_counter()
        async with model.stream_chat_request(request) as stream:
            await anext(stream)
            firsts.append(time.perf_counter() - start)
            async for _ in stream:
                pass

    start, used = time.perf_counter(), time.process_time()
    async with anyio.create_task_group() as tasks:
        for number in range(num_texts):
            tasks.start_soon(listen, number)
    seconds, processor = time.perf_counter() - start, time.process_time() - used
    return Figures(seconds / len(TEXT), processor / len(TEXT) / num_texts, statistics.median(firsts))


async def main() -> None:
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, logging_level="warning")
    here = fake_model(TEXT, delay=DELAY)
    replicas = RayReplicas(Talker(), num_replicas=1, ray_actor_options={"num_cpus": 0})
    print("texts  where    ms a step  us of a processor a token  ms to the first token")
    async with here, replicas as there:
        for num_texts in (1, 16, 32):
            found: dict[str, list[Figures]] = {"here": [], "Ray": []}
            for _ in range(RUNS + 1):
                found["here"].append(await run(here, num_texts))
                found["Ray"].append(await run(there, num_texts))
            for where, runs in found.items():
                step, processor, first = (
                    statistics.median(getattr(each, name) for each in runs[1:])
                    for name in ("step", "processor", "first")
                )
                print(f"{num_texts:5}  {where:5} {1e3 * step:12.2f} {1e6 * processor:26.0f} {1e3 * first:22.1f}")
    ray.shutdown()


if __name__ == "__main__":
    anyio.run(main)
