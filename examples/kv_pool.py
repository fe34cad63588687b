"""Paged attention with a pool of one's own size: the `paged_attn` example of mistral.rs, in Python.

python examples/kv_pool.py [MODEL]
"""

from __future__ import annotations

import sys

import anyio

from paged_sdk import (
    MemoryGpuConfig,
    PagedAttentionMetaBuilder,
    TextMessageRole,
    TextMessages,
    TextModelBuilder,
    embedded_model_path,
)


async def main(model_path: str | None = None) -> None:
    model = await (
        TextModelBuilder(model_path or embedded_model_path())
        .with_logging()
        .with_paged_attn(
            lambda: (
                PagedAttentionMetaBuilder()
                .with_block_size(32)
                .with_gpu_memory(MemoryGpuConfig.ContextSize(1024))
                .build()
            )
        )
        .build()
    )

    messages = (
        TextMessages()
        .add_message(TextMessageRole.SYSTEM, "You are an AI agent with a specialty in programming.")
        .add_message(
            TextMessageRole.USER,
            "Hello! How are you? Please write generic binary search function in Rust.",
        )
    )
    response = await model.send_chat_request(messages)

    print(response.choices[0].message.content)
    print(f"prompt:     {response.usage.avg_prompt_tok_per_sec:.1f} tokens/s")
    print(f"completion: {response.usage.avg_compl_tok_per_sec:.1f} tokens/s")

    await model.aclose()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else None)
