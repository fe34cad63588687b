"""An encoder computes with this package's matrices and attention what torch computes with its own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paged_sdk.config.isq import IsqType
from paged_sdk.kernels.attention_inputs import Precision
from paged_sdk.kernels.native.library import Workspace, load
from paged_sdk.quant.native_block import NativeBlockLinear
from paged_sdk.quant.native_dense import NativeDenseLinear
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.vision.own_products import OwnProducts, take_matrices
from paged_sdk.vision.whole_attention import whole_attention

library = load()
pytestmark = pytest.mark.skipif(library is None, reason="the native kernels are not built")
CPU = torch.device("cpu")


@pytest.fixture
def workspace() -> Workspace:
    assert library is not None
    return Workspace(library, num_threads=2)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Conv2d(3, 32, 7, stride=7)
        self.deep = nn.Conv3d(3, 32, (2, 7, 7), stride=(2, 7, 7), bias=False, padding="valid")
        self.overlapping = nn.Conv2d(32, 32, 3, padding=1)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32, bias=False)
        self.odd = nn.Linear(33, 5)

    def forward(self, picture: Tensor, frames: Tensor) -> Tensor:
        flat = self.overlapping(self.flat(picture)).flatten(2).mT
        rows = torch.cat([flat.flatten(0, 1), self.deep(frames).flatten(1)])
        rows = rows + self.down(F.gelu(self.up(rows)))
        made: Tensor = self.odd(F.pad(rows, (0, 1)))
        return made


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 30, 16).to(dtype), torch.randn(5, 3, 2, 7, 7).to(dtype)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices(dtype: torch.dtype, workspace: Workspace) -> None:
    torch.manual_seed(0)
    encoder = Encoder().to(dtype).requires_grad_(False)
    given = inputs(dtype)
    want = encoder.float()(*(each.float() for each in given))
    by_torch = encoder.to(dtype)(*given)
    rules: list[Any] = [(re.compile(r"^vision\.fc1"), IsqType.Q8_0)]
    for policy in (WeightPolicy(workspace=workspace), WeightPolicy(workspace=workspace, isq_by_name=rules)):
        model = Encoder().to(dtype).requires_grad_(False)
        model.load_state_dict(encoder.state_dict())
        names = {model.up.weight.data_ptr(): "vision.fc1.weight"}
        own = take_matrices(model, policy, names, dtype=dtype, device=CPU)
        kinds = [type(each.linear) for each in own.values()]
        assert kinds.count(NativeBlockLinear) == len(policy.isq_by_name)
        assert len(kinds) == 5
        assert kinds.count(NativeDenseLinear) == 4 - len(policy.isq_by_name)  # no kernel takes 33 columns
        assert model.flat.weight.isnan().all()
        assert model.flat.weight.shape == (32, 3, 7, 7)
        assert model.flat.weight.untyped_storage().nbytes() < 8
        with OwnProducts(own, workspace):
            got = model(*given)
        assert got.dtype is dtype
        most = 0.02 if policy.isq_by_name else max(1.5 * relative(by_torch, want), 1e-6)
        assert relative(got, want) < most
        assert model(*given).isnan().any()  # without the mode nobody computes unnoticed


def test_arguments_by_name_and_other_biases(workspace: Workspace) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(32, 48), "patches": nn.Conv2d(3, 32, 7, stride=7)}).requires_grad_(False)
    up, patches = model["up"], model["patches"]
    assert isinstance(up, nn.Linear)
    assert isinstance(patches, nn.Conv2d)
    x, picture, other = torch.randn(5, 32), torch.randn(2, 3, 14, 21), torch.randn(48)

    def run() -> list[Tensor]:
        return [
            F.linear(input=x, weight=up.weight, bias=up.bias),
            F.linear(x, weight=up.weight),
            F.linear(x, up.weight, other),
            F.conv2d(picture, weight=patches.weight, bias=patches.bias, stride=7),
            F.conv2d(picture, patches.weight, None, 7),
        ]

    want = run()
    own = take_matrices(model, WeightPolicy(workspace=workspace), {}, dtype=torch.float32, device=CPU)
    with OwnProducts(own, workspace):
        got = run()
    for some, others in zip(got, want, strict=True):
        assert relative(some, others) < 1e-6


@pytest.mark.parametrize("name", ["sdpa", "masked", "causal", "float32"])
def test_attention_is_taken_over_where_all_see_all(
    name: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def count(*args: Any, **kwargs: Any) -> Tensor:
        taken.append(1)
        return whole_attention(*args, **kwargs)

    monkeypatch.setattr("paged_sdk.vision.own_products.whole_attention", count)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 20, 24, dtype=torch.float32 if name == "float32" else torch.bfloat16)
    mask = torch.rand(20, 20) < 0.5
    kinds: dict[str, list[dict[str, Any]]] = {
        "sdpa": [
            {},
            {"attn_mask": torch.ones(20, 20, dtype=torch.bool)},
            {"attn_mask": torch.zeros(20, 20).bfloat16()},
        ],
        "masked": [{"attn_mask": mask}, {"attn_mask": torch.zeros(20, 20).masked_fill(mask, -1e9).bfloat16()}],
        "causal": [{"is_causal": True}],
        "float32": [{}],
    }
    for options in kinds[name]:
        want = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), **_wide(options))
        with OwnProducts({}, workspace):
            got = F.scaled_dot_product_attention(query, key, value, **options)
        assert relative(got, want) < 0.01
    assert library is not None
    assert len(taken) == (3 if name == "sdpa" and library.multiplies_pairs else 0)


def _wide(options: dict[str, Any]) -> dict[str, Any]:
    mask = options.get("attn_mask")
    return options if mask is None or mask.dtype is torch.bool else {"attn_mask": mask.float()}


@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 3, 20, 24), (1, 2, 513, 80), (3, 1, 130, 72)])
def test_whole_attention(shape: tuple[int, int, int, int], workspace: Workspace) -> None:
    torch.manual_seed(0)
    num_images, num_heads, num_rows, head_dim = shape
    # As encoders have them: heads of a row lie side by side.
    tensors = torch.randn(3, num_images, num_rows, num_heads, head_dim).bfloat16().transpose(2, 3)
    query, key, value = tensors
    want = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), scale=0.3)
    for precision in (Precision.BFLOAT16, Precision.FLOAT32):
        got = whole_attention(workspace, query, key, value, scale=0.3, precision=precision)
        assert got.shape == shape
        assert relative(got, want) < 0.01
