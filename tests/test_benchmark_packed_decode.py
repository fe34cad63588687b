"""The checkpoints whose speed is measured: they load as what they say they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.inside import open_engine
from benchmarks.packed_decode import write_packed

import tiny
from native_weights import needs_library
from paged_sdk import TextModelBuilder


@needs_library
@pytest.mark.parametrize("form", ["gptq", "gptq-order", "awq"])
def test_random_checkpoints_are_multiplied_at_four_bits(form: str, tmp_path: Path) -> None:
    dense = tiny.make_checkpoint("llama", tmp_path / "dense", hidden_size=256, intermediate_size=512, head_dim=64)
    write_packed(form, dense, tmp_path / "packed")
    engine = open_engine(TextModelBuilder(tmp_path / "packed").with_force_cpu().with_num_threads(1))
    assert 4.2 < engine.bits_per_weight < 4.6
    logits = engine.logits(list(range(5, 15)), chunk=64)
    assert logits.isfinite().all()
    assert logits.std() > 0
