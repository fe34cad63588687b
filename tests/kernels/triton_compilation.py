"""Compile the Triton kernels for a GPU that need not be there: `python triton_compilation.py 90 [--few | --tiles]`.

What every launcher launches is compiled and not run (:mod:`benchmarks.gpu.compiling`). The script prints a JSON object
for each kernel compiled.

It runs in a process of its own, because Triton reads at its first import whether it is to interpret kernels.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from attrs import evolve
from benchmarks.gpu.compiling import DEVICE, no_device
from torch import Tensor

from paged_sdk.kernels.attention_inputs import LayerCache, PagedRows, ScoreOptions
from paged_sdk.kernels.draw_settings import DrawSettings
from paged_sdk.kernels.lora_table import TableField
from paged_sdk.kernels.penalty_settings import PenaltySettings
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, BlockMatrix, tensor_type_of
from paged_sdk.kernels.quantized.repack import repack
from paged_sdk.kernels.quantized.triton_blocks import TRITON_BLOCK_FORMATS, TritonBlockMatrix
from paged_sdk.kernels.triton import (
    activation,
    blocks,
    decoded_pages,
    fused_moe,
    kv_cache,
    lora,
    norm,
    penalties,
    quantized_experts,
    quantized_linear,
    rotary,
    routing,
    sampling,
)
from paged_sdk.kernels.triton.paged_attention import paged_attention

Case = tuple[str, Callable[[], object]]

BF16: Final = torch.bfloat16


def tile_cases() -> Iterator[Case]:
    """Yield launches of the kernels that need most of a GPU."""
    *_, prompts = attention_cases("llama", (32, 8, 128), BF16)
    yield prompts
    yield "experts, 4096 tokens", partial(mixture_of_experts, 4096)
    yield "Q4_K, 16 rows", partial(linear, "Q4_K", 16, BF16)


def few_cases() -> Iterator[Case]:
    """Yield launches of every kernel as a bfloat16 model makes them."""
    yield from attention_cases("llama", (32, 8, 128), BF16)
    for num_tokens in (1, 4096):
        yield f"experts, {num_tokens} tokens", partial(mixture_of_experts, num_tokens)
    for num_rows in (1, 16, 512):
        yield f"Q4_K, {num_rows} rows", partial(linear, "Q4_K", num_rows, BF16)
    yield "Q4_K, swiglu", partial(swiglu, "Q4_K")
    for num_tokens in (1, 64):
        yield f"experts in Q4_K, {num_tokens} tokens", partial(experts, ("Q4_K", "Q4_K", "Q6_K"), num_tokens, BF16)
    yield "Q6_K, embeddings", partial(embeddings, "Q6_K", BF16)
    yield "route, 128 experts", partial(routes, 128, 8, BF16)
    yield from small_cases(BF16)
    yield from sampling_cases(128_256)


def more_cases() -> Iterator[Case]:
    """Yield launches with other dtypes, and through each kernel's branches."""
    for vocab_size in (1000, 32_000, 262_144):
        yield from sampling_cases(vocab_size)
    for dtype in (torch.float16, torch.float32):
        yield from attention_cases(f"llama, {dtype}", (32, 8, 128), dtype)
        yield from small_cases(dtype)
    for heads in ((32, 8, 128), (32, 8, 64), (8, 4, 256), (32, 32, 96)):
        yield from attention_cases(f"fp8, {heads}", heads, BF16, quantized=True)
    for head_dim in (36, 72, 80, 100, 112, 160, 192):
        yield from attention_cases(f"{head_dim} elements", (32, 8, head_dim), BF16)
        yield from attention_cases(f"fp8, {head_dim} elements", (32, 8, head_dim), BF16, quantized=True)
    yield from attention_cases("fp8, float16", (32, 8, 128), torch.float16, quantized=True)
    yield from attention_cases("fp8, float32", (32, 8, 128), torch.float32, quantized=True)
    sinks = empty(64, dtype=torch.float32)
    yield from attention_cases("fp8, sinks", (64, 8, 64), BF16, quantized=True, window=1024, softcap=50.0, sinks=sinks)
    for num_heads, num_kv_heads, head_dim in ((28, 4, 128), (14, 2, 64), (32, 32, 80), (16, 8, 192)):
        offsets = empty(32, num_kv_heads, head_dim, dtype=torch.float32)
        heads = (num_heads, num_kv_heads, head_dim)
        yield from attention_cases(f"fp8 with offsets, {heads}", heads, BF16, quantized=True, key_offsets=offsets)
    yield from attention_cases("gemma", (8, 4, 256), BF16, window=1024, softcap=50.0)
    for heads in ((128, 1, 576), (20, 1, 576), (16, 1, 576)):
        yield from attention_cases(f"latent, {heads}", heads, BF16, key_only=64)
        yield from attention_cases(f"fp8, latent, {heads}", heads, BF16, quantized=True, key_only=64)
    yield from attention_cases("latent, float32", (16, 1, 576), torch.float32, key_only=64)
    offsets = empty(32, 4, 512, dtype=torch.float32)
    for heads in ((32, 4, 512), (64, 2, 512)):
        yield from attention_cases(f"gemma 4, {heads}", heads, BF16)
        yield from attention_cases(f"fp8, gemma 4, {heads}", heads, BF16, quantized=True)
    yield from attention_cases("gemma 4, float32", (32, 4, 512), torch.float32)
    yield from attention_cases("fp8 with offsets, gemma 4", (32, 4, 512), BF16, quantized=True, key_offsets=offsets)
    yield from attention_cases("phi", (32, 32, 96), BF16)
    yield from attention_cases("sinks", (64, 8, 64), BF16, sinks=empty(64, dtype=torch.float32))
    yield from attention_cases("alibi", (32, 32, 128), BF16, alibi_slopes=empty(32, dtype=torch.float32))
    for num_tokens in (32, 64, 512):
        yield f"experts, {num_tokens} tokens", partial(mixture_of_experts, num_tokens)
    yield "experts, float32", partial(mixture_of_experts, 512, torch.float32)
    for tensor_type, (num_rows, dtype) in product(
        TRITON_BLOCK_FORMATS, ((1, BF16), (2, BF16), (4, BF16), (32, torch.float16), (64, BF16), (512, BF16))
    ):
        name = BLOCK_FORMATS[tensor_type].name
        yield f"{name}, {num_rows} rows, {dtype}", partial(linear, name, num_rows, dtype)
    for name in (BLOCK_FORMATS[tensor_type].name for tensor_type in TRITON_BLOCK_FORMATS):
        yield f"{name}, swiglu of 4 rows", partial(swiglu, name, 4)
    for name, (num_tokens, dtype) in product(
        (BLOCK_FORMATS[tensor_type].name for tensor_type in TRITON_BLOCK_FORMATS),
        ((1, BF16), (8, BF16), (64, torch.float16), (512, BF16), (2048, BF16)),
    ):
        yield f"experts in {name}, {num_tokens} tokens", partial(experts, (name, name, name), num_tokens, dtype)
    for num_tokens in (1, 512):
        yield "experts of three types", partial(experts, ("Q4_K", "Q8_0", "Q6_K"), num_tokens, BF16)
        yield "experts in Q6_K, float32", partial(experts, ("Q6_K", "Q6_K", "Q6_K"), num_tokens, torch.float32)
    for name in ("Q6_K", "Q8_0"):
        yield f"{name}, float32", partial(linear, name, 16, torch.float32)
        yield f"{name}, 64 outputs", partial(linear, name, 1, BF16, rows=64)
        yield f"{name}, swiglu", partial(swiglu, name)
    for name, dtype in product(("Q4_0", "Q5_1", "Q8_0", "Q4_K"), (BF16, torch.float32)):
        yield f"{name}, embeddings, {dtype}", partial(embeddings, name, dtype)
    for num_experts, num_selected in ((8, 2), (60, 4), (256, 16)):
        yield f"route, {num_experts} experts", partial(routes, num_experts, num_selected, torch.float32)


