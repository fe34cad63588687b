"""The likeliest tokens in one native call, alone and after a product, against numpy."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from native_weights import every_level, library, needs_library, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.argmax import likeliest_tokens
from paged_sdk.kernels.native.linear import NativeLinear
from paged_sdk.kernels.native.packed import pack_dense

pytestmark = needs_library


@every_level
@pytest.mark.parametrize("cols", [1, 15, 16, 511, 512, 529, 3000])
@pytest.mark.parametrize(("num_rows", "num_threads"), [(1, 1), (200, 2)])
def test_the_first_of_the_largest(isa: str, cols: int, num_rows: int, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(cols)
    # Few different numbers, so that many are equal, and zeros of either sign among them.
    logits = torch.randint(-9, 1, (num_rows, cols), generator=generator) * torch.tensor(0.5)
    found = likeliest_tokens(library(isa), logits, num_threads=num_threads)
    assert found.tolist() == logits.numpy().argmax(axis=1).tolist()
    logits = torch.randn(num_rows, cols + 7, generator=generator)[:, 3 : 3 + cols]  # rows lie apart
    found = likeliest_tokens(library(isa), logits, num_threads=num_threads)
    assert found.tolist() == logits.numpy().argmax(axis=1).tolist()


@every_level
@pytest.mark.parametrize("cols", [7, 16, 1000])
def test_rows_without_a_likeliest(isa: str, cols: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for bad in (nan, -nan, inf):
        for place in {0, 5, cols // 2, cols - 1}:
            logits = torch.randn(3, cols, generator=generator)
            logits[1, place] = bad
            logits[2, (place + 1) % cols] = -inf
            expected = logits.numpy().argmax(axis=1).tolist()
            assert likeliest_tokens(library(isa), logits).tolist() == [expected[0], -1, expected[2]]
    logits = torch.full((2, cols), -inf)
    logits[1, cols - 1] = -1e30
    assert likeliest_tokens(library(isa), logits).tolist() == [-1, cols - 1]


def test_no_rows() -> None:
    assert likeliest_tokens(library(), torch.empty(0, 20)).shape == (0,)


def test_what_does_not_fit_is_refused() -> None:
    for wrong in (torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(4, 2).T):
        with pytest.raises(ConfigError, match="logits"):
            likeliest_tokens(library(), wrong)


@every_level
@pytest.mark.parametrize("num_rows", [0, 1, 5, 40])
def test_the_likeliest_of_a_product(isa: str, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    parts = [torch.randn(rows, 48, generator=generator) for rows in (1200, 19)]
    weights = [pack_dense(library(isa), [part], (len(part), 48), torch.float32) for part in parts]
    norm = torch.rand(48, generator=generator) + 0.5
    layer = NativeLinear(workspace(isa, 2), weights, norm_weight=norm, norm_eps=1e-5)
    x = torch.randn(num_rows, 48, generator=generator)
    x[2:3, 7] = nan
    outputs = layer(x)
    expected = outputs.numpy().argmax(axis=1).tolist()
    expected[2:3] = [-1] * len(expected[2:3])
    assert layer.likeliest(x).tolist() == expected
    assert torch.equal(layer(x).nan_to_num(), outputs.nan_to_num())  # which has nothing of the call before


def test_a_product_of_halves_has_no_likeliest() -> None:
    weight = pack_dense(library(), [torch.ones(16, 32)], (16, 32), torch.bfloat16)
    with pytest.raises(ConfigError, match=r"x\.dtype"):
        NativeLinear(workspace(), [weight]).likeliest(torch.ones(1, 32, dtype=torch.bfloat16))
