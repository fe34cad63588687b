"""Define what an architecture of GGUF names its tensors, and how their values differ from Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from attrs import evolve, frozen

__all__ = [
    "EACH",
    "LATENT_UP",
    "MTP",
    "MTP_LAYER",
    "NUMBERED_MTP",
    "RATES",
    "TILED",
    "TOP_NAMES",
    "VECTORS",
    "GgufArchitecture",
    "stem_of",
]

TOP_NAMES: Final = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
"""The names of most architectures' tensors outside of the layers."""
EACH: Final = "*"
"""The placeholder in a Hugging Face name for the number of an expert, or of a head with its own norm."""

RATES: Final = "ssm_a"
"""GGUF's name, within ``blk.N.``, of the negated decay rates of heads."""
VECTORS: Final = (RATES, "ssm_d", "ssm_norm")
"""GGUF names, within ``blk.N.`` and without endings, of Mamba-2's tensors with a row per head or group of heads:
Hugging Face has vectors."""
TILED: Final = ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_alpha", "ssm_beta", "ssm_dt", RATES, "ssm_out")
"""GGUF names, within ``blk.N.`` and without endings, of the tensors that have something of each value head."""

MTP_LAYER: Final = "mtp.layers.0."
"""Hugging Face's prefix of the tensors of the first layer for multi-token prediction, which follows the model's own in
GGUF."""
NUMBERED_MTP: Final = MappingProxyType(
    {
        "eh_proj": "nextn.eh_proj",
        "enorm": "nextn.enorm",
        "hnorm": "nextn.hnorm",
        "shared_head.norm": "nextn.shared_head_norm",
    }
)
"""What only such a layer has, in checkpoints that number it like the model's own (DeepSeek, GLM): Hugging Face's name
within the layer -> GGUF's."""
MTP: Final = MappingProxyType(
    {
        "nextn.eh_proj": "mtp.fc",
        "nextn.enorm": "mtp.pre_fc_norm_embedding",
        "nextn.hnorm": "mtp.pre_fc_norm_hidden",
        "nextn.shared_head_norm": "mtp.norm",
    }
)
"""The same, of checkpoints that have the layer apart (Qwen): GGUF's name within the layer -> Hugging Face's."""
LATENT_UP: Final = ("attn_k_b", "attn_v_b")
"""GGUF names, within ``blk.N.`` and without endings, of each head's projections of latent vectors: to keys, transposed,
and to values."""

# Layers with this norm have one norm for attention and another for the parallel MLP.
_SECOND_NORM = "blk.0.attn_norm_2.weight"
_ROUTER = "blk.0.ffn_gate_inp.weight"

_FUSED_EXPERTS: Final = "ffn_gate_up_exps"
_GATE_AND_UP: Final = ("ffn_gate_exps", "ffn_up_exps")

_KINDS: Final = ("weight", "bias")
_IN_BLOCK = re.compile(r"blk\.(\d+)\.(\w+(?:\.\w+){0,2})")
_LAYER_NUMBER = re.compile(r"(\d+)\.(.+)")
_TOP_TENSOR = re.compile(r"(\w+(?:\.\w+)?)\.(weight|bias)")


def stem_of(name: str) -> str:
    """Return the first part of a GGUF name within ``blk.N.``: ``attn_q`` of ``blk.0.attn_q.weight``."""
    return name.removeprefix("blk.").partition(".")[2].partition(".")[0]


