"""A chat of several turns: the prefix cache keeps the KV of what was said, each turn computes only what is new.

python examples/multi_turn.py [MODEL]
"""

from __future__ import annotations

import sys

import anyio

from paged_sdk import Conversation, SamplingParams, TextModelBuilder, embedded_model_path

QUESTIONS = (
    "What is photosynthesis?",
    "Which plants do it?",
    "Why does it matter to animals?",
)


async def main(model_path: str | None = None) -> None:
    async with TextModelBuilder(model_path or embedded_model_path()).build() as model:
        chat = Conversation(
            model,
            system="You are a friendly teacher of biology. You answer in two or three plain sentences.",
            sampling=SamplingParams(temperature=0.0, max_len=64),
        )
        for question in QUESTIONS:
            response = await chat.send(question)
            usage = response.usage
            print(f"> {question}\n{response.choices[0].message.content}")
            print(
                f"[prompt {usage.prompt_tokens} tokens, {usage.prompt_tokens_details.cached_tokens} of them cached]\n"
            )


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else None)
