"""Products of heads with matrices of their own: bit for bit those of linear layers, one head at a time."""

from __future__ import annotations

from typing import Final

import pytest
import torch
from torch import Tensor

from native_weights import every_level, needs_library, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.heads import NativeHeads
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.packed import PackedWeight, pack_dense, pack_gguf
from paged_sdk.kernels.native.quantize import quantize_blocks
from paged_sdk.kernels.quantized.gguf_blocks import tensor_type_of

pytestmark = needs_library

DENSE: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMS: Final = (*DENSE, "Q8_0", "Q8_0 hadamard", "Q4_0")
HEADS, SIZE, COLS = 5, 48, 64


def matrices() -> Tensor:
    return torch.randn(HEADS, SIZE, COLS, generator=torch.Generator().manual_seed(1))


def packed(own: Workspace, matrix: Tensor, form: str) -> PackedWeight:
    rows, cols = matrix.shape
    if form in DENSE:
        return pack_dense(own.library, [matrix], (rows, cols), DENSE[form])
    tensor_type = tensor_type_of(form.split()[0])
    weight = pack_gguf(own.library, quantize_blocks(own.library, matrix, tensor_type), tensor_type, rows, cols)
    return weight.hadamard_form() if form.endswith("hadamard") else weight


def made(own: Workspace, form: str = "float32") -> NativeHeads:
    return NativeHeads(own, packed(own, matrices().flatten(0, 1), form), num_heads=HEADS)


def rows_of(count: int, heads: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, heads, COLS, generator=torch.Generator().manual_seed(count)).to(dtype)


def one_by_one(own: Workspace, form: str, x: Tensor) -> Tensor:
    """Return the products of each head by a linear layer of its own."""
    linears = [NativeLinear(own, [packed(own, matrix, form)]) for matrix in matrices()]
    return torch.stack([linear(x[:, head].contiguous()) for head, linear in enumerate(linears)], 1)


@every_level
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_each_head_has_its_own_matrix(isa: str, form: str, num_threads: int) -> None:
    own = workspace(isa, num_threads)
    heads = made(own, form)
    for num_rows, dtype in ((1, torch.bfloat16), (7, torch.float32), (70, torch.float16)):
        x = rows_of(num_rows, HEADS, dtype)
        got = heads(x, torch.empty(num_rows, HEADS, SIZE, dtype=dtype))
        assert torch.equal(got, one_by_one(own, form, x))
        error = (got.double() - torch.einsum("nhc,hsc->nhs", x.double(), matrices().double())).norm() / got.norm()
        assert error < (0.1 if form == "Q4_0" else 0.02)


@every_level
@pytest.mark.parametrize("form", FORMS)
def test_some_heads_of_shared_rows_into_a_view(isa: str, form: str) -> None:
    own = workspace(isa, 2)
    heads, x = made(own, form), rows_of(33, 2, torch.float32)[:, 1:]
    out = torch.full((33, 3, SIZE + 16), 7.0)
    assert heads(x, out[..., 8:-8], first=2).shape == (33, 3, SIZE)
    assert torch.equal(out[..., 8:-8], one_by_one(own, form, x.expand(-1, HEADS, -1))[:, 2:])
    assert bool((out[..., :8] == 7).all())
    assert bool((out[..., -8:] == 7).all())


def test_no_rows() -> None:
    out = torch.empty(0, HEADS, SIZE)
    assert made(workspace())(torch.empty(0, HEADS, COLS), out) is out


def test_what_does_not_fit_is_refused() -> None:
    own = workspace()
    heads, x, out = made(own), torch.ones(2, HEADS, COLS), torch.ones(2, HEADS, SIZE)
    with pytest.raises(ConfigError, match="heads = '1 to 5' is not allowed: expected 0 to 4"):
        heads(x, out, first=1)
    with pytest.raises(ConfigError, match=r"x\.shape"):
        heads(x[:, :2], out)
    with pytest.raises(ConfigError, match=r"out\.shape"):
        heads(x, out[..., 1:])
    with pytest.raises(ConfigError, match=r"out\.dtype"):
        heads(x, out.half())
    with pytest.raises(ConfigError, match=r"x\.dtype"):
        heads(x.double(), out.double())
    with pytest.raises(ConfigError, match=r"x\.stride"):
        heads(torch.ones(2, HEADS, 2 * COLS)[..., ::2], out)
    with pytest.raises(ConfigError, match=r"weight\.rows = 240 is not allowed: expected 4 times a multiple of 16"):
        NativeHeads(own, packed(own, matrices().flatten(0, 1), "float32"), num_heads=4)
