"""Embeddings in quantized blocks, repacked or not, equal those of the decoded matrix."""

from __future__ import annotations

import pytest
import torch

from native_weights import IQ4_NL, Q2_K, TYPES, random_matrix
from paged_sdk.kernels.gguf_blocks import BLOCK_FORMATS
from paged_sdk.kernels.repack import repack
from paged_sdk.kernels.triton_blocks import TRITON_BLOCK_FORMATS
from paged_sdk.quant.embedding import BlockEmbedding, DenseEmbedding, Embedding, TritonBlockEmbedding

VOCAB, HIDDEN = 50, 512


@pytest.mark.parametrize("tensor_type", [*TYPES, Q2_K, IQ4_NL], ids=lambda number: BLOCK_FORMATS[number].name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [None, 3072**0.5])  # 55.4256, but 55.5 in bfloat16
def test_rows_are_those_of_the_decoded_matrix(tensor_type: int, dtype: torch.dtype, scale: float | None) -> None:
    matrix = random_matrix(tensor_type, VOCAB, HIDDEN, torch.Generator().manual_seed(tensor_type))
    embeddings: list[Embedding] = [BlockEmbedding(matrix, dtype=dtype, scale=scale)]
    if tensor_type in TRITON_BLOCK_FORMATS:
        embeddings.append(TritonBlockEmbedding(repack(matrix), dtype=dtype, scale=scale))
    dense = DenseEmbedding(matrix.decoded(dtype), scale=scale)
    for token_ids in ([3], [7, 7, 0, VOCAB - 1], list(range(VOCAB))):
        expected = dense.forward(torch.tensor(token_ids))
        for embedding in embeddings:
            rows = embedding.forward(torch.tensor(token_ids))
            assert rows.dtype == dtype
            assert torch.equal(rows, expected)


def test_looking_up_leaves_the_blocks_alone() -> None:
    matrix = random_matrix(8, VOCAB, HIDDEN, torch.Generator().manual_seed(0))
    kept = matrix.blocks.clone()
    embedding = BlockEmbedding(matrix, dtype=torch.float32, scale=2.0)
    first = embedding.forward(torch.tensor([0, 1]))
    again = first.clone()
    first.add_(5)
    assert torch.equal(matrix.blocks, kept)
    assert torch.equal(embedding.forward(torch.tensor([0, 1])), again)
