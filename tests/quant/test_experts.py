"""Which form experts take, and that it is near to their decoded weights."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from native_weights import IQ3_S, IQ4_NL, IQ4_XS, TYPES, needs_library, random_matrix, workspace
from paged_sdk.config.isq import IsqType
from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.fused_moe import fused_moe
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix, UnreadRows
from paged_sdk.quant.dense_experts import DenseExperts
from paged_sdk.quant.experts import Experts, Projections
from paged_sdk.quant.native_block_experts import NativeBlockExperts
from paged_sdk.quant.policy import ExpertStack, NamedMatrix, WeightPolicy

NUM_EXPERTS, INNER, HIDDEN = 4, 256, 256
Q8_0 = 8
CPU = torch.device("cpu")

#: Activations in int8, before and after the gate.
TOLERANCE = 0.02


def stacks(*tensor_types: int) -> list[BlockMatrix]:
    """Return gate (of three types), up and down of all experts."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))[-len(tensor_types) :]
    return [
        random_matrix(tensor_type, NUM_EXPERTS * rows, cols, generator)
        for tensor_type, (rows, cols) in zip(tensor_types, shapes, strict=True)
    ]


def decoded(blocks: list[BlockMatrix]) -> tuple[Tensor, Tensor]:
    *firsts, down = (each.decoded().view(NUM_EXPERTS, -1, each.shape[1]) for each in blocks)
    return torch.cat(firsts, dim=1), down


def tokens(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(num_tokens, HIDDEN, generator=generator),
        torch.rand(num_tokens, 2, generator=generator),
        torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(-1)[:, :2],
    )


def chosen(
    policy: WeightPolicy,
    stored: Sequence[StoredMatrix],
    device: torch.device = CPU,
    *,
    activation: KernelActivation = "silu",
) -> Experts:
    """Return the experts that the policy makes, each expert's matrices by themselves."""
    *firsts, down = (
        [
            NamedMatrix(f"experts.{expert}.weight", stack.rows(slice(expert * rows, (expert + 1) * rows)))
            for expert in range(NUM_EXPERTS)
        ]
        for stack, rows in zip(stored, (INNER, INNER, HIDDEN)[-len(stored) :], strict=True)
    )
    return policy.experts(
        ExpertStack(matrices=list(zip(*firsts, strict=True))),
        ExpertStack(matrices=[[each] for each in down]),
        dtype=torch.float32,
        device=device,
        activation=activation,
    )


def packed(blocks: list[BlockMatrix]) -> Experts:
    return chosen(WeightPolicy(keep_blocks=True, workspace=workspace()), blocks)


@needs_library
@pytest.mark.parametrize("types", [(12, 12, 14), (8, 2, 6), (13, 13, 13)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 30])
def test_packed_experts_are_near_to_their_decoded_weights(types: tuple[int, int, int], num_tokens: int) -> None:
    blocks = stacks(*types)
    experts = packed(blocks)
    assert isinstance(experts, NativeBlockExperts)
    inputs = tokens(num_tokens)
    expected = fused_moe(inputs[0], *decoded(blocks), *inputs[1:])
    assert (experts.forward(*inputs) - expected).norm() < TOLERANCE * expected.norm()


@pytest.mark.parametrize("isq", [None, IsqType.Q8_0, IsqType.INT8], ids=str)
@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_library), False])
def test_experts_without_gates_in_every_form(is_native: bool, isq: IsqType | None) -> None:
    """Of blocks, and of dense matrices that become blocks or grouped codes."""
    blocks = stacks(Q8_0, Q8_0)
    policy = WeightPolicy(keep_blocks=True, isq=isq, workspace=workspace() if is_native else None)
    experts = chosen(policy, blocks, activation="relu2")
    assert isinstance(experts, NativeBlockExperts if is_native else DenseExperts)
    inputs = tokens(5)
    expected = fused_moe(inputs[0], *decoded(blocks), *inputs[1:], "relu2")
    assert (experts.forward(*inputs) - expected).norm() < TOLERANCE * expected.norm()
    assert (experts.native_weights is None) != is_native


@needs_library
@pytest.mark.parametrize("tensor_type", TYPES)
def test_packed_experts_take_the_bytes_of_the_file(tensor_type: int) -> None:
    blocks = stacks(tensor_type, tensor_type, tensor_type)
    experts = packed(blocks)
    assert experts.num_bytes == sum(each.blocks.nbytes for each in blocks)