@frozen(kw_only=True)
class GgufArchitecture:
    """Maps a GGUF architecture to Hugging Face's.

    :ivar model_type: Hugging Face's ``model_type``
    :ivar block_names: GGUF name of a tensor within ``blk.N.`` -> Hugging Face name within a layer
    :ivar beside_names: overrides of ``block_names`` in files whose layers have two parallel norms
    :ivar bare_names: likewise, of names that do not both end in ``.weight`` or ``.bias``: with their endings
    :ivar layer_numbers: key of a list with a number for each layer -> Hugging Face name of the tensor within a layer,
        and its shape
    :ivar joined: Hugging Face name of a matrix within a layer -> GGUF names of those that have its rows, all of one
        after all of the other, where Hugging Face interleaves them in groups, one per (key) head, unless they are gate
        and up projections
    :ivar top_names: GGUF name of a tensor outside of the layers -> Hugging Face name
    :ivar body: the prefix of all Hugging Face names except that of the output projection
    :ivar layers: the name of the list of layers, after ``body``
    :ivar permuted_qk: whether GGUF permutes query and key rows within each head
    :ivar grouped_qkv: whether Hugging Face groups the rows of ``attn_qkv`` by KV head: its queries, its key, its value
    :ivar tiled_heads: whether GGUF orders the value heads of gated delta networks by their place in the group of a key
        head, then by key head; Hugging Face does the opposite
    :ivar norm_offset: the constant that GGUF adds to the weights of norms
    :ivar plain_norms: GGUF names of norms within ``blk.N.`` that it is not added to
    :ivar bias_groups: a config's field for the biases of a group of matrices -> their GGUF names. Biases of the group
        that the file leaves out are zero
    :ivar divided: GGUF name of a matrix within ``blk.N.``, or of a stack of such -> Hugging Face names of the equal
        parts of a matrix's rows
    :ivar left_out: matrices outside of the layers that a file may leave out: they become one row of zeros
    :ivar mtp_names: GGUF name of a tensor within ``blk.N.`` that only a layer for multi-token prediction has -> Hugging
        Face name; empty: such layers are not read
    :ivar is_encoder: whether attention is bidirectional
    :ivar mixture: the architecture of models with experts, if these have other names; None: they have the same
    """

    model_type: str
    block_names: Mapping[str, str]
    beside_names: Mapping[str, str] = MappingProxyType({})
    bare_names: Mapping[str, str] = MappingProxyType({})
    layer_numbers: Mapping[str, tuple[str, tuple[int, ...]]] = MappingProxyType({})
    joined: Mapping[str, Sequence[str]] = MappingProxyType({})
    top_names: Mapping[str, str] = TOP_NAMES
    body: str = "model."
    layers: str = "layers"
    permuted_qk: bool = False
    grouped_qkv: bool = False
    tiled_heads: bool = False
    norm_offset: float = 0.0
    plain_norms: Collection[str] = ()
    bias_groups: Mapping[str, Collection[str]] = MappingProxyType({})
    divided: Mapping[str, Sequence[str]] = MappingProxyType({})
    left_out: Collection[str] = ()
    mtp_names: Mapping[str, str] = MappingProxyType({})
    is_encoder: bool = False
    mixture: GgufArchitecture | None = None

    def of_file(self, names: Collection[str]) -> GgufArchitecture:
        """Return the architecture with the names that a file with these tensors uses."""
        if self.mixture is not None and _ROUTER in names:
            return self.mixture
        if _SECOND_NORM not in names:
            return self
        return evolve(self, block_names={**self.block_names, **self.beside_names})

    def parts(self, own: str) -> Sequence[str]:
        """Return the Hugging Face names of the equal parts of a matrix's rows; none if it is not divided.

        :param own: the matrix's GGUF name within ``blk.N.``, without its ending. Gates and ups of experts, which
            converters may join, are divided wherever they have names of their own
        """
        joined = [self.block_names.get(stem, "") for stem in _GATE_AND_UP]
        if own == _FUSED_EXPERTS and all(EACH in name for name in joined):
            return joined
        return self.divided.get(own, ())

    def gguf_name(self, name: str) -> str | None:
        """Return the GGUF name of a tensor, or None if the architecture has no such tensor.

        :param name: the Hugging Face name, with :data:`EACH` for the number of an expert or a head
        """
        prefix = f"{self.body}{self.layers}."
        if name.startswith(prefix) and (match := _LAYER_NUMBER.fullmatch(name.removeprefix(prefix))):
            layer, own = match.groups()
            bare = next((stored for stored, bare_name in self.bare_names.items() if bare_name == own), None)
            if bare is not None:
                return f"blk.{layer}.{bare}"
            parent, _, kind = own.rpartition(".")
            known = [*self.block_names.items(), *self.beside_names.items()]
            stem = next((stem for stem, block_name in known if block_name == parent), None)
            return stem and f"blk.{layer}.{stem}.{kind}"
        parent, _, kind = name.rpartition(".")
        top = next((stem for stem, top_name in self.top_names.items() if top_name == parent), None)
        return top and f"{top}.{kind}"

    def joined_names(self, name: str) -> tuple[str, ...]:
        """Return the GGUF names of the tensors that :attr:`joined` divides a tensor into; none if it is not divided.

        :param name: the Hugging Face name
        """
        for whole, stems in self.joined.items():
            layer = name.removeprefix(f"{self.body}{self.layers}.").removesuffix(f".{whole}.weight")
            if layer.isdecimal():
                return tuple(f"blk.{layer}.{stem}.weight" for stem in stems)
        return ()

    def is_layer_number(self, name: str) -> bool:
        """Return whether a tensor, by its Hugging Face name, is a number of a layer that GGUF has in its metadata."""
        prefix = f"{self.body}{self.layers}."
        match = _LAYER_NUMBER.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        return match is not None and any(match[2] == own for own, _ in self.layer_numbers.values())

    def hugging_face_name(self, name: str) -> str | None:
        """Return the Hugging Face name of a tensor, or None if the architecture has no such tensor.

        For a stack of the experts' matrices or the heads' norms, the name has :data:`EACH` for the number.
        """
        if match := _IN_BLOCK.fullmatch(name):
            layer, own = match.groups()
            stem, _, kind = own.rpartition(".")
            whole = next((whole for whole, stems in self.joined.items() if stem in stems), None)
            block_name = self.block_names.get(stem, whole) if kind in _KINDS else None
            found = self.bare_names.get(own, block_name and f"{block_name}.{kind}")
            return found and f"{self.body}{self.layers}.{layer}.{found}"
        if match := _TOP_TENSOR.fullmatch(name):
            stem, kind = match.groups()
            top_name = self.top_names.get(stem)
            return top_name and f"{top_name}.{kind}"
        return None

    @property
    def beside_body(self) -> frozenset[str]:
        """Return Hugging Face names of tensors beside the decoder, without their endings."""
        return frozenset(name for name in self.top_names.values() if not name.startswith((self.body, "lm_head")))

    def moves_values(self, name: str) -> bool:
        """Return whether a matrix's rows or columns are in another order than Hugging Face's, not only within heads.

        :param name: the GGUF name
        """
        stem = stem_of(name)
        return (
            (self.grouped_qkv and stem == "attn_qkv")
            or (self.tiled_heads and stem in TILED)
            or any(stem in stems for stems in self.joined.values())
        )
