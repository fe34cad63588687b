"""Tensors that are encoded piece by piece, beside their whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from paged_sdk.build.export import gguf_encoding
from paged_sdk.build.export.gguf_encoding import tensor_encoder
from paged_sdk.errors import CheckpointError
from paged_sdk.kernels.quantized.gguf_blocks import tensor_type_of
from paged_sdk.kernels.quantized.quantize import quantize_blocks_reference
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix
from paged_sdk.weights.gguf.export_matrix import GgufMatrix

Q4_0 = tensor_type_of("Q4_0")


def weights(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 7, 100])
def test_pieces_belong_to_one_matrix_each(num_rows: int) -> None:
    values = weights(3, 5, 32)
    for parts in ([values.view(15, 32)], list(values)):  # as GGUF stacks experts, and as checkpoints have them
        pieces = list(GgufMatrix(shape=(3, 5, 32), matrices=[DenseMatrix(part) for part in parts]).pieces(num_rows))
        assert sorted({number for number, _ in pieces}) == [0, 1, 2]
        for number, expected in enumerate(values):
            own = [decode() for place, decode in pieces if place == number]
            assert torch.equal(torch.cat(own), expected)
            assert max(map(len, own)) <= num_rows


@pytest.mark.parametrize("num_rows", [1, 8, 11, 100])
def test_pieces_of_permuted_rows_are_whole_heads(num_rows: int) -> None:
    matrix = GgufMatrix(shape=(24, 16), matrices=[DenseMatrix(weights(24, 16))], permuted_heads=3)
    (whole,) = [decode() for _, decode in matrix.pieces(24)]
    assert torch.equal(torch.cat([decode() for _, decode in matrix.pieces(num_rows)]), whole)
    assert not torch.equal(whole, weights(24, 16))


def test_bytes_come_in_their_order_and_each_matrix_has_its_importance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_encoding, "_ELEMENTS_AT_ONCE", 64)
    values, importance = weights(3, 40, 64), weights(3, 64).exp()
    matrix = GgufMatrix(shape=(3, 40, 64), matrices=[DenseMatrix(values.view(120, 64))])
    with tensor_encoder() as encoder:
        found = list(encoder.encoded("blk.0.ffn_up_exps.weight", Q4_0, matrix, importance))
    assert len(found) == 120
    expected = [quantize_blocks_reference(*pair) for pair in zip(values, [Q4_0] * 3, importance, strict=True)]
    assert np.array_equal(np.concatenate(found), torch.cat(expected).numpy().reshape(-1))


def test_what_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_encoding, "_ELEMENTS_AT_ONCE", 64)
    values = weights(40, 64)
    values[30, 3] = torch.nan
    matrix = GgufMatrix(shape=(40, 64), matrices=[DenseMatrix(values)])
    for name in ("Q4_0", "F16", "IQ4_NL"):
        with tensor_encoder() as encoder, pytest.raises(CheckpointError, match=r"tensor 'blk\.0\.attn_q\.weight': "):
            list(encoder.encoded("blk.0.attn_q.weight", tensor_type_of(name), matrix))
