"""Embeddings of dense and of quantized matrices."""

from __future__ import annotations

import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2TextScaledWordEmbedding

from paged_sdk.quant.embedding import DenseEmbedding


def test_the_scale_is_rounded_to_the_dtype_of_the_model() -> None:
    scale = 3072**0.5  # 55.4256, but 55.5 in bfloat16
    reference = Gemma2TextScaledWordEmbedding(16, 8, 0, embed_scale=scale).to(torch.bfloat16)
    ids = torch.arange(16)
    with torch.inference_mode():
        expected = reference(ids)
        assert torch.equal(DenseEmbedding(reference.weight.data, scale=scale).forward(ids), expected)


def test_looking_up_leaves_the_table_alone() -> None:
    table = torch.ones(4, 2)
    DenseEmbedding(table, scale=2.0).forward(torch.tensor([0, 1])).add_(5)
    assert torch.equal(table, torch.ones(4, 2))
