"""Products with repacked matrices against the file's own weights in float64."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor

from native_weights import IQ4_XS, TRITON_TYPES, every_triton_type, random_matrix
from paged_sdk.errors import ConfigError, UnsupportedQuantizationError
from paged_sdk.kernels import quantized_linear as ops
from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.decode_rows import decode_rows
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, BlockMatrix, tensor_type_of
from paged_sdk.kernels.quantized.repack import repack
from paged_sdk.kernels.quantized.triton_blocks import TritonBlockMatrix, concatenate

pytest.importorskip("triton")

#: Norm of the difference over the norm of the result. Threads add up with 14 bits of float32 at least; halves are
#: rounded once at the end, and in tiles so are the weights.
TOLERANCES: Final = {torch.float32: 3e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EVERY_DTYPE: Final = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
Q4_K: Final = tensor_type_of("Q4_K")
Q6_K: Final = tensor_type_of("Q6_K")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def random_rows(num_rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, cols, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_close(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert result.dtype is dtype
    assert result.shape == expected.shape
    difference = (result.cpu().double() - expected).norm()
    assert difference <= TOLERANCES[dtype] * expected.norm()


def linear(
    kind: str, x: Tensor, matrix: TritonBlockMatrix, bias: Tensor | None = None, *, num_splits: int = 1
) -> Tensor:
    """Multiply by one kernel, cut so small that it has several programs and steps."""
    from paged_sdk.kernels.triton.quantized_few_rows import FewRowsPlan, linear_few_rows
    from paged_sdk.kernels.triton.quantized_tiles import TilePlan, linear_by_tiles

    if kind == "few rows":
        block_c = 64 // matrix.format.words
        return linear_few_rows(x, matrix, bias, FewRowsPlan(2, block_c, num_splits, num_warps=1))
    plan = TilePlan(
        block_m=16, block_n=16, block_w=32, num_splits=num_splits, num_warps=4, num_stages=2, deep=kind == "deep tiles"
    )
    return linear_by_tiles(x, matrix, bias, plan)


@every_triton_type
@pytest.mark.parametrize("blocks", [1, 3])
def test_repacking_keeps_every_weight(tensor_type: int, blocks: int) -> None:
    matrix = random_matrix(tensor_type, 5, blocks * BLOCK_FORMATS[tensor_type].elements, generator())
    repacked = repack(matrix)
    assert (repacked.rows, repacked.cols) == matrix.shape
    assert torch.equal(repacked.decoded(), matrix.decoded())
    assert torch.equal(repacked.to(torch.device("cpu")).decoded(torch.bfloat16), matrix.decoded(torch.bfloat16))
    assert torch.equal(repacked.at(slice(1, 3)).decoded(), matrix.decoded()[1:3])


def test_repacking_goes_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paged_sdk.kernels.quantized.repack._WEIGHTS_AT_ONCE", 600)
    matrix = random_matrix(Q4_K, 5, 256, generator())
    assert torch.equal(repack(matrix).decoded(), matrix.decoded())


def test_q3_k_takes_the_layout_of_q6_k() -> None:
    matrix = random_matrix(11, 5, 512, generator())
    assert torch.equal(repack(matrix).decoded(), matrix.decoded())


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("Q4_0", 4.5),
        ("Q4_1", 5.0),
        ("Q5_0", 5.5),
        ("Q5_1", 6.0),
        ("Q8_0", 8.5),
        ("Q4_K", 4.625),
        ("Q5_K", 5.625),
        ("Q6_K", 6.5625),
    ],
)
def test_bits_per_weight(name: str, bits: float) -> None:
    matrix = repack(random_matrix(tensor_type_of(name), 2, 512, generator()))
    assert matrix.num_bytes * 8 == bits * 2 * 512


def test_other_types_are_refused() -> None:
    with pytest.raises(UnsupportedQuantizationError, match=r"IQ4_XS weights cannot be repacked.*Q4_0, Q4_1"):
        repack(random_matrix(IQ4_XS, 2, 256, generator()))


def test_matrices_one_below_the_other() -> None:
    for tensor_type in TRITON_TYPES:
        parts = [random_matrix(tensor_type, rows, 256, generator()) for rows in (1, 3)]
        whole = BlockMatrix(tensor_type, torch.cat([part.blocks for part in parts]))
        assert torch.equal(concatenate([repack(part) for part in parts]).decoded(), whole.decoded())


@every_triton_type
@EVERY_DTYPE
@pytest.mark.parametrize(("kind", "num_rows"), [("few rows", 1), ("tiles", 6)])
def test_every_format(
    triton_device: torch.device, tensor_type: int, dtype: torch.dtype, kind: str, num_rows: int
) -> None:
    matrix = random_matrix(tensor_type, 3, 512, generator())
    x = random_rows(num_rows, 512, dtype)
    result = linear(kind, x.to(triton_device), repack(matrix).to(triton_device))
    assert_close(result, x.double() @ matrix.decoded().double().T, dtype)


@pytest.mark.parametrize(("name", "cols"), [("Q8_0", 320), ("Q5_1", 512), ("Q6_K", 512)])
def test_all_fields_as_one_product(triton_device: torch.device, name: str, cols: int) -> None:
    matrix = random_matrix(tensor_type_of(name), 3, cols, generator())
    x, bias = random_rows(6, cols, torch.bfloat16), torch.arange(3.0).bfloat16()
    result = linear(
        "deep tiles", x.to(triton_device), repack(matrix).to(triton_device), bias.to(triton_device), num_splits=2
    )
    assert_close(result, x.double() @ matrix.decoded().double().T + bias, torch.bfloat16)


@pytest.mark.parametrize("num_rows", [2, 3, 4])
@pytest.mark.parametrize("tensor_type", [Q4_K, Q6_K])
def test_several_rows_at_once(triton_device: torch.device, num_rows: int, tensor_type: int) -> None:
    matrix = random_matrix(tensor_type, 3, 512, generator())
    x = random_rows(num_rows, 512, torch.float32)
    result = linear("few rows", x.to(triton_device), repack(matrix).to(triton_device))
    assert_close(result, x.double() @ matrix.decoded().double().T, torch.float32)


@pytest.mark.parametrize("num_rows", [1, 17])
@pytest.mark.parametrize("kind", ["few rows", "tiles"])
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("cols", [32, 96, 320])
def test_rows_that_end_within_a_chunk_or_a_step(
    triton_device: torch.device, num_rows: int, kind: str, name: str, cols: int
) -> None:
    if kind == "few rows" and num_rows > 4:
        num_rows = 2
    matrix = random_matrix(tensor_type_of(name), 3, cols, generator())
    # Columns past the end hold NaN, which must not be met.
    wide = torch.full((num_rows, 512), torch.nan)
    wide[:, :cols] = random_rows(num_rows, cols, torch.float32)
    result = linear(kind, wide.to(triton_device)[:, :cols], repack(matrix).to(triton_device))
    assert_close(result, wide[:, :cols].double() @ matrix.decoded().double().T, torch.float32)


@pytest.mark.parametrize("kind", ["few rows", "tiles"])
@pytest.mark.parametrize("num_splits", [1, 2, 3])
def test_splits_and_bias(triton_device: torch.device, kind: str, num_splits: int) -> None:
    matrix = random_matrix(Q4_K, 19, 1536, generator())
    x, bias = random_rows(2, 1536, torch.float32), torch.arange(19.0)
    result = linear(
        kind, x.to(triton_device), repack(matrix).to(triton_device), bias.to(triton_device), num_splits=num_splits
    )
    assert_close(result, x.double() @ matrix.decoded().double().T + bias, torch.float32)


@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 255, 256, 600])
def test_the_launcher_serves_any_number_of_rows(triton_device: torch.device, num_rows: int) -> None:
    """Plans of its own choice; from 256 rows on the matrix is decoded first."""
    from paged_sdk.kernels.triton.quantized_linear import quantized_linear

    matrix = random_matrix(Q4_K, 3, 256, generator())
    x, bias = random_rows(num_rows, 256, torch.float32), torch.ones(3)
    result = quantized_linear(x.to(triton_device), repack(matrix).to(triton_device), bias.to(triton_device))
    assert_close(result, x.double() @ matrix.decoded().double().T + 1, torch.float32)


@every_triton_type
def test_decoding_on_the_device(triton_device: torch.device, tensor_type: int) -> None:
    from paged_sdk.kernels.triton.blocks import dequantize

    matrix = random_matrix(tensor_type, 5, 768, generator())
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 5e-4)):
        result = dequantize(repack(matrix).to(triton_device), dtype)
        expected = matrix.decoded().double()
        assert result.dtype is dtype
        largest = float(expected.abs().max())
        torch.testing.assert_close(result.cpu().double(), expected, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("indices", [[], [4], [3, 3, 0, 1, 4, 2]])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_decoding_some_rows(triton_device: torch.device, indices: list[int], dtype: torch.dtype) -> None:
    from paged_sdk.kernels.triton.blocks import dequantize, dequantize_rows

    matrix = repack(random_matrix(Q6_K, 5, 768, generator()))
    chosen = torch.tensor(indices, dtype=dtype)
    on_device = matrix.to(triton_device)
    expected = dequantize(on_device, torch.float16)[chosen.long().to(triton_device)]
    assert torch.equal(dequantize_rows(on_device, chosen.to(triton_device), torch.float16), expected)
    assert torch.equal(decode_rows(matrix, chosen, torch.float16), matrix.decoded(torch.float16)[chosen.long()])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("num_rows", [1, 3, 5])
def test_swiglu_of_two_formats(triton_device: torch.device, num_rows: int, activation: KernelActivation) -> None:
    from paged_sdk.kernels.triton.quantized_linear import quantized_swiglu

    gate = random_matrix(Q4_K, 3, 512, generator())
    up = random_matrix(tensor_type_of("Q8_0"), 3, 512, generator())
    x = random_rows(num_rows, 512, torch.float16) * 0.1  # no saturated gates: the interpreter's exp warns of them
    result = quantized_swiglu(
        x.to(triton_device), repack(gate).to(triton_device), repack(up).to(triton_device), activation
    )
    expected = ops.quantized_swiglu_reference(x.double(), repack(gate), repack(up), activation)
    assert_close(result, expected, torch.float16)


def test_plans_fill_a_device() -> None:
    """On 132 multiprocessors: enough warps, and splits only where outputs make too few programs."""
    from paged_sdk.kernels.triton.quantized_few_rows import plan_few_rows
    from paged_sdk.kernels.triton.quantized_tiles import plan_tiles
    from paged_sdk.kernels.triton.tile_choices import TILE_CHOICES, MatrixUnits, tile_choice

    choices = TILE_CHOICES[MatrixUnits.SHARED_MEMORY]

    def shaped(rows: int, cols: int) -> TritonBlockMatrix:
        words = torch.empty(rows, cols // 8, dtype=torch.int32, device="meta")
        scales = torch.empty(rows, cols // 64, dtype=torch.int32, device="meta")
        return TritonBlockMatrix(Q4_K, cols, words, None, scales, None, scales[:, ::4])

    for rows, cols in ((4096, 4096), (14_336, 4096), (4096, 14_336), (1536, 8960)):
        for num_rows in (1, 4):
            few = plan_few_rows(shaped(rows, cols), num_rows, 132)
            assert rows // few.block_n * few.num_warps * few.num_splits >= 132 * 10
            assert few.num_splits == 1
        tiles = plan_tiles(shaped(rows, cols), 16, tile_choice(choices, 16), 132)
        assert rows // tiles.block_n * tiles.num_splits >= 132
    assert plan_few_rows(shaped(64, 14_336), 1, 132).num_splits > 1
    assert plan_tiles(shaped(14_336, 4096), 256, tile_choice(choices, 256), 132).num_splits == 1


def test_the_op_is_its_reference_without_a_device() -> None:
    matrix = repack(random_matrix(Q6_K, 3, 256, generator()))
    x, bias = random_rows(2, 256, torch.float64), torch.ones(3, dtype=torch.float64)
    result = ops.quantized_linear(x, matrix, bias)
    torch.testing.assert_close(result, x @ matrix.decoded(torch.float64).T + 1)
    both = ops.quantized_swiglu(x, matrix, matrix)
    product = x @ matrix.decoded(torch.float64).T
    torch.testing.assert_close(both, torch.nn.functional.silu(product) * product)


def test_what_does_not_fit_is_refused() -> None:
    matrix = repack(random_matrix(Q6_K, 3, 256, generator()))
    with pytest.raises(ConfigError, match=r"x\.shape"):
        ops.quantized_linear(torch.zeros(2, 255), matrix)
    with pytest.raises(ConfigError, match=r"indices\.dtype"):
        decode_rows(matrix, torch.zeros(2), torch.float32)
    with pytest.raises(ConfigError, match=r"bias\.shape"):
        ops.quantized_linear(torch.zeros(2, 256), matrix, torch.zeros(4))
    with pytest.raises(ConfigError, match=r"up.*3 rows of 256 columns"):
        ops.quantized_swiglu(torch.zeros(2, 256), matrix, repack(random_matrix(Q6_K, 4, 256, generator())))


@pytest.mark.parametrize("tensor_type", [Q4_K, Q6_K])
def test_the_ops_can_be_traced(tensor_type: int) -> None:
    matrix = repack(random_matrix(tensor_type, 3, 256, generator()))
    x = random_rows(2, 256, torch.float32)
    torch.library.opcheck(ops._linear, (x, *matrix.parts, torch.zeros(3), tensor_type, 256))
    torch.library.opcheck(ops._swiglu, (x, *matrix.parts, tensor_type, *matrix.parts, tensor_type, 256, "silu"))
