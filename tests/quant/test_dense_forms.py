"""Dense matrices as the policy packs them for the native kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from native_weights import UNIT_ROUNDOFF, needs_library, random_matrix, workspace
from paged_sdk.config.isq import IsqType
from paged_sdk.kernels.native.packed import DENSE_TYPES
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix
from paged_sdk.quant.dense import DenseLinear
from paged_sdk.quant.dense_experts import DenseExperts
from paged_sdk.quant.embedding import DenseEmbedding
from paged_sdk.quant.native_dense import NativeDenseLinear, PackedDenseMatrix, PackedEmbedding
from paged_sdk.quant.policy import ExpertStack, NamedMatrix, Role, WeightPolicy

pytestmark = needs_library

CPU = torch.device("cpu")


def random(rows: int, cols: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def named(weight: torch.Tensor) -> NamedMatrix:
    return NamedMatrix("w", DenseMatrix(weight))


def policy(isq: IsqType | None = None) -> WeightPolicy:
    return WeightPolicy(keep_blocks=True, workspace=workspace(), isq=isq)


@pytest.mark.parametrize("dtype", list(DENSE_TYPES), ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_matrices_of_one_input_with_their_biases(dtype: torch.dtype, stored: torch.dtype) -> None:
    """More rows than are decoded at once, of a dtype that may not be the model's."""
    weights = [random(1100, 48).to(stored), random(20, 48, seed=1).to(stored)]
    bias = torch.randn(20, generator=torch.Generator().manual_seed(2)).to(dtype)
    linear = policy().linear(list(map(named, weights)), [None, bias], Role.LINEAR, dtype=dtype, device=CPU)
    assert isinstance(linear, NativeDenseLinear)
    assert (linear.in_features, linear.out_features) == (48, 1120)
    assert linear.num_bytes == (1104 + 32) * 48 * dtype.itemsize
    x = random(5, 48, seed=3).to(dtype)
    expected = x.double() @ torch.cat(weights).to(dtype).double().T
    expected[:, 1100:] += bias.double()
    assert linear.forward(x, None).dtype == dtype
    # Sums of 48 products and a bias in float32, whatever their order; then the result is rounded to the model's dtype.
    magnitudes = x.double().abs() @ torch.cat(weights).to(dtype).double().abs().T
    magnitudes[:, 1100:] += bias.double().abs()
    bound = 50 * UNIT_ROUNDOFF * magnitudes
    bound += (expected.abs() + bound) * torch.finfo(dtype).eps / 2
    assert ((linear.forward(x, None).double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", list(DENSE_TYPES), ids=str)
@pytest.mark.parametrize("scale", [None, 3.3])
def test_embeddings_are_rows_of_the_packed_matrix(dtype: torch.dtype, scale: float | None) -> None:
    weight = random(50, 32).to(dtype)
    embedding = policy().embedding(named(weight), scale=scale, dtype=dtype, device=CPU)
    assert isinstance(embedding, PackedEmbedding)
    ids = torch.tensor([49, 0, 17, 17])
    expected = DenseEmbedding(weight, scale=scale).forward(ids)
    assert torch.equal(embedding.forward(ids), expected)
    assert embedding.forward(ids[:0]).shape == (0, 32)


def test_a_tied_head_shares_its_memory_unless_it_is_quantized() -> None:
    weight = random(64, 256).bfloat16()
    embedding = policy().embedding(named(weight), scale=None, dtype=torch.bfloat16, device=CPU)
    head = policy().tied_head("lm_head.weight", embedding, dtype=torch.bfloat16, device=CPU)
    assert isinstance(embedding, PackedEmbedding)
    assert isinstance(head, NativeDenseLinear)
    assert head.native_weights.few == (embedding.weight,)
    quantized = policy(IsqType.Q4K).tied_head("lm_head.weight", embedding, dtype=torch.bfloat16, device=CPU)
    assert quantized.num_bytes < head.num_bytes / 2
    x = random(2, 256, seed=1)
    torch.testing.assert_close(quantized.forward(x, None), head.forward(x, None), rtol=0.1, atol=1.0)


def test_a_packed_matrix_gives_its_numbers_back() -> None:
    weight = random(40, 32).half()
    embedding = policy().embedding(named(weight), scale=None, dtype=torch.float16, device=CPU)
    stored = embedding.stored
    assert isinstance(stored, PackedDenseMatrix)
    assert (stored.shape, stored.num_bytes, stored.is_dense) == ((40, 32), 48 * 32 * 2, True)
    assert torch.equal(stored.decoded(torch.float16), weight)
    assert torch.equal(stored.rows(slice(3, 21)).decoded(torch.float16), weight[3:21])
    assert torch.equal(stored.cols(slice(5, 9)).decoded(torch.float16), weight[:, 5:9])
    assert stored.to(CPU) is stored
    assert stored.to(torch.device("meta")).decoded().is_meta


def test_what_stays_with_torch() -> None:
    """float64, rows that are no whole vectors, and everything where there are no kernels."""
    for weight, dtype, chosen in (
        (random(32, 32), torch.float64, policy()),
        (random(32, 40), torch.float32, policy()),
        (random(32, 32), torch.float32, WeightPolicy()),
    ):
        assert isinstance(chosen.linear([named(weight)], [None], Role.LINEAR, dtype=dtype, device=CPU), DenseLinear)
        embedding = chosen.embedding(named(weight), scale=None, dtype=dtype, device=CPU)
        assert isinstance(embedding, DenseEmbedding)


@pytest.mark.parametrize("inner", [64, 48])
def test_experts(inner: int) -> None:
    """Natively where they are whole units of 32 rows, one of them decoded from blocks."""
    experts = [[named(random(inner, 32, seed=2 * e)), named(random(inner, 32, seed=2 * e + 1))] for e in range(3)]
    experts[1][0] = NamedMatrix("w", random_matrix(8, inner, 32, torch.Generator().manual_seed(9)))
    downs = [[named(random(32, inner, seed=10 + e))] for e in range(3)]
    chosen = [
        each.experts(ExpertStack(matrices=experts), ExpertStack(matrices=downs), dtype=torch.float32, device=CPU)
        for each in (WeightPolicy(workspace=workspace()), WeightPolicy())
    ]
    assert isinstance(chosen[0], DenseExperts) == (inner == 48)
    assert isinstance(chosen[1], DenseExperts)
    x, weights, ids = random(4, 32, seed=20), torch.rand(4, 2), torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]])

    # In float64, of the very numbers that are packed, and the magnitudes of all that is added up.
    def product(of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        out = torch.zeros(4, 32, dtype=torch.float64)
        for token, (token_weights, token_ids) in enumerate(zip(weights, ids.tolist(), strict=True)):
            for weight, expert in zip(token_weights, token_ids, strict=True):
                gate, up, down = (of(each.matrix.decoded().double()) for each in (*experts[expert], *downs[expert]))
                row = of(x[token].double())
                gated, upped = gate @ row, up @ row
                out[token] += weight.double() * (down @ of(torch.nn.functional.silu(gated) * upped))
        return out

    # Each product of n terms rounds at most n times, and SiLU's slope is at most 1.1, its value at least half of a
    # magnitude: 32 for gate and for up, ten for the activation, the inner size for down, one for each expert's share.
    bound = ((2 * 1.1 + 1) * 32 + 10 + inner + 2) * UNIT_ROUNDOFF * product(torch.abs)
    for each in chosen:
        assert ((each.forward(x, weights, ids).double() - product(torch.clone)).abs() <= bound).all()
