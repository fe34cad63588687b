"""Map the GGUF names of image encoders' tensors (mmproj files) to transformers' names.

GGUF's names come from llama.cpp. Some stand for a tensor that files store in parts: ``attn_qkv``, which files split
into queries, keys and values, and Qwen's ``v.patch_embd``, the patch embedding of two video frames.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from attrs import frozen

__all__ = ["CLIP", "GEMMA3", "IDEFICS3", "INTERNVL", "PIXTRAL", "QWEN2", "QWEN2_5", "QWEN3", "EncoderNames"]

_NUMBERED: Final = re.compile(r"v\.(blk|deepstack)\.(\d+)\.(\w+)\.(weight|bias)")


@frozen(kw_only=True)
class EncoderNames:
    """Maps the names of an encoder's tensors to transformers' names.

    :ivar blocks: the name of the list of layers
    :ivar block: GGUF name of a tensor within ``v.blk.N.`` -> name within a layer
    :ivar top: GGUF name of a tensor outside of the layers, with or without ``.weight`` and ``.bias`` -> name
    :ivar bare: names within a layer of parameters without such a suffix
    :ivar mergers: the name of the list of DeepStack mergers, which make vectors for the decoder's first layers
    :ivar merger: GGUF name of a tensor within ``v.deepstack.N.`` -> name within a merger
    """

    blocks: str
    block: Mapping[str, str]
    top: Mapping[str, str]
    bare: frozenset[str] = frozenset()
    mergers: str = ""
    merger: Mapping[str, str] = MappingProxyType({})

    def of(self, name: str) -> str | None:
        """Return transformers' name for a GGUF tensor, or None if the encoder has no such tensor."""
        if match := _NUMBERED.fullmatch(name):
            what, number, stem, kind = match.groups()
            place, names = (self.blocks, self.block) if what == "blk" else (self.mergers, self.merger)
            inner = names.get(stem)
            if inner is None:
                return None
            return f"{place}.{number}.{inner}" + ("" if inner in self.bare else f".{kind}")
        if name in self.top:
            return self.top[name]
        stem, _, kind = name.rpartition(".")
        top = self.top.get(stem)
        return top and f"{top}.{kind}"

    def gguf_name(self, name: str) -> str | None:
        """Return the GGUF name for a tensor of transformers' model, or None if GGUF has no such tensor."""
        stem, _, kind = name.rpartition(".")
        for what, place, names in (("blk", self.blocks, self.block), ("deepstack", self.mergers, self.merger)):
            if place and name.startswith(f"{place}."):
                number, _, inner = name.removeprefix(f"{place}.").partition(".")
                found = {own: f"{stored}.weight" for stored, own in names.items() if own in self.bare}
                found |= {f"{own}.{kind}": f"{stored}.{kind}" for stored, own in names.items()}
                return f"v.{what}.{number}.{found[inner]}" if inner in found else None
        for stored, own in self.top.items():
            if own == name:
                return stored
            if own == stem:
                return f"{stored}.{kind}"
        return None


_VIT: Final = MappingProxyType(
    {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_out": "self_attn.out_proj",
        "ln1": "layer_norm1",
        "ln2": "layer_norm2",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    }
)


def _vit(tower: str, top: Mapping[str, str]) -> EncoderNames:
    own = {
        "v.class_embd": f"{tower}.embeddings.class_embedding",
        "v.patch_embd": f"{tower}.embeddings.patch_embedding",
        "v.position_embd": f"{tower}.embeddings.position_embedding",
        "v.pre_ln": f"{tower}.pre_layrnorm",
        "v.post_ln": f"{tower}.post_layernorm",
    }
    return EncoderNames(blocks=f"{tower}.encoder.layers", block=_VIT, top=MappingProxyType(own | dict(top)))


_PROJECTOR: Final = "multi_modal_projector"

CLIP: Final = _vit(
    "vision_tower",
    {
        "mm.0": f"{_PROJECTOR}.linear_1",
        "mm.2": f"{_PROJECTOR}.linear_2",
        "v.image_newline": "image_newline",
        "model.image_newline": "image_newline",
    },
)
GEMMA3: Final = _vit(
    "vision_tower",
    {
        "mm.input_projection.weight": f"{_PROJECTOR}.mm_input_projection_weight",
        "mm.soft_emb_norm": f"{_PROJECTOR}.mm_soft_emb_norm",
    },
)
IDEFICS3: Final = _vit("model.vision_model", {"mm.model.fc": "model.connector.modality_projection.proj"})
PIXTRAL: Final = EncoderNames(
    blocks="vision_tower.transformer.layers",
    block=MappingProxyType(
        {
            "attn_q": "attention.q_proj",
            "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj",
            "attn_out": "attention.o_proj",
            "ln1": "attention_norm",
            "ln2": "ffn_norm",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        }
    ),
    top=MappingProxyType(
        {
            "v.patch_embd": "vision_tower.patch_conv",
            "v.pre_ln": "vision_tower.ln_pre",
            "mm.1": f"{_PROJECTOR}.linear_1",
            "mm.2": f"{_PROJECTOR}.linear_2",
            "mm.input_norm": f"{_PROJECTOR}.norm",
            "mm.patch_merger": f"{_PROJECTOR}.patch_merger.merging_layer",
        }
    ),
)
INTERNVL: Final = EncoderNames(
    blocks="vision_tower.encoder.layer",
    block=MappingProxyType(
        {
            "attn_q": "attention.q_proj",
            "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj",
            "attn_q_norm": "attention.q_norm",
            "attn_k_norm": "attention.k_norm",
            "attn_out": "attention.projection_layer",
            "ln1": "layernorm_before",
            "ln2": "layernorm_after",
            "ls1": "lambda_1",
            "ls2": "lambda_2",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        }
    ),
    top=MappingProxyType(
        {
            "v.class_embd": "vision_tower.embeddings.cls_token",
            "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
            "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
            "mm.model.mlp.0": f"{_PROJECTOR}.layer_norm",
            "mm.model.mlp.1": f"{_PROJECTOR}.linear_1",
            "mm.model.mlp.3": f"{_PROJECTOR}.linear_2",
        }
    ),
    bare=frozenset({"lambda_1", "lambda_2"}),
)

_QWEN_MERGER: Final = MappingProxyType({"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"})
_QWEN_BLOCK: Final = MappingProxyType({"attn_qkv": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"})


def _qwen(tower: str, merger: tuple[str, str, str], block: Mapping[str, str]) -> EncoderNames:
    norm, first, second = merger
    own = {
        "v.patch_embd": f"{tower}.patch_embed.proj",
        "v.position_embd": f"{tower}.pos_embed",
        "v.post_ln": f"{tower}.merger.{norm}",
        "mm.0": f"{tower}.merger.{first}",
        "mm.2": f"{tower}.merger.{second}",
    }
    return EncoderNames(
        blocks=f"{tower}.blocks",
        block=MappingProxyType(dict(_QWEN_BLOCK) | dict(block)),
        top=MappingProxyType(own),
        mergers=f"{tower}.deepstack_merger_list",
        merger=_QWEN_MERGER,
    )


_MERGER: Final = ("ln_q", "mlp.0", "mlp.2")
QWEN2: Final = _qwen("visual", _MERGER, {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"})
QWEN2_5: Final = _qwen(
    "visual", _MERGER, {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
)
QWEN3: Final = _qwen(
    "model.visual",
    ("norm", "linear_fc1", "linear_fc2"),
    {"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
)