def all_cases() -> Iterator[Case]:
    yield from few_cases()
    yield from more_cases()


def sampling_cases(vocab_size: int) -> Iterator[Case]:
    logits = empty(64, vocab_size, dtype=torch.float32)
    fractions, counts, places = (empty(64, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.int64))
    settings = DrawSettings(fractions, counts, fractions, fractions, places, places)
    yield f"likeliest of {vocab_size}", partial(sampling.argmax, logits)
    yield f"draw from {vocab_size}", partial(sampling.draw, logits, settings)
    occurrences, costs = empty(256, vocab_size, dtype=torch.int32), PenaltySettings(places, *[fractions] * 3)
    yield f"penalties for {vocab_size}", partial(penalties.penalize, logits, occurrences, costs)
    yield f"what was sampled of {vocab_size}", partial(penalties.count, occurrences, costs, places)


def small_cases(dtype: torch.dtype) -> Iterator[Case]:
    x, weight = empty(64, 4096, dtype=dtype), empty(4096, dtype=dtype)
    yield "norm", partial(norm.rms_norm, x, weight, 1e-5)
    yield "add and norm", partial(norm.add_rms_norm, x, x, weight, 1e-5)
    yield "norm of heads", partial(norm.rms_norm, empty(64, 32, 128, dtype=dtype), empty(128, dtype=dtype), 1e-5)
    yield "silu", partial(activation.gated_activation, x, "silu")
    yield "gelu", partial(activation.gated_activation, x, "gelu_tanh")
    latent = cache_of((1, 576), dtype, quantized=False, key_only=64)
    query, key = torch.split(empty(64, 129, 576, dtype=dtype), [128, 1], dim=1)
    angles, slots = empty(64, 32, dtype=torch.float32), empty(64, dtype=torch.int64)
    rotate_latent = partial(rotary.rotate_and_cache, query, key, key, angles, angles)
    yield "rotate and cache latent vectors", partial(rotate_latent, latent, slots)
    heads = empty(64, 48, 128, dtype=dtype)
    query, key, value = torch.split(heads, [32, 8, 8], dim=1)
    angles, slots = empty(64, 64, dtype=torch.float32), empty(64, dtype=torch.int64)
    for quantized in (False, True):
        cache = cache_of((8, 128), dtype, quantized=quantized)
        rotate = partial(rotary.rotate_and_cache, query, key, value, angles, angles)
        yield f"rotate and cache, fp8 {quantized}", partial(rotate, cache, slots)
        if quantized:
            offsets = evolve(cache, key_offsets=empty(32, 8, 128, dtype=torch.float32))
            yield "rotate and cache, fp8 with offsets", partial(rotate, offsets, slots, slots)
        written_to = cache.key, cache.value, slots, cache.k_scale, cache.v_scale
        yield f"cache, fp8 {quantized}", partial(kv_cache.reshape_and_cache, key, value, *written_to)
        if quantized:
            gather = partial(decoded_pages.gather_decoded, slots=slots, positions=slots, dtype=dtype)
            yield "pages of fp8, decoded", partial(gather, cache)
            yield "pages of fp8 with offsets, decoded", partial(gather, offsets)
    pairs = empty(4, 2, dtype=torch.int64)
    yield "copy blocks", partial(kv_cache.copy_blocks, cache.tensors, pairs)
    table, starts = empty(16, 2, len(TableField), dtype=torch.int64), empty(3, dtype=torch.int32)
    shrunk = empty(64, 2, 64, dtype=torch.float32)
    update = partial(lora.add_lora_by_slot_, empty(64, 8192, dtype=dtype), x, slots, table, starts, shrunk)
    yield "update of adapters", partial(update, widest=4096)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=DEVICE)


