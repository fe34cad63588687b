"""Time the small ops between matrix products on CUDA, and a device copy: `python -m benchmarks.gpu.small_ops`.

Shapes are those of an 8B model (hidden size 4096, 32 heads of 128, 8 KV heads, MLP 14,336, 128,256 tokens). Inputs that
fit into the cache are read from it, as in a decoder, so these ops may be faster than the copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor

from benchmarks.gpu.ahead import compile_side_by_side
from benchmarks.gpu.timing import Row, copy_bandwidth, microseconds
from paged_sdk.kernels.activation import gated_activation, gated_activation_reference
from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.draw_settings import DrawSettings
from paged_sdk.kernels.kv_cache import copy_blocks, copy_blocks_reference, write_slots
from paged_sdk.kernels.norm import add_rms_norm, add_rms_norm_reference
from paged_sdk.kernels.penalties import penalize, penalize_reference
from paged_sdk.kernels.penalty_settings import PenaltySettings
from paged_sdk.kernels.rotary import Rotation, rotate_and_cache
from paged_sdk.kernels.sampling import argmax, argmax_reference, draw

__all__ = ["run"]

Case = tuple[str, str, int, Callable[[], object], Callable[[], object]]

NUM_TOKENS: Final = (1, 256, 4096)
HIDDEN_SIZE: Final = 4096
INTERMEDIATE_SIZE: Final = 14_336
NUM_HEADS: Final = 32
NUM_KV_HEADS: Final = 8
HEAD_DIM: Final = 128
VOCAB_SIZE: Final = 128_256
NUM_LAYERS: Final = 32
BLOCK_SIZE: Final = 32


def run(device: torch.device) -> Iterator[Row]:
    """Time each op at its sizes.

    :param device: a CUDA device
    :returns: per case: microseconds, and GB/s of the bytes that must be read and written; under ``reference``, the
        microseconds of torch's operations, and a device copy in GB/s
    """
    cases = list(_cases(device))
    compile_side_by_side(call for _, _, _, call, _ in cases)
    copied = copy_bandwidth(device)
    for kernel, case, num_bytes, call, reference in cases:
        us = microseconds(call)
        row_reference = {"torch_us": microseconds(reference), "copy_gbps": copied}
        yield {"kernel": kernel, "case": case, "us": us, "gbps": num_bytes / us / 1000, "reference": row_reference}


def _cases(device: torch.device) -> Iterator[Case]:
    """Yield each case's name, size, bytes, op and reference."""

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    for num_tokens in NUM_TOKENS:
        x, residual, weight = normal(num_tokens, HIDDEN_SIZE), normal(num_tokens, HIDDEN_SIZE), normal(HIDDEN_SIZE)
        yield (
            "add_rms_norm",
            f"{num_tokens} tokens of {HIDDEN_SIZE}, bfloat16",
            4 * x.nbytes,
            partial(add_rms_norm, x, residual, weight, 1e-5),
            partial(add_rms_norm_reference, x, residual, weight, 1e-5),
        )
        gate_up = normal(num_tokens, 2 * INTERMEDIATE_SIZE)
        yield (
            "gated_activation",
            f"{num_tokens} tokens of {INTERMEDIATE_SIZE}, bfloat16",
            gate_up.nbytes * 3 // 2,
            partial(gated_activation, gate_up),
            partial(gated_activation_reference, gate_up),
        )
        yield from _rotations(num_tokens, device)
    yield from _choices(device)
    caches = [normal(64, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM) for _ in range(2 * NUM_LAYERS)]
    pairs = torch.arange(16, device=device).view(8, 2)
    yield (
        "copy_blocks",
        f"8 blocks of {BLOCK_SIZE} tokens in {NUM_LAYERS} layers, bfloat16",
        2 * 8 * len(caches) * caches[0][0].nbytes,
        partial(copy_blocks, caches[:NUM_LAYERS], caches[NUM_LAYERS:], pairs),
        partial(copy_blocks_reference, caches[:NUM_LAYERS], caches[NUM_LAYERS:], pairs),
    )


