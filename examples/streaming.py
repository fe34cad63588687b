"""A response, chunk by chunk as it is generated.

python examples/streaming.py [MODEL]
"""

from __future__ import annotations

import sys

import anyio

from paged_sdk import RequestBuilder, SamplingParams, TextMessageRole, TextModelBuilder, embedded_model_path


async def main(model_path: str | None = None) -> None:
    request = (
        RequestBuilder()
        .add_message(TextMessageRole.USER, "Write one paragraph about a lighthouse.")
        .with_sampling(SamplingParams(temperature=0.7, seed=1, max_len=96))
    )
    async with (
        TextModelBuilder(model_path or embedded_model_path()).build() as model,
        model.stream_chat_request(request) as stream,
    ):
        async for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content, end="", flush=True)
            if chunk.usage is not None:  # the last chunk
                print(f"\n\nfirst token after {chunk.usage.time_to_first_token_sec:.2f} s, ", end="")
                print(f"then {chunk.usage.avg_compl_tok_per_sec:.1f} tokens/s")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else None)
