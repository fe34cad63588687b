"""Rotary embeddings against transformers', kind by kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from paged_sdk.config.rope import RopeConfig
from paged_sdk.layers.rotary import RotaryEmbedding
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.rope_fields import read_rope, rope_section

HEAD_DIM = 32
MAX_POSITION = 1024
CPU = torch.device("cpu")

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn, untruncated": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "yarn, stated attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.5,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1 + 0.1 * i for i in range(HEAD_DIM // 2)],
        "long_factor": [1 + 2.0 * i for i in range(HEAD_DIM // 2)],
        "original_max_position_embeddings": 256,
    },
}


def llama_config(parameters: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": 20_000.0, **parameters},
    )


def read(config: PreTrainedConfig) -> RopeConfig:
    fields = ConfigFields(config.to_dict())
    return read_rope(fields, rope_section(fields), head_dim=HEAD_DIM, default_theta=10_000.0)


@pytest.mark.parametrize("kind", KINDS)
def test_cos_and_sin_are_those_of_transformers(kind: str) -> None:
    config = llama_config(KINDS[kind])
    reference = LlamaRotaryEmbedding(config)
    for length in (256, MAX_POSITION):  # within and beyond the trained context, which only longrope minds
        positions = torch.arange(length)
        cos, sin = reference(torch.empty(0), positions[None])
        is_long = torch.full((length,), length > 256)
        rotation = RotaryEmbedding(read(config), device=CPU).at(positions, is_long)
        ours = torch.cat((rotation.cos, rotation.cos), -1)[:, 0, 0], rotation.sin[:, 0, 1]
        # Up to here each side has rounded: the exponent of theta, which counts ln(theta) = 9.9 times, the power itself
        # (by two ulps, as processors differ), its reciprocal, three operations of a scaling, and the angle, which is at
        # most the position. Then cos or sin, up to 1.5 here, and its scaling.
        bound = 2 * (9.9 + 4 + 1 + 3 + 1) * positions[:, None] * 2**-24 + 4 * 1.5 * 2**-23
        assert ((ours[0] - cos[0]).abs() <= bound).all()
        assert ((ours[1] - sin[0, :, : HEAD_DIM // 2]).abs() <= bound).all()


def test_longrope_within_and_beyond_the_trained_context_differ() -> None:
    rope = RotaryEmbedding(read(llama_config(KINDS["longrope"])), device=CPU)
    positions = torch.tensor([200, 200, 255, 256])
    mixed = rope.at(positions, torch.tensor([False, True, False, True])).cos
    assert (mixed[0] - mixed[1]).abs().max() > 0.1
    # Where the text of each token is not known, its own position says how long it is at least.
    assert torch.equal(rope.at(positions).cos, mixed[[0, 0, 2, 3]])


def test_divisors_replace_the_formula() -> None:
    """GGUF files hold llama3's scaling as divisors."""
    llama3 = read(llama_config(KINDS["llama3"]))
    plain = RopeConfig(rotary_dim=HEAD_DIM, theta=llama3.theta)
    at = torch.tensor([1])
    frequency = [
        torch.atan2(rotation.sin[0, 0, 1], rotation.cos[0, 0, 0])
        for rotation in (RotaryEmbedding(each, device=CPU).at(at) for each in (plain, llama3))
    ]
    divisors = tuple((frequency[0] / frequency[1]).tolist())
    divided = RopeConfig(rotary_dim=HEAD_DIM, theta=llama3.theta, inv_freq_divisors=divisors)
    positions = torch.arange(256)
    expected, ours = (RotaryEmbedding(each, device=CPU).at(positions) for each in (llama3, divided))
    torch.testing.assert_close(ours.cos, expected.cos, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rotates_a_view_in_place(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = llama_config(KINDS["default"])
    positions = torch.tensor([0, 7, 900])
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0), positions[None])
    heads = torch.randn(3, 6, HEAD_DIM, dtype=dtype)
    kept = heads.clone()
    RotaryEmbedding(read(config), device=CPU).at(positions).rotate_(heads[:, :5])
    query, _ = apply_rotary_pos_emb(kept[None].double().transpose(1, 2), kept[None].transpose(1, 2), cos, sin)
    expected = query[0].transpose(0, 1)
    torch.testing.assert_close(
        heads[:, :5].double(), expected[:, :5], rtol=0, atol={torch.bfloat16: 2e-2}.get(dtype, 2e-6)
    )
    assert torch.equal(heads[:, 5], kept[:, 5])


def test_partial_rotation_leaves_the_rest_of_the_head() -> None:
    heads = torch.randn(4, 2, HEAD_DIM)
    kept = heads.clone()
    rope = RotaryEmbedding(RopeConfig(rotary_dim=8), device=CPU)
    rope.at(torch.arange(4)).rotate_(heads)
    assert torch.equal(heads[..., 8:], kept[..., 8:])
    assert not torch.equal(heads[1:, :, :8], kept[1:, :, :8])
