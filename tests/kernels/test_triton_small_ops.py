"""Normalization and activations in Triton against torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels import activation as activations
from paged_sdk.kernels import norm as norms
from paged_sdk.layers.norm import RMSNorm

pytest.importorskip("triton")

#: Relative: a few roundings of the result's dtype; the interpreter rounds bfloat16 towards zero.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype is dtype
    assert actual.is_contiguous()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance)


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], None, eps) * weight.double()


@every_dtype
@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize("size", [1, 64, 100, 576])
def test_rms_norm(triton_device: torch.device, dtype: torch.dtype, wide_weight: bool, size: int) -> None:
    from paged_sdk.kernels.triton.norm import rms_norm

    x, weight = normal(5, size).to(dtype), normal(size).to(torch.float32 if wide_weight else dtype)
    result = rms_norm(x.to(triton_device), weight.to(triton_device), 1e-5)
    assert_close(result, exact_norm(x, weight, 1e-5), dtype)


@every_dtype
def test_norms_of_heads_in_a_wider_tensor(triton_device: torch.device, dtype: torch.dtype) -> None:
    from paged_sdk.kernels.triton.norm import rms_norm

    x, weight = normal(5, 9, 48).to(dtype)[:, 2:5], normal(3, 48).to(dtype)
    result = rms_norm(x.to(triton_device), weight.to(triton_device), 1e-6)
    assert_close(result, exact_norm(x, weight, 1e-6), dtype)


@every_dtype
@pytest.mark.parametrize("size", [100, 1024])
def test_norm_of_a_sum(triton_device: torch.device, dtype: torch.dtype, size: int) -> None:
    from paged_sdk.kernels.triton.norm import add_rms_norm

    x, residual, weight = normal(3, size).to(dtype), normal(4, size).to(dtype)[1:], normal(size).to(dtype)
    normed, total = add_rms_norm(x.to(triton_device), residual.to(triton_device), weight.to(triton_device), eps=1e-5)
    assert_close(total, x.double() + residual.double(), dtype)
    assert_close(normed, exact_norm(total.cpu(), weight, 1e-5), dtype)


def test_norms_round_where_the_layer_does(triton_device: torch.device) -> None:
    """float16, which the interpreter rounds as a device does: equal but for the last bits of the mean."""
    from paged_sdk.kernels.triton.norm import rms_norm

    x, weight = normal(8, 128).half(), normal(128).half()
    for layer in (RMSNorm(weight, 1e-5), RMSNorm(weight, 1e-5, offset=1.0)):
        expected = layer.forward(x)
        assert torch.equal(norms.rms_norm(x, layer.weight, 1e-5), expected)
        result = rms_norm(x.to(triton_device), layer.weight.to(triton_device), 1e-5).cpu()
        assert (result != expected).sum() <= 4


@every_dtype
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("shape", [(3, 20), (2, 3, 2100)])
def test_gated_activations(
    triton_device: torch.device, dtype: torch.dtype, kind: activations.KernelActivation, shape: tuple[int, ...]
) -> None:
    from paged_sdk.kernels.triton.activation import gated_activation

    gate_up = normal(*shape).to(dtype)
    expected = activations.gated_activation_reference(gate_up.double(), kind)
    assert_close(gated_activation(gate_up.to(triton_device), kind), expected, dtype)


def test_nothing_to_do(triton_device: torch.device) -> None:
    from paged_sdk.kernels.triton.activation import gated_activation
    from paged_sdk.kernels.triton.norm import add_rms_norm

    none, weight = torch.zeros(0, 64, device=triton_device), torch.ones(64, device=triton_device)
    assert gated_activation(none, "silu").shape == (0, 32)
    assert [tensor.shape for tensor in add_rms_norm(none, none, weight, 1e-5)] == [(0, 64), (0, 64)]


def test_the_ops_are_their_references_without_a_device() -> None:
    x, residual, weight = normal(3, 64), normal(4, 64)[1:], normal(64)
    normed, total = norms.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_close(normed, exact_norm(total, weight, 1e-5), torch.float32)
    assert_close(activations.gated_activation(x), F.silu(x[:, :32].double()) * x[:, 32:].double(), torch.float32)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight\.shape.*last one or two dimensions of \(3, 64\)"):
        norms.rms_norm(torch.zeros(3, 64), torch.zeros(63), 1e-5)
    with pytest.raises(ConfigError, match=r"weight\.dtype"):
        norms.rms_norm(torch.zeros(3, 64), torch.zeros(64).half(), 1e-5)
    with pytest.raises(ConfigError, match=r"residual\.shape"):
        norms.add_rms_norm(torch.zeros(3, 64), torch.zeros(2, 64), torch.zeros(64), 1e-5)
    with pytest.raises(ConfigError, match="even last dimension"):
        activations.gated_activation(torch.zeros(3, 63))
