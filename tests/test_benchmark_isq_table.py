"""The table of quantization types, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import torch
from benchmarks.inside import open_engine
from benchmarks.isq_row import RowSettings, main, measure_type

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
    few = measure_type(builder.with_isq(IsqType.Q2K), token_ids, expected)
    assert few.bits == 2.625
    assert (few.tokens_per_second, few.errors) == (None, None)
    torch.save({"token_ids": token_ids, "logits": expected}, tmp_path / "expected.pt")
    many = main(
        RowSettings(
            path=str(path), isq="Q6K", expected=str(tmp_path / "expected.pt"), num_threads=1, output=4, rounds=1
        )
    )
    assert many.bits == 6.5625
    assert 0 < many.mean_kl < few.mean_kl
    assert many.tokens_per_second is not None
    assert many.times_dense is not None
    assert min(many.tokens_per_second, many.times_dense) > 0
    assert many.errors is not None
    assert 0.005 < many.errors.relative < 0.03
    if many.loading is not None:
        # What this process held before it may be given back meanwhile, so what is held now may be less than nothing.
        assert 0 < many.loading.peak_mib >= many.loading.held_mib
