"""Write checkpoints with a layer for multi-token prediction, and compute its drafts by transformers' own layers."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tiny import make_other_checkpoint

__all__ = ["MTP_CONFIGS", "MtpReference", "add_mtp_layer", "make_mtp_checkpoint"]

_DELTA: Final[dict[str, Any]] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_GROUPED: Final[dict[str, Any]] = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
_LATENT: Final[dict[str, Any]] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
MTP_CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _EXPERTS,
    "qwen3_next": _DELTA | _EXPERTS | {"decoder_sparse_step": 1},
    "glm4_moe": _GROUPED | {"head_dim": 16, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "deepseek_v3": _GROUPED | _LATENT,
    "glm4_moe_lite": _GROUPED | _LATENT | {"n_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
}
"""Fields of the configs of families with such a layer."""
_OF_QWEN: Final = {
    "layer": "mtp.layers.0.",
    "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "projection": "mtp.fc.weight",
    "last_norm": "mtp.norm.weight",
}
_NUMBERED: Final = {
    "layer": "",
    "embedding_norm": "enorm.weight",
    "hidden_norm": "hnorm.weight",
    "projection": "eh_proj.weight",
    "last_norm": "shared_head.norm.weight",
}
"""Within the layer after the model's own."""
_NORMS: Final = ("embedding_norm", "hidden_norm", "last_norm")


def make_mtp_checkpoint(model_type: str, directory: Path, **config: Any) -> Path:
    """Write a checkpoint of one of :data:`MTP_CONFIGS`'s families, with a layer of random weights."""
    make_other_checkpoint(model_type, directory, **(MTP_CONFIGS[model_type] | config))
    return add_mtp_layer(directory)


def add_mtp_layer(directory: Path) -> Path:
    """Add a layer of random weights to a checkpoint's file."""
    config = AutoConfig.from_pretrained(directory).get_text_config()
    names, size = _names(config), config.hidden_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        state = _one_layer(config).model.state_dict()
        tensors = {
            name.replace("layers.0.", names["layer"]): state[name] for name in state if name.startswith("layers.0.")
        }
        if not config.model_type.startswith("qwen3_5"):
            tensors = _apart(tensors)
        tensors[names["projection"]] = torch.randn(size, 2 * size) * 0.2
        tensors |= {names[norm]: 1 + 0.3 * torch.randn(size) for norm in _NORMS}
    path = directory / "model.safetensors"
    save_file(load_file(path) | tensors, path, {"format": "pt"})
    return directory


class MtpReference:
    """Drafts like the layer of a checkpoint, computing everything anew for each draft."""

    def __init__(self, directory: Path, target: Any = None) -> None:
        own_target = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32) if target is None else target
        self.target: Any = own_target
        config = self.target.config.get_text_config()
        names, tensors = _names(config), load_file(directory / "model.safetensors")
        layer = _one_layer(config)
        own = {
            name.replace(names["layer"], "layers.0."): tensor
            for name, tensor in tensors.items()
            if name.startswith(names["layer"]) and name not in names.values()
        }
        own = _stacked(own)
        self.layer_tensors = {name.removeprefix("layers.0."): tensor for name, tensor in own.items()}
        own["norm.weight"] = tensors[names["last_norm"]]
        found = layer.model.load_state_dict(own, strict=False)
        assert found.missing_keys == ["embed_tokens.weight"]
        self._layer = layer.model
        self._projection = tensors[names["projection"]]
        self._norms = [_norm_like(layer.model.norm, tensors[names[norm]]) for norm in _NORMS[:2]]

    @torch.inference_mode()
    def likeliest(self, token_ids: list[int], drafts: list[int]) -> int:
        """Return the token that the layer finds likeliest after a text and drafts after it."""
        tokens = torch.tensor([*token_ids, *drafts])
        states = self.target.model(torch.tensor([token_ids[:-1]])).last_hidden_state[0]
        table = self.target.get_input_embeddings().weight
        while True:
            after = tokens[1 : 1 + len(states)]
            both = [norm(each) for each, norm in zip((table[after], states), self._norms, strict=True)]
            made = self._layer(inputs_embeds=(torch.cat(both, 1) @ self._projection.T)[None]).last_hidden_state[0]
            if len(states) == len(tokens) - 1:
                return int(self.target.lm_head(made[-1]).argmax())
            states = torch.cat((states, made[-1:]))

    @torch.inference_mode()
    def likeliest_beside_images(self, token_ids: list[int], inputs: Mapping[str, torch.Tensor]) -> int:
        """Return the likeliest token after a text with images.

        :param inputs: what transformers' model takes of the images
        """
        seen: dict[str, Any] = {}
        decoder = self.target.model.language_model
        ids = torch.tensor([token_ids])
        self.target.model.rope_deltas = None  # of the text before
        types = (ids == self.target.config.image_token_id).int()
        hook = decoder.register_forward_hook(
            lambda module, args, kwargs, output: seen.update(kwargs, states=output.last_hidden_state), with_kwargs=True
        )
        self.target(input_ids=ids, mm_token_type_ids=types, **inputs)
        hook.remove()
        both = [seen["inputs_embeds"][0, 1:], seen["states"][0, :-1]]
        normed = [norm(each) for each, norm in zip(both, self._norms, strict=True)]
        made = self._layer(
            inputs_embeds=(torch.cat(normed, 1) @ self._projection.T)[None], position_ids=seen["position_ids"][..., :-1]
        )
        return int(self.target.lm_head(made.last_hidden_state[0, -1]).argmax())


def _names(config: Any) -> dict[str, str]:
    if config.model_type.startswith("qwen"):
        return _OF_QWEN
    return {part: f"model.layers.{config.num_hidden_layers}.{name}" for part, name in _NUMBERED.items()}


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with a matrix for each expert, as released checkpoints have them, but for Qwen 3.5."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        if parts is None:
            found[name] = tensor
            continue
        for number, matrix in enumerate(tensor):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                found[f"{stem}.experts.{number}.{part}.weight"] = rows.contiguous()
    return found


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with the experts' matrices together, as transformers' layers have them."""
    block = "layers.0.mlp.experts."
    count = sum(name.startswith(block) and name.endswith(".up_proj.weight") for name in tensors)
    if not count:
        return tensors
    of_each = [
        {part: tensors[f"{block}{number}.{part}_proj.weight"] for part in ("gate", "up", "down")}
        for number in range(count)
    ]
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(block)}
    gate_up = torch.stack([torch.cat((each["gate"], each["up"])) for each in of_each])
    down = torch.stack([each["down"] for each in of_each])
    return others | {f"{block}gate_up_proj": gate_up, f"{block}down_proj": down}


def _one_layer(config: Any) -> Any:
    """Make a model of one layer like the last of a model's with attention."""
    own = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "first_k_dense_replace": 0}
    own |= {"mlp_layer_types": ["sparse"], "mlp_only_layers": []}
    values = config.to_dict()
    one = type(config)(**(values | {name: value for name, value in own.items() if name in values}))
    return AutoModelForCausalLM.from_config(one, dtype=torch.float32)  # type: ignore[no-untyped-call]


def _norm_like(norm: Any, weight: torch.Tensor) -> Any:
    made = deepcopy(norm)
    made.load_state_dict({"weight": weight})
    return made
