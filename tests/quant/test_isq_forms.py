"""Quantizing in situ wherever weights are to be: with the native library, without it, and for Triton's kernels."""

from __future__ import annotations

import re
from typing import Final

import pytest
import torch
from torch import Tensor

from native_weights import IQ4_NL, needs_library, random_matrix, workspace
from paged_sdk.config.isq import IsqType
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, BlockMatrix
from paged_sdk.kernels.quantized.grouped_matrix import GroupedMatrix
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix
from paged_sdk.quant import isq as isq_module
from paged_sdk.quant.embedding import TritonBlockEmbedding
from paged_sdk.quant.form import Form
from paged_sdk.quant.forms.triton_blocks import TritonBlocks
from paged_sdk.quant.hadamard_int8 import HadamardInt8Linear
from paged_sdk.quant.isq import can_be_quantized, for_head, has_groups, is_for_gpus, quantize, quantize_stored
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.native_block import NativeBlockLinear
from paged_sdk.quant.policy import ExpertStack, NamedMatrix, Role, WeightPolicy

CPU = torch.device("cpu")


def weight(rows: int, cols: int) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)) * 0.05


BLOCKS: Final = [isq for isq in IsqType if not has_groups(isq)]
GROUPS: Final = [isq for isq in IsqType if has_groups(isq)]


def blocks_of(values: Tensor, isq: IsqType, library: NativeLibrary | None = None) -> BlockMatrix:
    matrix = quantize(values, isq, library)
    assert isinstance(matrix, BlockMatrix)
    return matrix


def name_of(matrix: BlockMatrix) -> str:
    return BLOCK_FORMATS[matrix.tensor_type].name


@pytest.mark.parametrize("isq", BLOCKS)
def test_narrow_rows_take_a_wider_type(isq: IsqType) -> None:
    wide, narrow = (blocks_of(weight(2, cols), isq) for cols in (512, 96))
    assert name_of(wide).replace("_K", "K") == ("Q8_0" if isq is IsqType.Q8_1 else isq.value)
    expected = {
        IsqType.Q2K: "Q4_0",
        IsqType.Q3K: "Q4_0",
        IsqType.Q4K: "Q5_0",
        IsqType.Q5K: "Q5_1",
        IsqType.Q6K: "Q8_0",
        IsqType.Q8_1: "Q8_0",
    }
    assert name_of(narrow) == expected.get(isq, isq.value)
    assert not can_be_quantized(isq, 40)


@pytest.mark.parametrize("isq", GROUPS)
def test_groups_need_a_multiple_of_32_columns(isq: IsqType) -> None:
    assert can_be_quantized(isq, 96)
    assert not can_be_quantized(isq, 40)
    assert not is_for_gpus(isq)
    assert isinstance(quantize(weight(2, 96), isq, None), GroupedMatrix)


@pytest.mark.parametrize("isq", [IsqType.Q4_1, IsqType.Q3K, IsqType.AFQ4, IsqType.NF4, IsqType.INT8])
def test_rows_may_be_quantized_a_few_at_a_time(isq: IsqType, monkeypatch: pytest.MonkeyPatch) -> None:
    values = weight(7, 256)
    whole = quantize(values, isq, None)
    monkeypatch.setattr(isq_module, "_WEIGHTS_AT_ONCE", 600)
    parts = quantize_stored(DenseMatrix(values), isq, None, CPU)
    assert parts.shape == whole.shape
    assert torch.equal(parts.decoded(), whole.decoded())


@pytest.mark.parametrize("isq", IsqType)
def test_a_matrix_may_have_no_rows(isq: IsqType) -> None:
    matrix = quantize_stored(DenseMatrix(torch.empty(0, 256)), isq, None, CPU)
    assert matrix.shape == (0, 256)
    assert matrix.to(CPU).decoded().shape == (0, 256)


@pytest.mark.parametrize("isq", IsqType)
def test_heads_take_a_wider_type(isq: IsqType) -> None:
    head = for_head(isq)
    assert head.bits > isq.bits or (head is IsqType.Q8_0 and isq.bits == 8)
    assert head is (IsqType.Q6K if isq.bits <= 4 else IsqType.Q8_0)


@needs_library
@pytest.mark.parametrize("isq", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_library_and_torch_give_the_same_blocks(isq: IsqType, dtype: torch.dtype) -> None:
    values = weight(5, 512).to(dtype)
    native, reference = blocks_of(values, isq, workspace().library), blocks_of(values, isq)
    assert native.tensor_type == reference.tensor_type
    assert torch.equal(native.blocks, reference.blocks)


def layer(policy: WeightPolicy, device: torch.device, *, role: Role = Role.LINEAR) -> Linear:
    named = [
        NamedMatrix("q.weight", DenseMatrix(weight(24, 256))),
        NamedMatrix("k.weight", DenseMatrix(weight(8, 256))),
    ]
    return policy.linear(named, [None, None], role, dtype=torch.float32, device=device)


def error(linear: Linear, device: torch.device) -> float:
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    expected = x @ torch.cat((weight(24, 256), weight(8, 256))).T
    return float((linear.forward(x.to(device), None).cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_library), False])
