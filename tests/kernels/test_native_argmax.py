"""The likeliest tokens in one native call, against numpy."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from native_weights import every_level, library, needs_library
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.argmax import likeliest_tokens

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
