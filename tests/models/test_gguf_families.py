"""GGUF files of families that differ from llama in a few keys are the models that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import pytest
import torch
from attrs import evolve
from odd_configs import reference_of
from reference_decoding import CPU, logits, paged, random_prompt

import tiny
from paged_sdk.errors import UnsupportedArchitectureError
from paged_sdk.models.family import read_config
from paged_sdk.models.loading import load_model
from paged_sdk.weights import write_gguf
from paged_sdk.weights.gguf_source import GgufSource

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": tiny.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
}
_TIED: Final = {"tie_word_embeddings": True}
# By GGUF's architecture: the config that makes the model, and the keys that only this architecture has.
FAMILIES: Final[dict[str, tuple[dict[str, Any], dict[str, float]]]] = {
    "gemma": ({"model_type": "gemma", **_TIED}, {}),
    "granite": (
        {
            "model_type": "granite",
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
        {"embedding_scale": 3.0, "residual_scale": 0.4, "attention.scale": 0.2, "logit_scale": 4.0},
    ),
    "seed_oss": ({"model_type": "seed_oss"}, {}),
    "smollm3": ({"model_type": "smollm3"}, {}),
    "arcee": ({"model_type": "arcee"}, {}),
    "olmo2": ({"model_type": "olmo2"}, {}),
    "ernie4_5": ({"model_type": "ernie4_5", **_TIED}, {}),
    "exaone4": ({"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 4}, {}),
    "glm4": ({"model_type": "glm4"}, {"rope.dimension_count": 8}),
    "starcoder2": ({"model_type": "starcoder2", **_TIED}, {"attention.sliding_window": 8}),
    "command-r": ({"model_type": "cohere", "use_qk_norm": True, "logit_scale": 0.5, **_TIED}, {"logit_scale": 0.5}),
    "cohere2": (
        {"model_type": "cohere2", "sliding_window": 16, "logit_scale": 0.5, **_TIED},
        {"attention.sliding_window": 16, "logit_scale": 0.5},
    ),
    "nemotron": ({"model_type": "nemotron"}, {"rope.dimension_count": 8}),
    "olmoe": (
        {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
        {"expert_count": 4, "expert_used_count": 2},
    ),
}
_PERMUTED: Final = ("granite", "smollm3", "arcee")
_NORMS_LESS_1: Final = ("gemma", "nemotron")


def write(architecture: str, reference: Any, own: dict[str, float], path: Path) -> None:
    """Write a model as llama.cpp's converter does."""
    config, writer = reference.config, gguf.GGUFWriter(path, architecture)
    values = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "context_length": config.max_position_embeddings,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
        "rope.dimension_count": 16,
    } | own
    for key, value in values.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    number = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        block, _, projection = name.partition(".experts.")
        parts = {name: tensor}
        if projection == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            parts = {f"{block}.experts.gate_proj.weight": gate, f"{block}.experts.up_proj.weight": up}
        elif projection:
            parts = {f"{name}.weight": tensor}
        for part, part_values in parts.items():
            array = part_values.contiguous().numpy()
            if architecture in _PERMUTED and (".q_proj." in part or ".k_proj." in part):
                heads = config.num_attention_heads if ".q_proj." in part else config.num_key_value_heads
                pairs = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
                array = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))
            if architecture in _NORMS_LESS_1 and part.endswith("norm.weight"):
                array = array + 1
            stored = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert stored is not None, part
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_are_those_of_the_model(architecture: str, tmp_path: Path) -> None:
    config, own = FAMILIES[architecture]
    reference: Any = reference_of(_COMMON | config, tmp_path)
    prompt = random_prompt(40)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    path = tmp_path / "model.gguf"
    write(architecture, reference, own, path)
    source = GgufSource(path)
    model = load_model(source.config, source, dtype=torch.float32, device=CPU)
    (scores,) = logits(model, paged(16)(model), [(prompt, 0, [0, 1, 2])])
    source.close()
    assert (scores - expected).abs().max() < 1e-4 * expected.abs().max()


def test_olmo3_is_refused_by_its_windows(tmp_path: Path) -> None:
    config, _ = FAMILIES["olmo2"]
    path = tmp_path / "model.gguf"
    write("olmo2", reference_of(_COMMON | config, tmp_path), {"attention.sliding_window": 16}, path)
    with pytest.raises(UnsupportedArchitectureError, match="sliding_window = 16, which OLMo 3 has"):
        GgufSource(path)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_checkpoint_is_written_and_read_back(architecture: str, tmp_path: Path) -> None:
    reference: Any = reference_of(_COMMON | FAMILIES[architecture][0], tmp_path)
    reference.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    source = GgufSource(write_gguf(tmp_path / "model", tmp_path / "written.gguf", type="F32"))
    expected = reference.state_dict()
    for name in source.names():
        if ".experts." not in name:
            torch.testing.assert_close(source.tensor(name, torch.float32, CPU), expected[name], rtol=0, atol=1e-6)
    config = evolve(read_config(source.config), norm_eps=1e-5)
    source.close()
    own = read_config(reference.config.to_dict())
    for field in ("embedding_scale", "residual_scale", "attention_scale", "logit_scale"):
        assert getattr(config, field) == pytest.approx(getattr(own, field))
        config = evolve(config, **{field: getattr(own, field)})
    ropes = [rope.rotates for rope in own.ropes]
    assert evolve(config, ropes=own.ropes) == own
    assert [rope.rotates for rope in config.ropes] == ropes
