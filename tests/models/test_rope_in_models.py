"""Models with each kind of rotary scaling against transformers, config forms old and new."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_decoding import greedy, logits, ours, paged, random_prompt, reference_greedy

from tiny import build_model

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0],
}
TRAINED = 64


@pytest.mark.parametrize("kind", KINDS)
def test_llama(kind: str) -> None:
    reference: Any = build_model("llama", rope_parameters={"rope_theta": 5000.0, **KINDS[kind]})
    model = ours(reference)
    prompt = random_prompt(150)
    with torch.inference_mode():
        scores = reference(torch.tensor([prompt])).logits[0]
    (own,) = logits(model, paged(16)(model), [(prompt, 0, list(range(32)))])
    assert (own - scores).abs().max() < 1e-4 * scores.abs().max()
    plain = ours(build_model("llama"))
    (unscaled,) = logits(plain, paged(16)(plain), [(prompt, 0, list(range(32)))])
    assert (unscaled - scores).abs().max() > 0.01 * scores.abs().max()


@pytest.mark.parametrize("length", [40, 100])
def test_longrope_within_the_trained_context_and_beyond(length: int) -> None:
    """What happens when a text outgrows the trained context is in ``tests/test_longrope.py``."""
    reference: Any = build_model(
        "phi3", rope_parameters=dict(LONGROPE), original_max_position_embeddings=TRAINED, max_position_embeddings=512
    )
    model = ours(reference)
    prompt = random_prompt(length)
    assert greedy(model, paged(16), prompt, 10) == reference_greedy(reference, prompt, 10)


def test_partial_rotation() -> None:
    reference: Any = build_model("phi3", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})
    prompt = random_prompt(70)
    assert greedy(ours(reference), paged(16), prompt, 10) == reference_greedy(reference, prompt, 10)


def test_gemma3_scales_its_full_layers_only() -> None:
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    reference: Any = build_model("gemma3_text", rope_parameters=nested)
    prompt = random_prompt(70)
    assert greedy(ours(reference), paged(16), prompt, 10) == reference_greedy(reference, prompt, 10)
