"""A KV cache in FP8: the same memory holds nearly twice the tokens.

python examples/fp8_kv_cache.py [MODEL]
"""

from __future__ import annotations

import sys

import anyio

from paged_sdk import (
    MemoryGpuConfig,
    PagedAttentionMetaBuilder,
    PagedCacheType,
    RequestBuilder,
    SamplingParams,
    TextMessageRole,
    TextModelBuilder,
    embedded_model_path,
)


async def main(model_path: str | None = None) -> None:
    request = (
        RequestBuilder()
        .add_message(TextMessageRole.USER, "Name the capital of France.")
        .with_sampling(SamplingParams(temperature=0.0, max_len=24))
    )
    for cache_type in PagedCacheType.AUTO, PagedCacheType.F8E4M3:
        meta = PagedAttentionMetaBuilder().with_gpu_memory(MemoryGpuConfig.MB(32)).with_cache_type(cache_type).build()
        builder = TextModelBuilder(model_path or embedded_model_path()).with_paged_attn(meta)
        async with builder.build() as model:
            response = await model.send_chat_request(request)
            tokens = model.config.num_blocks * model.config.block_size
            print(f"{cache_type.value:>7}: {tokens} tokens in 32 MiB: {response.choices[0].message.content}")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else None)
