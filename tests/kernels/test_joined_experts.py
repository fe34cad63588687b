"""Native experts of which several processes have parts, against one process that has all of them: to the last bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest
import torch
from torch import Tensor

from native_weights import every_level, library, needs_library, random_blocks, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.native.experts import NativeExperts
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.packed import DENSE_TYPES, PackedWeight, pack_dense, pack_gguf
from paged_sdk.kernels.native.ranks import ColumnJoin, SharedSum, make_shared_memory

pytestmark = needs_library

NUM_EXPERTS, NUM_SELECTED, INNER, HIDDEN = 6, 3, 256, 512
NEURONS: Final = (slice(0, 96), slice(96, 256))
OUTPUTS: Final = (slice(0, 288), slice(288, 512))
EVERYTHING: Final = slice(None)
Q4_K, Q6_K = 12, 14

#: It packs some rows of gate and up (or of up alone), and of down.
Pack = Callable[[slice, slice], list[PackedWeight]]


def blocks(*tensor_types: int) -> Pack:
    generator = torch.Generator().manual_seed(0)
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))[-len(tensor_types) :]
    stacks = [
        random_blocks(tensor_type, NUM_EXPERTS * rows, cols, generator).view(NUM_EXPERTS, rows, -1)
        for tensor_type, (rows, cols) in zip(tensor_types, shapes, strict=True)
    ]

    def pack(neurons: slice, outputs: slice) -> list[PackedWeight]:
        packed = []
        parts = (neurons, neurons, outputs)[-len(stacks) :]
        for stack, own, tensor_type, (_, cols) in zip(stacks, parts, tensor_types, shapes, strict=True):
            rows = stack[:, own].flatten(0, 1)
            packed.append(pack_gguf(library(), rows, tensor_type, len(rows), cols, num_threads=1))
        return packed

    return pack


def numbers(dtype: torch.dtype) -> Pack:
    generator = torch.Generator().manual_seed(1)
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    stacks = [torch.randn(NUM_EXPERTS, *shape, generator=generator).to(dtype) for shape in shapes]

    def pack(neurons: slice, outputs: slice) -> list[PackedWeight]:
        parts = [stack[:, own].flatten(0, 1) for stack, own in zip(stacks, (neurons, neurons, outputs), strict=True)]
        return [pack_dense(library(), [each], (len(each), each.shape[1]), dtype) for each in parts]

    return pack


def biases(neurons: slice, outputs: slice) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    wholes = [torch.randn(NUM_EXPERTS, rows, generator=generator) for rows in (INNER, INNER, HIDDEN)]
    return [whole[:, own].contiguous() for whole, own in zip(wholes, (neurons, neurons, outputs), strict=True)]


def tokens(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(-1)[:, :NUM_SELECTED]
    shape = (num_tokens, NUM_SELECTED)
    return torch.randn(num_tokens, HIDDEN, generator=generator), torch.rand(shape, generator=generator), ids


def widths_of(parts: Sequence[slice]) -> Tensor:
    return torch.tensor([own.stop - own.start for own in parts], dtype=torch.int32)


def experts_of(packed: Sequence[PackedWeight], workspace: Workspace, join: ColumnJoin | None = None) -> NativeExperts:
    """Return experts of gate, up and down, or of the last two alone."""
    *gates, up, down = packed
    gate = gates[0] if gates else None
    activation: KernelActivation = "silu" if gates else "relu2"
    return NativeExperts(workspace, gate, up, down, num_experts=NUM_EXPERTS, join=join, activation=activation)


def joined(pack: Pack, isa: str, num_tokens: int, *, extended: bool, num_threads: int) -> Tensor:
    """Return what two processes put together."""
    file = make_shared_memory(library(isa), 2)
    assert file is not None

    def run(rank: int) -> Tensor:
        shared = SharedSum(library(isa), file, rank=rank, size=2)
        neurons, outputs = NEURONS[rank], OUTPUTS[rank]
        join = ColumnJoin(shared, widths_of(NEURONS))
        experts = experts_of(pack(neurons, outputs), workspace(isa, num_threads), join)
        if extended:
            experts.extend(biases(neurons, outputs), alpha=1.7, limit=7.0)
        return ColumnJoin(shared, widths_of(OUTPUTS))(experts(*tokens(num_tokens)))

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(run, range(2))
    os.close(file)
    assert torch.equal(one, two)
    return one


def whole(pack: Pack, isa: str, num_tokens: int, *, extended: bool) -> Tensor:
    experts = experts_of(pack(EVERYTHING, EVERYTHING), workspace(isa))
    if extended:
        experts.extend(biases(EVERYTHING, EVERYTHING), alpha=1.7, limit=7.0)
    return experts(*tokens(num_tokens))


@every_level
@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_threads"), [(0, 1), (1, 1), (200, 2)])  # of 200, experts have two segments
def test_blocks(isa: str, num_tokens: int, num_threads: int, extended: bool) -> None:
    pack = blocks(Q4_K, Q4_K, Q6_K)
    parts = joined(pack, isa, num_tokens, extended=extended, num_threads=num_threads)
    assert torch.equal(parts, whole(pack, isa, num_tokens, extended=extended))


@every_level
def test_blocks_without_gates(isa: str) -> None:
    pack = blocks(Q4_K, Q6_K)
    assert torch.equal(joined(pack, isa, 70, extended=False, num_threads=2), whole(pack, isa, 70, extended=False))


@every_level
@pytest.mark.parametrize("dtype", list(DENSE_TYPES), ids=str)
def test_dense(isa: str, dtype: torch.dtype) -> None:
    pack = numbers(dtype)
    parts = joined(pack, isa, 70, extended=True, num_threads=1)
    assert torch.equal(parts, whole(pack, isa, 70, extended=True))


def test_parts_that_do_not_fit() -> None:
    file = make_shared_memory(library(), 2)
    assert file is not None
    shared = SharedSum(library(), file, rank=0, size=2)
    os.close(file)
    gate, up, down = blocks(Q4_K, Q4_K, Q6_K)(NEURONS[0], OUTPUTS[0])
    for widths in ([96, 96], [128, 128]):
        join = ColumnJoin(shared, torch.tensor(widths, dtype=torch.int32))
        with pytest.raises(ConfigError, match="parts of 256, 96 among them"):
            NativeExperts(workspace(), gate, up, down, num_experts=NUM_EXPERTS, join=join)
    with pytest.raises(ConfigError, match="rows"):  # nobody else has the rest
        NativeExperts(workspace(), gate, up, down, num_experts=NUM_EXPERTS)
