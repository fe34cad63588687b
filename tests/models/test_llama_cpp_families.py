"""llama.cpp says of GGUF files of every architecture what this package says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

import tiny

pytest.importorskip("xllamacpp", reason="it has wheels for Linux on x86-64 alone")

from test_gguf_families import FAMILIES, built

from paged_sdk import write_gguf
from test_llama_cpp import CLOSE, CLOSE_BLOCKS, CLOSE_GELU, MORE_PROMPTS, NUM_TOKENS, PROMPTS, must_agree

pytestmark = pytest.mark.anyio

#: What llama.cpp can hold of tiny models: it has norms of command-r's queries in models of 64 layers, and the keys of
#: olmoe and dots1 are as many as their queries.
_LLAMA3: Final = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_OWN: Final[dict[str, dict[str, Any]]] = {
    "apertus": {"rope_parameters": _LLAMA3, "attention_bias": True},
    "exaone4": {"rope_scaling": _LLAMA3},
    "exaone-moe": {
        "rope_scaling": _LLAMA3,
        "layer_types": [*["sliding_attention", "full_attention"] * 2],
    },
    "command-r": {"use_qk_norm": False},
    "olmoe": {"num_key_value_heads": 4},
    "dots1": {"num_key_value_heads": 4},
    "deepseek2": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        }
    },
    # llama.cpp takes models of so many layers for those whose queries have no latent vector.
    "deepseek2 with a softmax": {"q_lora_rank": None, "num_hidden_layers": 27, "initializer_range": 0.15},
    "dots1 without norms": {"num_key_value_heads": 4},
    # Transformers takes 8, whatever the config says.
    "mpt": {"attn_config": {"alibi": True, "alibi_bias_max": 4, "clip_qkv": 3.0}},
    "olmo2 with windows": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    },
}
_QWEN2_MOE: Final = {
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": False,
}
#: Much like another.
_LONG: Final = ("qwen35 with layers in no order", "qwen35moe", "dots1 without norms")
_GELU: Final = ("gemma", "gemma4", "starcoder2", "phi2", "falcon", "bloom", "mpt")
CONFIGS: Final = {name: config | _OWN.get(name, {}) for name, (config, _) in FAMILIES.items()} | {
    "qwen2moe": _QWEN2_MOE,
    "granite of Granite 4": FAMILIES["granitehybrid"][0]
    | {"layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"},
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=pytest.mark.long if name in _LONG else ()) for name in CONFIGS],
)
async def test_float_files_say_the_same(architecture: str, tmp_path: Path) -> None:
    reference = built(CONFIGS[architecture], tmp_path)
    reference.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    path = write_gguf(tmp_path / "model", tmp_path / "written.gguf", type="F32")
    is_rounded = architecture.partition(" ")[0] in _GELU
    same, count = await must_agree(path, CLOSE_GELU if is_rounded else CLOSE, "float32"), NUM_TOKENS * len(PROMPTS)
    assert same > 0.9 * count if is_rounded else same == count


#: Sizes that fill blocks of 256 weights, and so many experts per token that rounded activations choose no others.
_WIDE: Final = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "shared_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "initializer_range": 0.06,
    "num_experts_per_tok": 4,
}
_DELTA: Final = {"linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
_MAMBA: Final = {"mamba_n_heads": 16, "mamba_d_ssm": 512, "mamba_num_heads": 8}
_MAMBA_ALONE: Final = {"num_heads": 16}


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "mixture"),
    [
        ("qwen35", "Q4_K_M"),
        ("qwen35", "Q8_0"),
        ("qwen3next", "Q4_K_M"),
        ("granitehybrid", "Q4_K_M"),
        ("falcon-h1", "Q8_0"),
        ("mamba2", "Q4_K_M"),
        ("nemotron_h", "Q4_K_M"),
    ],
)
async def test_quantized_recurrent_layers_say_nearly_the_same(architecture: str, mixture: str, tmp_path: Path) -> None:
    others = _DELTA if "qwen" in architecture else _MAMBA_ALONE if architecture == "mamba2" else _MAMBA
    reference = built(CONFIGS[architecture] | _WIDE | others, tmp_path)
    reference.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    path = write_gguf(tmp_path / "model", tmp_path / "written.gguf", type=mixture)
    # Where this was written, it was 173 to 190 of 192, with differences of up to 0.2.
    same = await must_agree(path, CLOSE_BLOCKS, "float32", MORE_PROMPTS)
    assert same > 0.8 * NUM_TOKENS * len(MORE_PROMPTS)
