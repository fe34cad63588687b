"""Find the places of a checkpoint's tensors in a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from attrs import frozen

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.weights.gguf.architecture import EACH, MTP_LAYER, NUMBERED_MTP, GgufArchitecture
from paged_sdk.weights.gguf.config_export import table_of
from paged_sdk.weights.gguf.names import ARCHITECTURES

__all__ = ["CheckpointNames", "GgufPlace", "architecture_of", "gguf_places"]

_EXPERT: Final = re.compile(r"\.(experts|norms)\.(\d+)\.")
_MERGED: Final = re.compile(
    r"\w+\.layers\.(\d+)\.(?:(?:.+\.)?experts\.(gate_up_proj|up_proj|down_proj)|block_sparse_moe\.(?:(input)|output)_linear\.weight)"
)
_LAYER_TENSOR: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_MTP_OF_STEM: Final = MappingProxyType({stem: own for own, stem in NUMBERED_MTP.items()})
_COPIES: Final = ("embed_tokens.", "shared_head.head.")
_UNUSED: Final = ".rotary_emb.inv_freq"  # buffers that older checkpoints hold


@frozen(kw_only=True)
class CheckpointNames:
    """Holds a family's names for the tensors of a checkpoint.

    :ivar body: the prefix of the decoder's tensors
    :ivar head: the name of the output projection
    :ivar experts: the names of the tensors of a mixture of experts within a layer, by GGUF stem, with :data:`EACH` for
        the number of an expert
    :ivar has_mtp: whether the layer for multi-token prediction is written, too
    """

    body: str
    head: str
    experts: Mapping[str, str] = MappingProxyType({})
    has_mtp: bool = False


@frozen
class GgufPlace:
    """Locates a checkpoint's tensor in a GGUF file.

    :ivar names: the name of the GGUF tensor; two names if the checkpoint merges the experts' gate and up projections,
        those of gated delta networks, or those of latent vectors to keys and values, which GGUF keeps apart
    :ivar expert: the number of the expert that the matrix belongs to, or of the head that the norm belongs to; None if
        the tensor is neither
    """

    names: tuple[str, ...]
    expert: int | None = None

    @property
    def is_stack(self) -> bool:
        """Return whether the GGUF tensor stacks the matrices of all experts."""
        return self.names[0].endswith("_exps.weight")


def architecture_of(config: DecoderConfig) -> GgufArchitecture:
    """Return the names of a checkpoint's tensors, and how their values differ in GGUF.

    :raises UnsupportedArchitectureError: the model cannot be written as GGUF
    """
    found = ARCHITECTURES[table_of(config)]
    return found if config.moe is None or found.mixture is None else found.mixture


def gguf_places(stored: Iterable[str], config: DecoderConfig, names: CheckpointNames) -> dict[str, GgufPlace | None]:
    """Return the place in a GGUF file of each tensor that the model uses; None if GGUF has no name for the tensor.

    :param stored: the names of all tensors of the checkpoint
    """
    architecture = architecture_of(config)
    plain_names = {name: _plain_name(name, names, architecture, config.num_layers) for name in stored}
    table = f"{architecture.top_names['token_embd']}.weight"
    has_table = table in plain_names.values()
    prefix = _prefix_of_mtp(architecture, config.num_layers)
    places: dict[str, GgufPlace | None] = {}
    for name, plain in plain_names.items():
        if plain == "lm_head.weight" and config.tie_embeddings and not has_table:
            plain = table  # tied weights, stored under this name alone
        if plain is None or plain.endswith(_UNUSED) or (plain == "lm_head.weight" and config.tie_embeddings):
            continue
        if architecture.is_layer_number(plain):
            continue
        parent, _, kind = plain.removeprefix(prefix).rpartition(".")
        if plain.startswith(prefix) and parent in NUMBERED_MTP:
            places[name] = GgufPlace((f"blk.{config.num_layers}.{NUMBERED_MTP[parent]}.{kind}",))
            continue
        merged = _MERGED.fullmatch(plain)
        if merged is not None:
            has_two = merged[2] == "gate_up_proj" or merged[3] is not None
            up, down = ("ffn_gate_exps", "ffn_up_exps") if has_two else ("ffn_up_exps",), ("ffn_down_exps",)
            stems = up if has_two or merged[2] == "up_proj" else down
            known = config.moe is not None
            places[name] = GgufPlace(tuple(f"blk.{merged[1]}.{stem}.weight" for stem in stems)) if known else None
            continue
        if parts := architecture.joined_names(plain):
            places[name] = GgufPlace(parts)
            continue
        expert = _EXPERT.search(plain)
        of_each = _EXPERT.sub(rf".\1.{EACH}.", plain)
        own = _of_mixture(of_each, names) or architecture.gguf_name(of_each)
        places[name] = GgufPlace((own,), None if expert is None else int(expert[2])) if own else None
    return places


def _prefix_of_mtp(architecture: GgufArchitecture, num_layers: int) -> str:
    """Return the prefix of the layer for multi-token prediction, which follows the model's own."""
    return f"{architecture.body}{architecture.layers}.{num_layers}."


def _plain_name(name: str, names: CheckpointNames, architecture: GgufArchitecture, num_layers: int) -> str | None:
    """Return the tensor's name with the prefixes of a text-only checkpoint that numbers the layer for multi-token
    prediction like the model's own; None if it is not part of the decoder, or of layers that are not written.
    """
    parent, _, kind = name.rpartition(".")
    if parent == names.head:
        return f"lm_head.{kind}"
    mtp = _prefix_of_mtp(architecture, num_layers)
    if names.has_mtp and name.startswith(MTP_LAYER):
        return f"{mtp}{name.removeprefix(MTP_LAYER)}"
    for stem, own in architecture.mtp_names.items() if names.has_mtp else ():
        if parent == own:
            return f"{mtp}{_MTP_OF_STEM[stem]}.{kind}"
    if not name.startswith(names.body):
        return name if parent in architecture.beside_body else None
    plain = f"{architecture.body}{name.removeprefix(names.body)}"
    layer = plain.removeprefix(f"{architecture.body}{architecture.layers}.").partition(".")[0]
    if not layer.isdecimal() or int(layer) < num_layers:
        return plain
    # Of later layers, their own embeddings and output projections are copies of the model's.
    own = plain.removeprefix(mtp)
    return plain if names.has_mtp and own != plain and not own.startswith(_COPIES) else None


def _of_mixture(plain: str, names: CheckpointNames) -> str | None:
    """Return GGUF's name for a tensor of a layer's mixture of experts; None if it is not one."""
    match = _LAYER_TENSOR.fullmatch(plain)
    stem = None if match is None else next((stem for stem, own in names.experts.items() if own == match[2]), None)
    return None if match is None or stem is None else f"blk.{match[1]}.{stem}.weight"
