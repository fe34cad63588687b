"""Write adapters as PEFT saves them, with random weights, and merge them into transformers' models."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["ALL", "merge", "write_adapter", "write_gguf_adapter"]

ALL: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
"""The linear layers of every family, experts left out."""
_LAYER: Final = re.compile(r"\.(lora_[AB])\.weight$")


def write_adapter(
    directory: Path,
    model: PreTrainedModel,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    strength: float = 0.15,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """Write an adapter of some of a model's linear layers.

    :param targets: the last parts of their names, or of that of its embeddings
    :param strength: the deviation of its weights
    :param settings: what else adapter_config.json says
    :returns: ``directory``, which is made if it was not there
    """
    generator = torch.Generator().manual_seed(seed)
    ranks = settings.get("rank_pattern", {})
    tensors: dict[str, Tensor] = {}
    names = set()
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if not isinstance(module, (nn.Linear, nn.Embedding)) or last not in targets:
            continue
        names.add(last)
        own = next((value for key, value in ranks.items() if name.endswith(key)), rank)
        if isinstance(module, nn.Embedding):
            for side, shape in (("A", (own, module.num_embeddings)), ("B", (module.embedding_dim, own))):
                values = torch.randn(shape, generator=generator) * strength
                tensors[f"base_model.model.{name}.lora_embedding_{side}"] = values.to(dtype)
            continue
        for side, shape in (("A", (own, module.in_features)), ("B", (module.out_features, own))):
            values = torch.randn(shape, generator=generator) * strength
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = values.to(dtype)
        if settings.get("use_dora"):
            changed = 1 + 2 * strength * torch.rand(module.out_features, generator=generator)
            lengths = torch.linalg.vector_norm(module.weight.detach(), dim=1) * changed
            tensors[f"base_model.model.{name}.lora_magnitude_vector"] = lengths.to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(names),
        "bias": "none",
        "modules_to_save": None,
    } | settings
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def merge(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Add an adapter to a model's weights, which is what it means.

    :returns: the model itself
    """
    config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(directory / "adapter_model.safetensors")
    for name, up in tensors.items():
        if not name.endswith("lora_B.weight"):
            continue
        module = _LAYER.sub("", name.removeprefix("base_model.model."))
        rank = up.shape[1]
        alphas = config.get("alpha_pattern", {})
        alpha = next((value for key, value in alphas.items() if module.endswith(key)), config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        weight = model.get_submodule(module).weight
        assert isinstance(weight, Tensor)
        weight.data += scale * (up.float() @ tensors[name.replace("lora_B", "lora_A")].float())
        if config.get("use_dora"):
            lengths = tensors[name.replace("lora_B.weight", "lora_magnitude_vector")].float()
            weight.data *= (lengths / torch.linalg.vector_norm(weight.data, dim=1))[:, None]
    return model


def write_gguf_adapter(path: Path, directory: Path, model: PreTrainedModel, architecture: gguf.MODEL_ARCH) -> Path:
    """Write an adapter of :func:`write_adapter` as llama.cpp's converter does.

    :param model: the base
    :returns: ``path``
    """
    config: Any = model.config
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    settings = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", settings["lora_alpha"])
    if settings.get("alora_invocation_tokens"):
        writer.add_array("adapter.alora.invocation_tokens", settings["alora_invocation_tokens"])
    for name, values in load_file(directory / "adapter_model.safetensors").items():
        module, side = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
        tensor = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        assert tensor is not None, name
        array = values.float().numpy()
        if side == "B" and architecture is gguf.MODEL_ARCH.LLAMA and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if module.endswith("q_proj") else config.num_key_value_heads
            pairs = array.reshape(heads, 2, array.shape[0] // heads // 2, -1)
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(f"{tensor}.lora_{side.lower()}", array.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
