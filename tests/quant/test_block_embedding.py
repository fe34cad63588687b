"""Embeddings in quantized blocks, repacked or not, equal those of the decoded matrix."""

from __future__ import annotations

import pytest
import torch

from native_weights import IQ4_NL, IQ4_XS, TYPES, every_level, every_type, needs_library, random_matrix, workspace
from paged_sdk.kernels.native.packed import pack_gguf
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS
from paged_sdk.kernels.quantized.repack import repack
from paged_sdk.kernels.quantized.triton_blocks import TRITON_BLOCK_FORMATS
from paged_sdk.quant.embedding import BlockEmbedding, DenseEmbedding, Embedding, TritonBlockEmbedding
from paged_sdk.quant.form import Place
from paged_sdk.quant.forms.cpu_blocks import FORM
from paged_sdk.quant.native_block import PackedBlockEmbedding

VOCAB, HIDDEN = 50, 512


@pytest.mark.parametrize("tensor_type", [*TYPES, IQ4_XS, IQ4_NL], ids=lambda number: BLOCK_FORMATS[number].name)
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


@needs_library
@every_level
@every_type
def test_packed_rows_are_those_of_the_decoded_matrix(isa: str, tensor_type: int) -> None:
    """To the last bit, on every level and with a number of rows that is no multiple of a panel's."""
    matrix = random_matrix(tensor_type, VOCAB, HIDDEN, torch.Generator().manual_seed(tensor_type))
    for threads, dtype, scale in ((1, torch.float32, None), (2, torch.bfloat16, 3072**0.5)):
        space = workspace(isa, threads)
        packed = pack_gguf(space.library, matrix.blocks, tensor_type, VOCAB, HIDDEN, num_threads=1)
        embedding = PackedBlockEmbedding(space, packed, dtype=dtype, scale=scale)
        dense = DenseEmbedding(matrix.decoded(dtype), scale=scale)
        for token_ids in ([3], [7, 7, 0, VOCAB - 1], list(range(VOCAB)), []):
            rows = embedding.forward(torch.tensor(token_ids, dtype=torch.int64))
            assert torch.equal(rows, dense.forward(torch.tensor(token_ids, dtype=torch.int64)))
            exact = matrix.decoded()[token_ids] * embedding.scale
            assert torch.equal(embedding.in_float32(torch.tensor(token_ids, dtype=torch.int64)), exact)


@needs_library
def test_packed_rows_that_there_are_not() -> None:
    space = workspace()
    matrix = random_matrix(8, VOCAB, HIDDEN, torch.Generator().manual_seed(0))
    packed = pack_gguf(space.library, matrix.blocks, 8, VOCAB, HIDDEN, num_threads=1)
    embedding = PackedBlockEmbedding(space, packed, dtype=torch.float32)
    for token_id in (VOCAB, -1, 2**40):
        with pytest.raises(IndexError, match=r"not all below 50"):
            embedding.forward(torch.tensor([0, token_id]))


@needs_library
def test_a_tied_head_shares_the_embeddings_memory() -> None:
    place = Place(device=torch.device("cpu"), dtype=torch.bfloat16, workspace=workspace(), one_form=False)
    matrix = random_matrix(8, VOCAB, HIDDEN, torch.Generator().manual_seed(0))
    embedding = FORM.embedding(matrix, place, scale=None)
    assert isinstance(embedding, PackedBlockEmbedding)
    head = FORM.tied_head(embedding, place)
    assert head is not None
    assert head.native_weights is not None
    assert head.native_weights.few == head.native_weights.many == (embedding.weight,)
