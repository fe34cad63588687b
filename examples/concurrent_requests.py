"""Requests from many tasks at once: the engine batches them, whoever sends them.

python examples/concurrent_requests.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys
import time

from paged_sdk import Model, RequestBuilder, SamplingParams, TextMessageRole, TextModelBuilder, embedded_model_path

COUNTRIES = ("France", "Italy", "Japan", "Egypt", "Peru", "Norway", "India", "Kenya")


async def ask(model: Model, country: str) -> str:
    request = (
        RequestBuilder()
        .add_message(TextMessageRole.SYSTEM, "You are a geographer. Answer in one short sentence.")
        .add_message(TextMessageRole.USER, f"What is the capital of {country}?")
        .with_sampling(SamplingParams(temperature=0.0, max_len=32))
    )
    response = await model.send_chat_request(request)
    return response.choices[0].message.content


async def main(model_path: str | None = None) -> None:
    async with TextModelBuilder(model_path or embedded_model_path()).build() as model:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(ask(model, country)) for country in COUNTRIES]
        seconds = time.perf_counter() - start

        for country, answer in zip(COUNTRIES, answers, strict=True):
            print(f"{country}: {answer.result()}")
        stats = model.stats()
        print(f"{len(COUNTRIES)} answers, {stats.completion_tokens} tokens in {seconds:.1f} s and {stats.steps} steps")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
