"""Write models with recurrent layers, with random weights, as GGUF files in Q4_K_M.

Shapes are those of released models, with the vocabulary of one of them: a larger one would only make the output
projection a larger part of a token's time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final

__all__ = ["SHAPES", "config_of", "write_random_hybrid"]

_VOCAB_SIZE: Final = 65_536
_LFM2_ATTENDING: Final = (2, 5, 8, 10, 12, 14)
_GRANITE_ATTENDING: Final = (10, 13, 17, 27)

_QWEN35: Final[dict[str, Any]] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}

SHAPES: Final[Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "lfm2-350m": {
            "model_type": "lfm2",
            "hidden_size": 1024,
            "intermediate_size": 6656,
            "num_hidden_layers": 16,
            "layer_types": ["full_attention" if layer in _LFM2_ATTENDING else "conv" for layer in range(16)],
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
        "qwen3.5-0.8b": _QWEN35,
        "qwen3.5-0.8b-mtp": _QWEN35,
        "granite-4.0-h-350m": {
            "model_type": "granitemoehybrid",
            "hidden_size": 768,
            "num_hidden_layers": 32,
            "layer_types": [
                "full_attention" if layer in _GRANITE_ATTENDING else "linear_attention" for layer in range(32)
            ],
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "num_local_experts": 0,
            "shared_intermediate_size": 2048,
            "mamba_n_heads": 48,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
            "position_embedding_type": "nope",
            "max_position_embeddings": 32_768,
        },
    }
)
"""Models by name: transformers' settings, without the vocabulary. Those that end in ``-mtp`` have a layer for
multi-token prediction, too.
"""


def config_of(shape: str) -> dict[str, Any]:
    """Return transformers' settings of a model of :data:`SHAPES`."""
    return SHAPES[shape] | {"vocab_size": _VOCAB_SIZE, "tie_word_embeddings": True}


def write_random_hybrid(shape: str, path: Path, tokenizer: Path) -> None:
    """Write a model of :data:`SHAPES`.

    :param tokenizer: a GGUF file whose tokenizer the model gets
    """
    import torch
    import transformers

    from paged_sdk import write_gguf
    from paged_sdk.chat.text_processor import text_processor_from_gguf
    from paged_sdk.weights.gguf.file import GgufFile

    torch.manual_seed(0)
    maker: Any = transformers.AutoModelForCausalLM
    model = maker.from_config(transformers.AutoConfig.for_model(**config_of(shape)), dtype=torch.bfloat16)
    with TemporaryDirectory(dir=path.parent) as directory:
        model.save_pretrained(directory)
        if shape.endswith("-mtp"):
            _add_mtp_layer(model, Path(directory) / "model.safetensors")
        words = text_processor_from_gguf(GgufFile(tokenizer).metadata).tokenizer._backend
        words.save(str(Path(directory) / "tokenizer.json"))
        write_gguf(directory, path, type="Q4_K_M", show_progress=True)


def _add_mtp_layer(model: Any, path: Path) -> None:
    """Add a layer for multi-token prediction of random weights to a checkpoint's file."""
    import torch
    from safetensors.torch import load_file, save_file

    config, size = model.config, model.config.hidden_size
    values = config.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    state = type(model)(type(config)(**values)).to(torch.bfloat16).model.state_dict()
    tensors = {f"mtp.{name}": state[name] for name in state if name.startswith(("layers.0.", "norm."))}
    tensors["mtp.fc.weight"] = torch.randn(size, 2 * size, dtype=torch.bfloat16) * config.initializer_range
    norms = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
    tensors |= {name: torch.zeros(size, dtype=torch.bfloat16) for name in norms}
    save_file(load_file(path) | tensors, path, {"format": "pt"})