def _rotations(num_tokens: int, device: torch.device) -> Iterator[Case]:
    """Yield rotary embedding with the write to the KV cache, in the model's dtype and in f8e4m3."""
    for stored in (torch.bfloat16, torch.float8_e4m3fn):
        heads = torch.randn(num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
        query, key, value = torch.split(heads, [NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        angles = torch.randn(num_tokens, HEAD_DIM // 2, device=device)
        shape = (-(-num_tokens // BLOCK_SIZE), BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        key_cache, value_cache = (torch.zeros(shape, device=device).to(stored) for _ in range(2))
        quantized = stored == torch.float8_e4m3fn
        k_scale, v_scale = (torch.zeros(shape[:3], device=device) if quantized else None for _ in range(2))
        slots = torch.randperm(num_tokens, device=device)
        written = 2 * key.numel() * stored.itemsize + (8 * num_tokens * NUM_KV_HEADS if quantized else 0)
        read = heads.nbytes + 2 * angles.nbytes
        rotated = (query.numel() + key.numel()) * heads.itemsize
        cos, sin = angles.cos(), angles.sin()
        cache = LayerCache(key_cache, value_cache, k_scale, v_scale)
        rotation = Rotation(cos, sin)
        yield (
            "rotate_and_cache",
            f"{num_tokens} tokens, {NUM_HEADS} + {NUM_KV_HEADS} heads of {HEAD_DIM}, {stored} pages",
            read + rotated + written,
            partial(rotate_and_cache, query, key, value, cos, sin, cache, slots),
            partial(_rotate_and_write, rotation, query, key, value, cache, slots),
        )


def _choices(device: torch.device) -> Iterator[Case]:
    """Yield greedy and random sampling, from logits distributed like a language model's, and from flat ones, the worst
    case.
    """
    for num_rows, spread in ((1, 4), (32, 4), (256, 4), (1, 1), (256, 1)):
        logits = torch.randn(num_rows, VOCAB_SIZE, device=device) * spread
        case = f"{num_rows} rows of {VOCAB_SIZE}, standard deviation {spread}"
        yield "argmax", case, logits.nbytes, partial(argmax, logits), partial(argmax_reference, logits)
        ones, places = torch.ones(num_rows, device=device), torch.arange(num_rows, device=device)
        for name, top_k, top_p in (
            ("draw", VOCAB_SIZE, 1.0),
            ("draw, top-k 50", 50, 1.0),
            ("draw, top-p 0.95", VOCAB_SIZE, 0.95),
            ("draw, top-k 50, top-p 0.95", 50, 0.95),
        ):
            settings = DrawSettings(ones, (ones * top_k).int(), ones * top_p, ones * 0, places, places)
            reference = partial(_sort_and_draw, logits, top_k, top_p)
            yield name, case, logits.nbytes, partial(draw, logits, settings), reference
        # Texts with some hundred distinct tokens: penalties read all counts, but few logits.
        occurrences = (torch.rand(num_rows, VOCAB_SIZE, device=device) < 0.004).int() * 3
        costs = (logits, occurrences, PenaltySettings(places, ones * 1.1, ones * 0, ones * 0))
        yield "penalize", case, occurrences.nbytes, partial(penalize, *costs), partial(penalize_reference, *costs)


def _sort_and_draw(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Draw by torch's operations; unlike the op's reference, without synchronizing with the host."""
    if top_k == logits.shape[-1] and top_p == 1:
        weights, tokens = logits.softmax(dim=-1), None
    else:
        values, tokens = logits.sort(dim=-1, descending=True)
        values[:, top_k:] = -torch.inf
        weights = values.softmax(dim=-1)
        weights = torch.where(weights.cumsum(dim=-1) - weights < top_p, weights, 0.0)
    drawn = (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1, keepdim=True)
    return drawn if tokens is None else tokens.gather(-1, drawn)


def _rotate_and_write(
    rotation: Rotation, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor
) -> None:
    """Rotate and write by torch's operations. Unlike the op's reference, skip no slots, which would need a
    synchronization with the host.
    """
    rotation.rotate_(query)
    rotation.rotate_(key)
    write_slots(key, value, cache, slots)


def main() -> None:
    for row in run(torch.device("cuda")):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
