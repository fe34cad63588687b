"""Measure the cost of running an engine in another process than its callers, and the gain by replicas on a CPU.

    python -m benchmarks.remote_cost messages
    python -m benchmarks.remote_cost streams

``messages``: delivery of a step's output, one token for each text, from the engine's outbox to the subscriptions: in
one process, and over a socket. ``streams``: SmolLM2-135M with 16 concurrent streams, in this process on all threads,
and as two replicas with half of the threads each, in turns.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import anyio

from paged_sdk import GgufModelBuilder, Model, ReplicaSet, SamplingParams, embedded_model_path
from paged_sdk.engine.events import Outbox
from paged_sdk.remote.channel import Channel
from paged_sdk.remote.engine import RemoteEngine
from paged_sdk.remote.host import _Frame
from paged_sdk.remote.link import Parcel
from paged_sdk.remote.packing import pack
from paged_sdk.scheduler.request import Request
from paged_sdk.system.event_loop import OutputLoop
from paged_sdk.system.processors import usable_processors
from paged_sdk.testing import fake_model
from paged_sdk.worker.subscription import Subscriber

STEPS = 2_000
STREAMS = 16
LENGTH = 32
ROUNDS = 3


class _Here:
    """Stands in for an event loop that runs callbacks immediately, and for a subscription that counts tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0

    @property
    def loop(self) -> OutputLoop:
        return self

    def call_soon(self, callback: Callable[[], object]) -> bool:
        callback()
        return True

    def add_tokens(self, index: int, token_ids: list[int]) -> None:
        self.num_tokens += len(token_ids)

    def add(self, event: object) -> None: ...

    def fail(self, error: Exception) -> None: ...


class _Nowhere:
    """Stands in for a link to an engine's process; it discards everything."""

    def send(self, parcel: Parcel) -> None: ...

    def join(self, timeout: float | None = None) -> bool:
        return True


def fastest(act: Callable[[], object]) -> float:
    """Return the microseconds of a function's fastest call."""
    best = float("inf")
    for _ in range(STEPS):
        start = time.perf_counter()
        act()
        best = min(best, time.perf_counter() - start)
    return 1e6 * best


async def messages() -> None:
    """Print the microseconds of delivering a step's output."""
    async with fake_model("x") as model:
        stats = model.stats()
        sampling = SamplingParams(temperature=0.0, max_len=64)
        prepared: list[Request] = []
        submit = model._worker.submit

        def note(request: Request, subscription: Subscriber) -> None:
            prepared.append(request)
            submit(request, subscription)

        cast(Any, model._worker).submit = note
        await model.send_completion_request("a" * 1000, sampling)
    request = prepared[0]
    print("| texts in a step | in one process, us | sent, us | received, us | more for each token, us |")
    print("|---|---|---|---|---|")
    for num_texts in (1, 16, 256):
        here = _Here()
        outbox = Outbox()
        outbox.listeners, outbox.indices = [here] * num_texts, [0] * num_texts
        outbox.token_ids = [[7] for _ in range(num_texts)]
        alone = fastest(outbox.deliver)

        ends = socket.socketpair()
        out, into = map(Channel, ends)
        engine = RemoteEngine(_Nowhere(), name="replica", stats=stats, adapters={})
        for _ in range(num_texts):
            engine.submit(request, here)

        def send(num_texts: int = num_texts, out: Channel = out) -> None:
            frame = _Frame()
            for number in range(num_texts):
                frame.add_tokens(number, 0, [7])
            out.write(pack(frame.output(stats)))

        def take(engine: RemoteEngine = engine, into: Channel = into) -> None:
            parcel = into.read()
            assert parcel is not None
            engine.receive(parcel)

        sent = received = float("inf")
        for _ in range(STEPS):
            start = time.perf_counter()
            send()
            between = time.perf_counter()
            take()
            end = time.perf_counter()
            sent, received = min(sent, between - start), min(received, end - between)
        more = (1e6 * (sent + received) - alone) / num_texts
        print(f"| {num_texts} | {alone:.1f} | {1e6 * sent:.0f} | {1e6 * received:.0f} | {more:.1f} |")
        for channel in (out, into):
            channel.close()
            channel.release()
    engine = RemoteEngine(_Nowhere(), name="replica", stats=stats, adapters={})
    cost = fastest(lambda: engine.submit(request, here))
    print(f"to send a request of {len(request.prompt_token_ids)} tokens: {cost:.0f} us")


async def tokens_per_second(model: Model) -> float:
    """Generate texts concurrently, and return their total tokens per second."""
    sampling = SamplingParams(temperature=0.0, max_len=LENGTH, ignore_eos=True)
    prompts = [list(range(100 + 64 * number, 164 + 64 * number)) for number in range(STREAMS)]
    start = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for prompt in prompts:
            tasks.start_soon(model.send_completion_request, prompt, sampling)
    return STREAMS * LENGTH / (time.perf_counter() - start)


async def streams() -> None:
    """Print the throughput of one model and of two replicas."""
    threads = usable_processors()
    builder = GgufModelBuilder(embedded_model_path()).with_force_cpu().with_prefix_cache_n(None)
    one, half = builder.with_num_threads(threads), builder.with_num_threads(max(threads // 2, 1))
    found: dict[str, list[float]] = {}
    async with (
        one.build() as alone,
        ReplicaSet([one], in_processes=True) as apart,
        ReplicaSet([half] * 2, in_processes=True) as two,
    ):
        kinds = {"in this process": alone, "in another": apart, "two replicas": two}
        for round_number in range(ROUNDS + 1):
            for name, model in kinds.items():
                speed = await tokens_per_second(model)
                print(f"{name}: {speed:.0f} tokens a second{'' if round_number else ', to warm up'}", flush=True)
                if round_number:
                    found.setdefault(name, []).append(speed)
    for name, speeds in found.items():
        print(f"{name}, median: {statistics.median(speeds):.0f} tokens a second")


def main() -> None:
    """Run the measurement that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("messages", "streams"))
    anyio.run(messages if parser.parse_args().what == "messages" else streams)


if __name__ == "__main__":
    main()