@needs_library
@pytest.mark.parametrize(
    "types", [(IQ3_S, IQ3_S, 12), (12, 12, IQ3_S), (IQ4_XS, IQ4_XS, 12), (12, 12, IQ4_NL)], ids=str
)
def test_what_has_no_kernel_is_brought_to_a_form_that_has(types: tuple[int, int, int]) -> None:
    blocks = stacks(*types)
    experts = packed(blocks)
    assert isinstance(experts, NativeBlockExperts)
    # IQ4's scales are of 16 bits, as IQ4_NL's are in the file, and a row has two units of 4 bytes.
    replaced = {IQ3_S: Q8_0, IQ4_XS: IQ4_NL}
    as_held = stacks(*(replaced.get(tensor_type, tensor_type) for tensor_type in types))
    units = sum(8 * each.shape[0] for each in as_held if each.tensor_type == IQ4_NL)
    assert experts.num_bytes == units + sum(each.blocks.nbytes for each in as_held)
    inputs = tokens(5)
    expected = fused_moe(inputs[0], *decoded(blocks), *inputs[1:])
    assert (experts.forward(*inputs) - expected).norm() < TOLERANCE * expected.norm()


@needs_library
@pytest.mark.parametrize("tensor_type", [12, IQ4_XS, IQ3_S])
def test_experts_are_packed_as_they_are_read(tensor_type: int) -> None:
    """Of all the experts of a layer, a file's blocks are in memory for two at a time, and for never more."""
    blocks = stacks(tensor_type, tensor_type, tensor_type)
    alive, most = 0, 0

    def released() -> None:
        nonlocal alive
        alive -= 1

    def unread(matrix: BlockMatrix) -> BlockMatrix:
        stored = matrix.blocks

        def read(first: int, last: int) -> Tensor:
            nonlocal alive, most
            rows = stored[first:last].clone()
            weakref.finalize(rows, released)
            alive += 1
            most = max(most, alive)
            return rows

        rows, width = stored.shape
        return BlockMatrix(tensor_type, UnreadRows(shape=(rows, width), itemsize=1, read=read))

    inputs = tokens(3)
    expected = packed(blocks).forward(*inputs)
    assert torch.equal(packed([unread(each) for each in blocks]).forward(*inputs), expected)
    assert most <= 2


def test_without_the_library_experts_are_decoded() -> None:
    blocks = stacks(8, 8, 8)
    experts = chosen(WeightPolicy(keep_blocks=True, workspace=None), blocks)
    assert isinstance(experts, DenseExperts)
    gate_up, down = decoded(blocks)
    assert torch.equal(experts.gate_up, gate_up)
    assert torch.equal(experts.down, down)


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_repacked_experts_are_near_to_their_decoded_weights(triton_device: torch.device, num_tokens: int) -> None:
    pytest.importorskip("triton")
    from paged_sdk.quant.triton_block_experts import TritonBlockExperts

    generator = torch.Generator().manual_seed(0)
    inner, hidden = 128, 64
    gate, up = (random_matrix(Q8_0, NUM_EXPERTS * inner, hidden, generator) for _ in range(2))
    down = random_matrix(Q8_0, NUM_EXPERTS * hidden, inner, generator)
    experts = TritonBlockExperts(Projections(gate, up, down), num_experts=NUM_EXPERTS, device=triton_device)
    assert experts.num_bytes == sum(each.blocks.nbytes for each in (gate, up, down))
    x, weights, ids = tokens(num_tokens)
    x = x[:, :hidden] * 0.01
    expected = fused_moe(x, *decoded([gate, up, down]), weights, ids)
    got = experts.forward(*(each.to(triton_device) for each in (x, weights, ids)))
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=1e-5 * max(1.0, float(expected.norm())))


@pytest.mark.parametrize("types", [(IQ3_S, IQ3_S, 12), (12, 12, IQ3_S)], ids=str)
def test_what_cannot_be_repacked_is_decoded_beside_a_gpu(types: tuple[int, int, int]) -> None:
    experts = chosen(WeightPolicy(keep_blocks=True), stacks(*types), torch.device("meta"))
    assert isinstance(experts, DenseExperts)
    assert experts.gate_up.shape == (NUM_EXPERTS, 2 * INNER, HIDDEN)
    assert experts.down.shape == (NUM_EXPERTS, HIDDEN, INNER)


def test_dense_experts() -> None:
    gate_up, down = decoded(stacks(8, 8, 8))
    experts = DenseExperts(gate_up, down)
    inputs = tokens(3)
    assert torch.equal(experts.forward(*inputs), fused_moe(inputs[0], gate_up, down, *inputs[1:]))
    assert experts.num_bytes == NUM_EXPERTS * 3 * INNER * HIDDEN * 4