def cache_of(
    heads: tuple[int, int],
    dtype: torch.dtype,
    *,
    quantized: bool,
    key_offsets: Tensor | None = None,
    key_only: int = 0,
) -> LayerCache:
    """Make pages of keys and values, with scales if they are quantized.

    :param key_only: above 0: of latent vectors, keys that are the values, too
    """
    shape = (1024, 32, *heads)
    pages = empty(*shape, dtype=torch.float8_e4m3fn if quantized else dtype)
    scale = empty(*shape[:3], dtype=torch.float32) if quantized else None
    value = pages if key_only else torch.empty_like(pages)
    return LayerCache(pages, value, scale, scale, key_offsets, key_only=key_only)


def attention_cases(
    name: str,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    quantized: bool = False,
    key_offsets: Tensor | None = None,
    key_only: int = 0,
    **options: Any,
) -> Iterator[Case]:
    """Yield launches for decodes of many and of few sequences, and for prompts."""
    num_heads, num_kv_heads, head_dim = heads
    cache = cache_of((num_kv_heads, head_dim), dtype, quantized=quantized, key_offsets=key_offsets, key_only=key_only)
    scores = ScoreOptions(scale=head_dim**-0.5, **options)
    for kind, num_rows, num_tokens in (("decodes", 256, 1), ("one decode", 1, 1), ("prompts", 4, 2048)):
        rows = PagedRows(
            block_tables=empty(num_rows, 128, dtype=torch.int32),
            context_lens=empty(num_rows, dtype=torch.int32),
            cu_seqlens_q=empty(num_rows + 1, dtype=torch.int32),
            max_seqlen_q=num_tokens,
            max_context_len=4096,
        )
        query = empty(num_rows * num_tokens, num_heads, head_dim, dtype=dtype)
        yield f"{name}: {kind}", partial(paged_attention, query, cache, rows, scores)


