"""Whose a tensor is says its name."""

from __future__ import annotations

import pytest

from paged_sdk.models.bloom import FAMILY as BLOOM
from paged_sdk.models.tensor_names import TensorNames


@pytest.mark.parametrize(
    ("names", "own"),
    [
        (TensorNames(), ["model.embed_tokens.weight", "model.layers.3.mlp.up_proj.bias", "model.norm.weight"]),
        (TensorNames(body="", head="head"), ["embed_tokens.weight", "layers.0.input_layernorm.weight", "head.weight"]),
        (
            BLOOM.names[0],
            ["transformer.word_embeddings.weight", "transformer.h.0.mlp.weight", "transformer.ln_f.bias"],
        ),
        (BLOOM.names[0], ["transformer.word_embeddings_layernorm.weight", "lm_head.weight"]),
    ],
)
def test_tensors_of_the_decoder_are_told_from_others(names: TensorNames, own: list[str]) -> None:
    assert all(names.is_decoders(name) for name in own)
    others = ["model.visual.layers.0.norm1.weight", "vision_tower.embed_tokens.weight", "multi_modal_projector.weight"]
    assert not any(names.is_decoders(name) for name in others)
