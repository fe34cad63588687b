"""Compare int8 rows after the Hadamard transform in torch with float64 algebra by an explicit Hadamard matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from native_weights import check_scales, hadamard, transform
from paged_sdk.kernels.hadamard import hadamard_block, hadamard_quantize

DTYPES = [torch.float32, torch.bfloat16]


def random_rows(rows: int, cols: int) -> Tensor:
    """Draw random rows with channels that stand out."""
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(cols))
    x[:, ::17] *= 20
    return x


@pytest.mark.parametrize(
    ("cols", "block"), [(576, 64), (1536, 256), (896, 128), (4864, 256), (256, 256), (96, 32), (8960, 256), (7, 1)]
)
def test_blocks_are_the_largest_that_divide_the_columns(cols: int, block: int) -> None:
    assert hadamard_block(cols) == block
    assert cols % block == 0


@pytest.mark.parametrize("block", [1, 2, 64, 256])
def test_the_tests_own_matrix_is_a_rotation(block: int) -> None:
    torch.testing.assert_close(hadamard(block) @ hadamard(block), torch.eye(block, dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cols", [7, 6, 24, 96, 192, 640, 768])
def test_codes_are_the_nearest(cols: int, dtype: torch.dtype) -> None:
    x = random_rows(11, cols).to(dtype)
    codes, scales = hadamard_quantize(x)
    assert codes.dtype == torch.int8
    exact = transform(x)
    largest = exact.abs().amax(-1)
    # A product with the matrix rounds its entries, and each of the block's terms up to `block` times, in an order that
    # the processor decides: n roundings of random signs come to more than 4 sqrt(n) once in a thousand rows (Higham and
    # Mary, 2019, https://doi.org/10.1137/18M1226312).
    check_scales(scales, x.float(), 4 * (hadamard_block(cols) + 2) ** 0.5)
    assert ((codes.double() * scales.double()[:, None] - exact).abs() <= 0.501 * largest[:, None] / 127).all()
    assert (codes.abs().amax(-1) == 127).all()


def test_the_rotated_product_is_the_product() -> None:
    """Of activations with channels that stand out, where plain int8 rows lose much more."""
    x, weight = random_rows(32, 512), torch.randn(64, 512, generator=torch.Generator().manual_seed(4))
    expected = x.double() @ weight.double().T

    def error(x_codes: Tensor, weight_codes: Tensor) -> float:
        return float((x_codes @ weight_codes.T - expected).norm() / expected.norm())

    def rounded(rows: Tensor) -> Tensor:
        scales = rows.abs().amax(-1, keepdim=True).double() / 127
        return torch.round(rows / scales) * scales

    transformed = [codes.double() * scales.double()[:, None] for codes, scales in map(hadamard_quantize, (x, weight))]
    assert error(*transformed) < 0.015 < error(rounded(x), rounded(weight))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    x = random_rows(6, 256)
    clean, clean_scales = hadamard_quantize(x)
    x[3, 100] = bad
    codes, scales = hadamard_quantize(x)
    assert scales[3].isnan()
    others = torch.arange(6) != 3
    assert torch.equal(codes[others], clean[others])
    assert torch.equal(scales[others], clean_scales[others])


@pytest.mark.parametrize("value", [0.0, 1e-33, -1e-40])
def test_zeros_are_zeros_and_so_is_what_has_no_scale(value: float) -> None:
    codes, scales = hadamard_quantize(torch.full((3, 64), value))
    assert (codes == 0).all()
    assert (scales == 0).all()


def test_no_rows_are_no_rows() -> None:
    codes, scales = hadamard_quantize(torch.zeros(0, 64))
    assert (codes.shape, scales.shape) == ((0, 64), (0,))