def mixture_of_experts(num_tokens: int, dtype: torch.dtype = BF16) -> Tensor:
    return fused_moe.fused_moe(
        empty(num_tokens, 2048, dtype=dtype),
        empty(128, 1536, 2048, dtype=dtype),
        empty(128, 2048, 768, dtype=dtype),
        empty(num_tokens, 8, dtype=torch.float32),
        empty(num_tokens, 8, dtype=torch.int64),
    )


def experts(names: tuple[str, str, str], num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Launch the experts of a model shaped like Qwen3-30B-A3B, in the types of gate, up and down."""
    gate, up, down = (
        matrix(name, 128 * rows, cols)
        for name, (rows, cols) in zip(names, ((768, 2048), (768, 2048), (2048, 768)), strict=True)
    )
    weights, ids = (empty(num_tokens, 8, dtype=dtype) for dtype in (torch.float32, torch.int64))
    x = empty(num_tokens, 2048, dtype=dtype)
    return quantized_experts.quantized_experts(x, gate, up, down, weights, ids, num_experts=128)


def matrix(name: str, rows: int, cols: int = 4096) -> TritonBlockMatrix:
    tensor_type = tensor_type_of(name)
    form = BLOCK_FORMATS[tensor_type]
    blocks = torch.empty(rows, cols // form.elements * form.num_bytes, dtype=torch.uint8)
    # Moved afterwards: without CUDA, torch takes no slices of what is said to be there.
    return repack(BlockMatrix(tensor_type, blocks)).to(DEVICE)


def linear(name: str, num_rows: int, dtype: torch.dtype, rows: int = 4096) -> Tensor:
    return quantized_linear.quantized_linear(empty(num_rows, 4096, dtype=dtype), matrix(name, rows))


def swiglu(name: str, num_rows: int = 1) -> Tensor:
    gate, up = matrix(name, 4096), matrix(name, 4096)
    return quantized_linear.quantized_swiglu(empty(num_rows, 4096, dtype=BF16), gate, up)


def embeddings(name: str, dtype: torch.dtype) -> Tensor:
    return blocks.dequantize_rows(matrix(name, 512), empty(64, dtype=torch.int64), dtype)


def routes(num_experts: int, num_selected: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return routing.route(empty(64, num_experts, dtype=dtype), num_selected, renormalize=True)


def compile_cases(capability: int, cases: Callable[[], Iterator[Case]]) -> None:
    """Print what each kernel takes, as soon as it is compiled."""
    with no_device(capability) as compiled:
        for case, call in cases():
            for kernel in compiled(call):
                usage = kernel.resource_usage() | {
                    "shared": kernel.shared,
                    "waits_before_storing": waits_before_storing(kernel.ptx),
                    "traps": bool(re.search(r"\btrap;", kernel.ptx)),
                }
                print(json.dumps({"kernel": kernel.name, "case": case, **usage}), flush=True)


def waits_before_storing(ptx: str) -> bool:
    """Say whether all warps of a program meet between its loads and the first store."""
    places = {
        name: [found.start() for found in re.finditer(name, ptx)] for name in ("ld.global", "bar.sync", "st.global")
    }
    store = min(places["st.global"], default=0)
    load = max((place for place in places["ld.global"] if place < store), default=0)
    return any(load < place < store for place in places["bar.sync"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("capability", type=int)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--few", action="store_const", dest="cases", const=few_cases)
    chosen.add_argument("--tiles", action="store_const", dest="cases", const=tile_cases)
    arguments = parser.parse_args()
    compile_cases(arguments.capability, arguments.cases or all_cases)
