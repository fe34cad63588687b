"""A chat service of one's own: the SDK's server with its page, quantized by layers, in an application's process.

python examples/chat_service.py [MODEL]     then open http://127.0.0.1:8080/

What chat_service.json beside it says is the same without any code: paged-sdk serve --config examples/chat_service.json
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import uvicorn

from paged_sdk import (
    IsqType,
    LayerTopology,
    MemoryGpuConfig,
    PagedAttentionMeta,
    PagedCacheType,
    SpeculativeConfig,
    TextModelBuilder,
    Topology,
    embedded_model_path,
)
from paged_sdk.server import ModelServer, ServerSettings, create_app


def builder(model_path: str | None) -> TextModelBuilder:
    meta = PagedAttentionMeta(
        block_size=32, gpu_memory=MemoryGpuConfig.ContextSize(8192), cache_type=PagedCacheType.F8E4M3
    )
    return (
        TextModelBuilder(model_path or embedded_model_path())
        .with_isq(IsqType.Q4K)
        .with_topology(Topology.empty().with_regex("down_proj", LayerTopology(isq=IsqType.Q6K)))
        .with_paged_attn(meta)
        .with_max_num_seqs(16)
        .with_speculation(SpeculativeConfig(gamma=8))
    )


@asynccontextmanager
async def service(model_path: str | None = None) -> AsyncIterator[ModelServer]:
    """Load the model, and close it when the service ends."""
    async with builder(model_path).build() as model:
        yield create_app(model, ServerSettings(sampling={"temperature": 0.7, "top_p": 0.9}))


async def main(model_path: str | None = None) -> None:
    async with service(model_path) as app:
        await uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=8080)).serve()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else None)
