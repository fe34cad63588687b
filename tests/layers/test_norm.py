"""RMSNorm against transformers' own modules, in the last bit."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from paged_sdk.kernels.norm import add_rms_norm, rms_norm
from paged_sdk.layers.norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("reference", "offset"), [(LlamaRMSNorm, 0.0), (Gemma2RMSNorm, 1.0)])
def test_rounds_where_the_family_does(
    reference: type[LlamaRMSNorm] | type[Gemma2RMSNorm], offset: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module = reference(96, eps=1e-5)
    module.weight.data = torch.randn(96)
    module.to(dtype)
    x = torch.randn(33, 96, dtype=dtype) * 3
    with torch.inference_mode():
        ours = RMSNorm(module.weight.data, 1e-5, offset=offset).forward(x)
        expected = module(x)
    assert ours.dtype is dtype
    # float32 differs in the order of a sum of 96 squares, 95 roundings at most of which the root takes half, and in the
    # five operations around it; halves, rounded from it, show any rounding too many.
    torch.testing.assert_close(ours, expected, rtol=(95 / 2 + 5) * 2**-24 if dtype is torch.float32 else 0, atol=0)


def test_keeps_its_input() -> None:
    x = torch.randn(2, 8)
    kept = x.clone()
    RMSNorm(torch.full((8,), 2.0), 1e-6, offset=1.0).forward(x)
    assert torch.equal(x, kept)


def test_one_weight_per_head_is_as_good_as_one_norm_each() -> None:
    x = torch.randn(5, 3, 8)
    weight = torch.randn(3, 8)
    together = RMSNorm(weight, 1e-6).forward(x)
    apart = torch.stack([RMSNorm(weight[head], 1e-6).forward(x[:, head]) for head in range(3)], dim=1)
    assert torch.equal(together, apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(24,), (3, 24)], ids=str)
def test_the_op_that_cuda_devices_run_is_the_same(shape: tuple[int, ...], offset: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(torch.randn(shape, generator=generator).to(dtype), 1e-5, offset=offset)
    x = torch.randn(5, 3, 24, generator=generator).to(dtype)
    assert torch.equal(rms_norm(x, norm.weight, norm.eps), norm.forward(x))
    added = torch.randn(5, 3, 24, generator=generator).to(dtype)
    normed, total = add_rms_norm(added, x, norm.weight, norm.eps)
    own_normed, own_total = norm.add_and_forward(added, x)
    assert torch.equal(total, own_total)
    assert torch.equal(normed, own_normed)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_norm_of_a_sum(offset: float) -> None:
    norm = RMSNorm(torch.randn(24), 1e-5, offset=offset)
    x, residual = torch.randn(2, 5, 24).bfloat16()
    kept, expected = x.clone(), x + residual
    normed, total = norm.add_and_forward(x, residual)
    assert torch.equal(total, expected)
    assert torch.equal(normed, norm.forward(expected))
    assert torch.equal(x, kept)
