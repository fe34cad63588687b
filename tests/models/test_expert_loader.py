"""Checkpoints with all experts of a layer in two tensors, whose matrices may be transposed, and square."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from odd_configs import reference_of
from reference_decoding import CPU, DictSource, logits, paged, random_prompt

from paged_sdk.models.loading import load_model

_SHAPE: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("size", [32, 64, 48])  # gates with ups are square, the last matrices are, none is
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_transposed_experts(family: str, size: int, is_turned: bool, tmp_path: Path) -> None:
    """transformers has those of gpt-oss transposed, and those of Qwen3 not; released checkpoints have either."""
    config = _SHAPE | {"model_type": family, "intermediate_size": size, "moe_intermediate_size": size}
    reference, prompt = reference_of(config, tmp_path), random_prompt(20)
    tensors = {
        name: tensor.mT if is_turned and name.endswith(("gate_up_proj", "down_proj")) else tensor
        for name, tensor in reference.state_dict().items()
    }
    assert sum(name.endswith("gate_up_proj") for name in tensors) == 2
    model = load_model(reference.config.to_dict(), DictSource(tensors), dtype=torch.float32, placement=CPU)
    (scores,) = logits(model, paged(16)(model), [(prompt, 0, [0, 1])])
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert (scores - expected).abs().max() < 1e-4 * expected.abs().max()
