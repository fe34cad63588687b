"""The table of quantization types, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import torch
from benchmarks.inside import open_engine
from benchmarks.isq_table import measure_type

import tiny
from native_weights import needs_library
from paged_sdk import IsqType, TextModelBuilder


@needs_library
def test_more_bits_take_more_and_are_nearer(tmp_path: Path) -> None:
    path = tiny.make_checkpoint("llama", tmp_path, hidden_size=256, intermediate_size=512, head_dim=64)
    builder = TextModelBuilder(path).with_force_cpu().with_num_threads(1).with_dtype("float32")
    token_ids = list(range(5, 40))
    expected = open_engine(builder).logits(token_ids, chunk=64)
    assert isinstance(expected, torch.Tensor)
    few, many = (
        measure_type(builder.with_isq(isq), token_ids, expected, output=4) for isq in (IsqType.Q2K, IsqType.Q6K)
    )
    assert (few.bits, many.bits) == (2.625, 6.5625)
    assert 0 < many.mean_kl < few.mean_kl
    assert few.tokens_per_second > 0
