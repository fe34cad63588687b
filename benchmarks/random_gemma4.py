"""Write a model of Gemma 4 E2B's shape with random weights as a GGUF file in Q4_K_M, and an assistant for it.

Shapes are those of the released models, with a quarter of their vocabulary: the tables of embeddings would else take
most of the memory, and nearly none of the time.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

__all__ = ["E2B", "write_random_assistant", "write_random_e2b"]

E2B: Final = "gemma4-e2b-random"
"""Name of the model."""
_VOCAB_SIZE: Final = 65_536
_HEADS: Final[dict[str, Any]] = {"num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512}
_TARGET: Final[dict[str, Any]] = _HEADS | {
    "model_type": "gemma4_text",
    "vocab_size": _VOCAB_SIZE,
    "vocab_size_per_layer_input": _VOCAB_SIZE,
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "use_double_wide_mlp": True,
    "num_hidden_layers": 35,
    "num_kv_shared_layers": 20,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "num_attention_heads": 8,
    "final_logit_softcapping": 30.0,
}
_ASSISTANT: Final[dict[str, Any]] = _HEADS | {
    "vocab_size": _VOCAB_SIZE,
    "vocab_size_per_layer_input": 0,
    "hidden_size": 256,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 4,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    "num_attention_heads": 4,
}
_TOKENS_PER_CLUSTER: Final = 128


def write_random_e2b(path: Path, tokenizer: Path) -> None:
    """Write the model.

    :param tokenizer: a GGUF file whose tokenizer the model gets
    """
    import torch
    import transformers

    from paged_sdk import write_gguf
    from paged_sdk.chat.text_processor import text_processor_from_gguf
    from paged_sdk.weights.gguf.file import GgufFile

    torch.manual_seed(0)
    maker: Any = transformers.AutoModelForCausalLM
    model = maker.from_config(transformers.AutoConfig.for_model(**_TARGET), dtype=torch.bfloat16)
    with TemporaryDirectory(dir=path.parent) as directory:
        model.save_pretrained(directory)
        del model
        words = text_processor_from_gguf(GgufFile(tokenizer).metadata).tokenizer._backend
        words.save(str(Path(directory) / "tokenizer.json"))
        write_gguf(directory, path, type="Q4_K_M", show_progress=True)


def write_random_assistant(directory: Path) -> None:
    """Write the assistant, in bfloat16 as it is released."""
    import json

    import torch
    from safetensors.torch import save_file

    size, inner, heads = (_ASSISTANT[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    target_size, num_clusters = _TARGET["hidden_size"], _VOCAB_SIZE // _TOKENS_PER_CLUSTER
    torch.manual_seed(1)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns) * 0.02).bfloat16()

    tensors = {
        "model.embed_tokens.weight": matrix(_VOCAB_SIZE, size),
        "model.norm.weight": torch.ones(size, dtype=torch.bfloat16),
        "pre_projection.weight": matrix(size, 2 * target_size),
        "post_projection.weight": matrix(target_size, size),
        "masked_embedding.centroids.weight": matrix(num_clusters, size),
        "masked_embedding.token_ordering": torch.randperm(_VOCAB_SIZE),
    }
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    for layer, kind in enumerate(_ASSISTANT["layer_types"]):
        prefix = f"model.layers.{layer}."
        head_dim = _HEADS["global_head_dim" if kind == "full_attention" else "head_dim"]
        tensors |= {
            f"{prefix}self_attn.q_proj.weight": matrix(heads * head_dim, size),
            f"{prefix}self_attn.q_norm.weight": torch.ones(head_dim, dtype=torch.bfloat16),
            f"{prefix}self_attn.o_proj.weight": matrix(size, heads * head_dim),
            f"{prefix}mlp.gate_proj.weight": matrix(inner, size),
            f"{prefix}mlp.up_proj.weight": matrix(inner, size),
            f"{prefix}mlp.down_proj.weight": matrix(size, inner),
            f"{prefix}layer_scalar": torch.ones(1, dtype=torch.bfloat16),
        }
        tensors |= {f"{prefix}{name}_layernorm.weight": torch.ones(size, dtype=torch.bfloat16) for name in norms}
    config = {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": target_size,
        "use_ordered_embeddings": True,
        "num_centroids": num_clusters,
        "centroid_intermediate_top_k": 32,
        "text_config": _ASSISTANT,
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
