"""The last norm, the output projection and the largest logit in one call, against one call for each."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_decoding import CPU
from torch import Tensor

from native_weights import library, needs_library, workspace
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.isq import IsqType
from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.kernels.native.argmax import likeliest_tokens
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.models.loading import load_model
from paged_sdk.quant.native_block import FEW_ROWS
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.weights.checkpoint import open_checkpoint
from tiny import make_other_checkpoint

pytestmark = needs_library

NO_ADAPTER = AdaptedRows(loras=(), tokens=(), numbers=torch.zeros(0, dtype=torch.int32))


def fused(directory: Path, family: str, **overrides: Any) -> tuple[DecoderModel, FusedDecoderModel]:
    checkpoint = open_checkpoint(make_other_checkpoint(family, directory, **overrides))
    policy = WeightPolicy(isq=IsqType.Q8_0, workspace=workspace())
    with closing(checkpoint.source) as source:
        model = load_model(checkpoint.config, source, dtype=torch.float32, placement=CPU, policy=policy)
    settings = PoolSettings(block_size=16, dtype=model.dtype, device=CPU)
    return model, FusedDecoderModel(model, NativePagedBackend(model.config, settings, 4, workspace=workspace()))


def random_hidden(model: DecoderModel, num_rows: int) -> Tensor:
    return torch.randn(num_rows, model.config.hidden_size, generator=torch.Generator().manual_seed(num_rows))


@pytest.mark.parametrize("num_rows", [1, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("gemma3_text", {}),  # its norms' weights have an offset
        ("gemma2", {}),  # caps its logits
        ("granite", {}),  # scales its logits and its residual stream
        ("starcoder2", {}),  # has a layer norm
    ],
)
def test_one_call_gives_what_three_do(family: str, overrides: dict[str, Any], num_rows: int, tmp_path: Path) -> None:
    model, whole = fused(tmp_path, family, **overrides)
    hidden = random_hidden(model, num_rows)
    expected = model.logits(whole.normed(hidden))
    assert torch.equal(whole.logits(hidden), expected)
    assert torch.equal(whole.likeliest(hidden), likeliest_tokens(library(), expected))


def test_rows_that_are_not_finite_have_no_likeliest_token(tmp_path: Path) -> None:
    model, whole = fused(tmp_path, "llama")
    hidden = random_hidden(model, 3)
    clean = whole.likeliest(hidden).tolist()
    hidden[1, 5] = float("nan")
    assert whole.likeliest(hidden).tolist() == [clean[0], -1, clean[2]]


def test_adapters_of_the_output_projection_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, whole = fused(tmp_path, "llama")
    hidden = random_hidden(model, 2)
    bias = torch.zeros(model.config.vocab_size)
    bias[7] = 1e6
    logits = DecoderModel.logits

    def adapted_logits(self: DecoderModel, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        return logits(self, hidden) + (0 if adapted is None else bias)

    monkeypatch.setattr(DecoderModel, "logits", adapted_logits)
    assert whole.likeliest(hidden, NO_ADAPTER).tolist() == [7, 7]
    assert 7 not in whole.likeliest(hidden).tolist()
