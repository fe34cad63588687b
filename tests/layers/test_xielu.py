"""An activation with learned numbers is transformers', and the native decoder's is that in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.activations import XIELUActivation

from native_weights import every_level, library, needs_library, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.native.decoder import NativeDecoder
from paged_sdk.kernels.native.decoder_layer import DecoderLayer
from paged_sdk.kernels.native.packed import pack_dense
from paged_sdk.kernels.native.paged_attention import AttentionShape, VarlenBatch
from paged_sdk.kernels.native.projection import Projection
from paged_sdk.layers.xielu import Xielu

SIZE = 16


def numbers_of_every_size() -> Tensor:
    """Return numbers of both signs from 1e-9 to 80, those around the activation's eps and where its parts meet."""
    sizes = torch.cat([10.0 ** torch.linspace(-9, 1.9, 100), torch.tensor([1e-6, 0.5, 0.49999997, 0.5000001])])
    return torch.cat([sizes, -sizes, torch.zeros(48)])


def theirs(x: Tensor, alpha_p: float, alpha_n: float) -> Tensor:
    """Return transformers' activation in float64."""
    activation: Any = XIELUActivation(dtype=torch.float64)  # type: ignore[no-untyped-call]
    activation.alpha_p.data.fill_(alpha_p)
    activation.alpha_n.data.fill_(alpha_n)
    with torch.inference_mode():
        found: Tensor = activation(x.double())
    return found


def ours(alpha_p: float, alpha_n: float) -> Xielu:
    return Xielu.of_learned(alpha_p=alpha_p, alpha_n=alpha_n, beta=0.5, eps=-1e-6)


@pytest.mark.parametrize(("alpha_p", "alpha_n"), [(0.2, -1.0), (-3.0, 2.5), (30.0, 1.0)])
def test_it_is_that_of_transformers(alpha_p: float, alpha_n: float) -> None:
    x, activation = numbers_of_every_size(), ours(alpha_p, alpha_n)
    expected = theirs(x, alpha_p, alpha_n)
    torch.testing.assert_close(activation(x.double()), expected, rtol=1e-15, atol=0)
    # Below 0, e^x - 1 and x are rounded before they are subtracted.
    bound = 3e-7 * (x.double().abs() * (1 + activation.negative) + expected.abs())
    assert ((activation(x).double() - expected).abs() <= bound).all()
    half = x.bfloat16()
    expected = theirs(half, alpha_p, alpha_n).bfloat16()
    assert ((activation(half) == expected) | ((activation(half) - expected).abs() < 0.01 * expected.abs())).all()
    assert activation(half).dtype == torch.bfloat16


def layer_of(xielu: Tensor | None, *, has_gate: bool = False) -> DecoderLayer:
    """Return a layer that adds the activation of the residual stream to it, and nothing by its attention."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: Tensor) -> Projection:
        return Projection(pack_dense(library(), [rows], (len(rows), SIZE), torch.float32))

    zeros, same = torch.zeros(SIZE, SIZE), torch.eye(SIZE)
    pages = torch.rand(2, 1, 512, 1, SIZE, generator=generator)
    return DecoderLayer(
        shape=AttentionShape(1, 1, SIZE, scale=1.0),
        cache=LayerCache(*pages),
        qkv=(matrix(torch.cat([zeros] * 3)),),
        output=matrix(zeros),
        gate=matrix(same) if has_gate else None,
        up=matrix(same),
        down=matrix(same),
        attention_norm=None,
        mlp_norm=None,
        norm_eps=1e-6,
        xielu=xielu,
    )


@needs_library
@every_level
@pytest.mark.parametrize(("alpha_p", "alpha_n"), [(0.2, -1.0), (-3.0, 2.5)])
def test_native_layers(isa: str, alpha_p: float, alpha_n: float) -> None:
    x = numbers_of_every_size().view(-1, SIZE)
    count = len(x)
    batch = VarlenBatch(
        torch.tensor([0, count], dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
    )
    decoder = NativeDecoder(workspace(isa), [layer_of(ours(alpha_p, alpha_n).numbers)])
    angles = torch.zeros(count, SIZE // 2)
    found = decoder(x.clone(), [(angles.cos(), angles.sin())], torch.arange(count), batch)
    expected = x.double() + theirs(x, alpha_p, alpha_n)
    # e^x takes 2 roundings and one of x log2 e, which counts |x| times; the sums of the MLP and the stream some more.
    bound = 1e-6 * (x.double().abs() + expected.abs())
    assert ((found.double() - expected).abs() <= bound).all()


@needs_library
def test_native_layers_with_gates_have_no_such_activation() -> None:
    with pytest.raises(ConfigError, match="xielu"):
        layer_of(ours(0.2, -1.0).numbers, has_gate=True)
    with pytest.raises(ConfigError, match="xielu"):
        NativeDecoder(workspace(), [layer_of(torch.ones(3))])
