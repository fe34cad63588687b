"""Adapters in the fused layers of families that differ from llama: texts are those of merged weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from odd_configs import reference_of

import tiny
from adapter_files import ALL, merge, write_adapter
from native_weights import needs_library
from paged_sdk import SamplingParams, TextModelBuilder

pytestmark = needs_library

TARGETS: Final = (
    *ALL,
    "c_fc",
    "c_proj",
    "query_key_value",
    "dense",
    "dense_4h_to_h",
    "fc_in",
    "out_proj",
    "input_linear",
    "output_linear",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
)
PROMPTS: Final = ([5, 6, 7, 8] * 6, [40, 41, 42] * 5)
GREEDY: Final = SamplingParams(temperature=0.0, max_len=8, ignore_eos=True)
_SHAPE: Final[dict[str, Any]] = {
    "vocab_size": tiny.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "rope_theta": 10_000.0,
}
_LATENT: Final[dict[str, Any]] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
}
# No norm before either half; layer norms and an MLP without a gate; attention and MLP side by side; a factor on what
# layers add; queries, keys and values in groups of rows; an activation with numbers of its own; gates of attention;
# shared experts, as two matrices and as one; keys that are values, too; queries that grow with their position;
# latent attention, with queries of one and of two matrices.
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "olmo2": {},
    "starcoder2": {},
    "cohere": {"logit_scale": 0.5},
    "granite": {"residual_multiplier": 0.4, "attention_multiplier": 0.25},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "bloom": {},
    "codegen": {"rotary_dim": 8, "n_inner": 96},
    "apertus": {},
    "afmoe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_shared_experts": 1,
        "sliding_window": 16,
        "global_attn_every_n_layers": 2,
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "granitemoeshared": {"num_local_experts": 4, "shared_intermediate_size": 48, "attention_multiplier": 0.25},
    "gemma4_text": {
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "tie_word_embeddings": False,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "youtu": _LATENT | {"q_lora_rank": 48},
    "deepseek_v2": _LATENT
    | {
        "q_lora_rank": None,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "topk_method": "greedy",
        "first_k_dense_replace": 1,
    },
}
DECOMPOSED: Final = ("starcoder2", "cohere", "falcon")


def continued(model: Any, prompt: list[int]) -> list[int]:
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(8):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_those_of_merged_weights(family: str, tmp_path: Path) -> None:
    config = _SHAPE | {"model_type": family} | FAMILIES[family]
    if family == "falcon":
        del config["head_dim"]  # which its class of configurations computes
    reference = reference_of(config, tmp_path)
    reference.save_pretrained(tmp_path / "base")
    tiny.tokenizer().save(str(tmp_path / "base" / "tokenizer.json"))
    write_adapter(tmp_path / "first", reference, seed=1, targets=TARGETS, use_dora=family in DECOMPOSED)
    expected = [continued(reference, prompt) for prompt in PROMPTS]
    merged = merge(reference, tmp_path / "first")
    expected += [continued(merged, prompt) for prompt in PROMPTS]

    async def run() -> list[str]:
        builder = TextModelBuilder(tmp_path / "base").with_dtype("float32").with_force_cpu().with_num_threads(1)
        async with builder.with_adapter(tmp_path / "first").build() as model:
            asked = [
                model.send_completion_request(prompt, GREEDY, adapter=name)
                for name in (None, "first")
                for prompt in PROMPTS
            ]
            texts = [response.choices[0].text for response in await asyncio.gather(*asked)]
            assert texts == [await model.detokenize(tokens) for tokens in expected]
        return texts

    assert len(set(asyncio.run(run()))) > 2
