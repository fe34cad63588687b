"""Ending requests early: cancel the task, or close the stream. Either way the KV blocks come back.

python examples/cancel.py [MODEL]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import anyio

from paged_sdk import Model, RequestBuilder, SamplingParams, TextMessageRole, TextModelBuilder, embedded_model_path

ENDLESS = (
    RequestBuilder()
    .add_message(TextMessageRole.USER, "Count as far as you can.")
    .with_sampling(SamplingParams(temperature=0.0, ignore_eos=True))
)


def show_blocks(model: Model, moment: str) -> None:
    stats = model.stats()
    print(f"{moment}: {stats.blocks_used} of {stats.blocks_total} blocks used, {stats.running} running")


async def until(condition: Callable[[], bool]) -> None:
    """Wait for the engine, which runs in a thread of its own: what it says of itself can only be looked at."""
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.01)


async def cancel_a_task(model: Model) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(model.send_chat_request, ENDLESS)
        await until(lambda: model.stats().completion_tokens > 0)
        show_blocks(model, "while a task waits for its answer")
        tasks.cancel_scope.cancel()
    await until(lambda: model.stats().running == 0)
    show_blocks(model, "after the task was cancelled")


async def close_a_stream(model: Model) -> None:
    chunks = 0
    async with model.stream_chat_request(ENDLESS) as stream:
        async for _ in stream:
            chunks += 1
            if chunks == 5:
                break
        show_blocks(model, "after five chunks of a stream")
    # Leaving the context has closed the stream; what was read is still there.
    await until(lambda: model.stats().running == 0)
    show_blocks(model, "after the stream was closed")
    print(f"finish reason {stream.response_so_far().choices[0].finish_reason!r}")


async def main(model_path: str | None = None) -> None:
    async with TextModelBuilder(model_path or embedded_model_path()).build() as model:
        await cancel_a_task(model)
        await close_a_stream(model)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else None)
