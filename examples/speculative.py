"""A smaller model guesses tokens, and the larger one verifies several at a time: the same text, in fewer steps.

python examples/speculative.py [TARGET DRAFT]
"""

from __future__ import annotations

import sys

import anyio

from paged_sdk import (
    IsqType,
    Model,
    RequestBuilder,
    SamplingParams,
    SpeculativeConfig,
    TextMessageRole,
    TextModelBuilder,
    TextSpeculativeBuilder,
    embedded_model_path,
)

REQUEST = (
    RequestBuilder()
    .add_message(TextMessageRole.USER, "Count from one to twenty.")
    .with_sampling(SamplingParams(temperature=0.0, max_len=64))
)


async def text_of(model: Model) -> str:
    response = await model.send_chat_request(REQUEST)
    return response.choices[0].message.content


async def main(target_path: str | None = None, draft_path: str | None = None) -> None:
    path = target_path or embedded_model_path()
    target = TextModelBuilder(path)
    draft = TextModelBuilder(draft_path or path).with_isq(IsqType.Q4K)  # a guess need not be exact

    async with target.build() as model:
        alone = await text_of(model)
    async with TextSpeculativeBuilder(target, draft, SpeculativeConfig(gamma=16)).build() as model:
        together = await text_of(model)
        stats = model.stats()

    print(together)
    print("the same text:", together == alone)
    print(f"{stats.accepted_tokens} of {stats.drafted_tokens} guesses were right")


if __name__ == "__main__":
    target, draft = sys.argv[1:3] if len(sys.argv) > 2 else (None, None)
    anyio.run(main, target, draft)