def test_on_the_cpu(*, native: bool) -> None:
    errors = []
    for isq in (IsqType.Q4K, IsqType.Q8_0):
        linear = layer(WeightPolicy(isq=isq, workspace=workspace() if native else None), CPU)
        assert isinstance(linear, NativeBlockLinear if native else HadamardInt8Linear)
        errors.append(error(linear, CPU))
    assert 0 < errors[1] < errors[0] / 2 < 0.06


@needs_library
@pytest.mark.parametrize("isq", GROUPS)
def test_groups_are_multiplied_at_their_own_bits(isq: IsqType) -> None:
    linear = layer(WeightPolicy(isq=isq, workspace=workspace()), CPU)
    assert isinstance(linear, NativeBlockLinear)
    bits = 8.5 if isq is IsqType.FP8 else isq.bits + 1  # what kernels multiply in place of FP8's codes
    assert linear.num_bytes <= 48 * 256 * bits / 8  # rows are padded to panels of 16
    assert 0 < error(linear, CPU) < {2: 0.6, 3: 0.3, 4: 0.2, 6: 0.05, 8: 0.05}[isq.bits]


class EverywhereTritonBlocks(TritonBlocks):
    """What is chosen for CUDA, on any device."""

    def is_for(self, device: torch.device) -> bool:
        return True


def test_blocks_of_tables_for_tritons_kernels(triton_device: torch.device) -> None:
    pytest.importorskip("triton")
    from paged_sdk.quant.triton_block import TritonBlockLinear

    matrix = random_matrix(IQ4_NL, 24, 256, torch.Generator().manual_seed(0))
    policy = WeightPolicy(keep_blocks=True, forms=[EverywhereTritonBlocks()])
    named = [NamedMatrix("q.weight", matrix)]
    linear = policy.linear(named, [None], Role.LINEAR, dtype=torch.float32, device=triton_device)
    assert isinstance(linear, TritonBlockLinear)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    expected = x @ matrix.decoded().T
    assert (linear.forward(x.to(triton_device), None).cpu() - expected).norm() < 0.02 * expected.norm()


def test_for_tritons_kernels(triton_device: torch.device) -> None:
    pytest.importorskip("triton")
    from paged_sdk.quant.triton_block import TritonBlockLinear
    from paged_sdk.quant.triton_block_experts import TritonBlockExperts

    forms: list[Form] = [EverywhereTritonBlocks()]
    policy = WeightPolicy(isq=IsqType.Q5K, forms=forms)
    linear = layer(policy, triton_device)
    assert isinstance(linear, TritonBlockLinear)
    blocks = [blocks_of(weight(rows, 256), IsqType.Q5K) for rows in (24, 8)]
    expected = TritonBlockLinear(blocks, [None, None], device=triton_device)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(triton_device)
    assert torch.equal(linear.forward(x, None), expected.forward(x, None))
    assert linear.num_bytes == expected.num_bytes
    # Embeddings take the head's type, and a projection that is tied to them shares it.
    table = NamedMatrix("embed_tokens.weight", DenseMatrix(weight(40, 256)))
    embedding = policy.embedding(table, scale=None, dtype=torch.float32, device=triton_device)
    assert isinstance(embedding, TritonBlockEmbedding)
    head = policy.tied_head("lm_head.weight", embedding, dtype=torch.float32, device=triton_device)
    assert isinstance(head, TritonBlockLinear)
    assert head.num_bytes == pytest.approx(40 * 256 * 34 / 32)
    stack = [[NamedMatrix(f"{i}.weight", DenseMatrix(weight(32 + i, 256)[:32])) for i in range(2)] for _ in range(2)]
    down = [[NamedMatrix("down.weight", DenseMatrix(weight(256, 32)))] for _ in range(2)]
    experts = policy.experts(
        ExpertStack(matrices=stack), ExpertStack(matrices=down), dtype=torch.float32, device=triton_device
    )
    assert isinstance(experts, TritonBlockExperts)


def test_a_pattern_decides_before_the_setting() -> None:
    rules = [(re.compile("^q"), IsqType.Q8_0), (re.compile("lm_head"), IsqType.Q4_0)]
    policy = WeightPolicy(isq=IsqType.Q4K, isq_by_name=rules)
    assert policy.is_quantized(NamedMatrix("q.weight", DenseMatrix(weight(8, 32))), Role.LINEAR)
    assert policy.is_quantized(NamedMatrix("embed.weight", DenseMatrix(weight(8, 32))), Role.EMBEDDING)
    assert not policy.is_quantized(NamedMatrix("q.weight", DenseMatrix(weight(8, 40))), Role.LINEAR)
    by_name, by_setting = layer(policy, CPU), layer(WeightPolicy(isq=IsqType.Q4K), CPU)
    assert error(by_name, CPU) < error(by_setting, CPU)
