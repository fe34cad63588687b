"""The basis in which keys and values are stored: attention over them is the same in any."""

from __future__ import annotations

import math

import pytest
import torch

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.hadamard import hadamard_transform
from paged_sdk.kernels.kv_basis import KvBasis


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sylvester(size: int) -> torch.Tensor:
    """Element i, j is -1 to the number of ones that i and j have in common in binary."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64) / math.sqrt(size)


@pytest.mark.parametrize(("cols", "block"), [(32, 32), (64, 64), (96, 32), (256, 256), (512, 256)])
def test_the_transform_is_sylvesters(cols: int, block: int) -> None:
    x = random(3, 2, cols).double()
    expected = torch.unflatten(x, -1, (-1, block)) @ sylvester(block)
    torch.testing.assert_close(hadamard_transform(x), expected.flatten(-2), rtol=0, atol=1e-13)
    torch.testing.assert_close(hadamard_transform(hadamard_transform(x)), x, rtol=0, atol=1e-13)


def test_a_vector_is_transformed_alone() -> None:
    x = random(50, 3, 64)
    whole = hadamard_transform(x)
    for part in (slice(0, 1), slice(7, 31)):
        assert torch.equal(hadamard_transform(x[part]), whole[part])


def test_scores_stay_the_same() -> None:
    """Query heads 0 to 2 read KV head 0, the others KV head 1."""
    query, key = random(7, 6, 64).double(), random(9, 2, 64, seed=1).double()
    basis = KvBasis(random(2, 64, seed=2).exp())
    scores = [
        torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(3, 1))
        for queries, keys in ((query, key), (basis.queries(query), basis.keys(key)))
    ]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-11)
    torch.testing.assert_close(basis.outputs(basis.values(key)), key, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_what_is_stored_is_not_rounded_before(dtype: torch.dtype) -> None:
    """Queries and outputs have the model's dtype; keys and values are at least float32."""
    x, basis = random(4, 2, 32).to(dtype), KvBasis(torch.full((2, 32), 1.1))
    assert basis.queries(x).dtype == basis.outputs(x).dtype == dtype
    wide = torch.promote_types(dtype, torch.float32)
    assert basis.keys(x).dtype == basis.values(x).dtype == wide
    assert torch.equal(basis.keys(x), hadamard_transform(x.to(wide) * basis.factors))


@pytest.mark.parametrize(
    "factors", [torch.ones(2, 32).double(), torch.ones(32), torch.ones(32, 2).mT], ids=["dtype", "shape", "strides"]
)
def test_factors_that_are_refused(factors: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="factors"):
        KvBasis(factors)


def test_a_basis_is_of_the_pages_heads() -> None:
    pages = torch.empty(2, 8, 2, 32)
    assert LayerCache(pages, pages, basis=KvBasis(torch.ones(2, 32))).basis is not None
    with pytest.raises(ConfigError, match="factors"):
        LayerCache(pages, pages, basis=KvBasis(torch.ones(1, 32)))
