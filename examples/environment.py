"""Settings of a deployment, from the environment: what the code says wins, what it leaves open they decide.

MISTRALRS_ISQ=Q4K MISTRALRS_PREFIX_CACHE_N=false python examples/environment.py [MODEL]
"""

from __future__ import annotations

import sys

import anyio

from paged_sdk import (
    MemoryGpuConfig,
    Model,
    PagedAttentionMeta,
    RequestBuilder,
    SamplingParams,
    TextMessageRole,
    TextModelBuilder,
    embedded_model_path,
)

REQUEST = (
    RequestBuilder()
    .add_message(TextMessageRole.USER, "Hello, world!")
    .with_sampling(SamplingParams(temperature=0.0, max_len=32))
)


def described(model: Model) -> str:
    """Return how a model holds its keys and values."""
    config = model.config
    kind = f"paged, blocks of {config.block_size}" if config.paged else "contiguous"
    return f"{kind}, prefix cache {'on' if config.prefix_cache_n else 'off'}"


async def main(model_path: str | None = None) -> None:
    builder = TextModelBuilder(model_path or embedded_model_path())
    async with builder.build() as model:  # the environment is read here
        response = await model.send_chat_request(REQUEST)
        print(response.choices[0].message.content)
        print("by the environment:", described(model))

    meta = PagedAttentionMeta(block_size=16, gpu_memory=MemoryGpuConfig.ContextSize(1024))
    async with builder.with_paged_attn(meta).with_prefix_cache_n(16).build() as model:
        print("by the code:", described(model))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else None)
