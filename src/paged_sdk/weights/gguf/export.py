"""Convert the names and values of a checkpoint's tensors to llama.cpp's conventions for GGUF.

:mod:`paged_sdk.weights.gguf.source` is the inverse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig, RopeKind
from paged_sdk.config.recurrent import GatedDeltaConfig, Mamba2Config
from paged_sdk.errors import shown
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix, UnreadRows
from paged_sdk.weights.gguf.architecture import EACH, LATENT_UP, RATES, TILED, VECTORS, GgufArchitecture, stem_of
from paged_sdk.weights.gguf.config_export import gguf_architecture, global_rope, not_writable
from paged_sdk.weights.gguf.gemma4 import gemma4_divisors
from paged_sdk.weights.gguf.mamba import row_factors
from paged_sdk.weights.gguf.names import ARCHITECTURES
from paged_sdk.weights.qkv_order import qkv_order, qkvz_order, rows_of_heads, runs, tiled_heads
from paged_sdk.weights.source import WeightSource, malformed

__all__ = [
    "CheckpointNames",
    "GgufMatrix",
    "GgufPlace",
    "architecture_of",
    "column_order",
    "gguf_places",
    "gguf_tensors",
]

_EXPERT: Final = re.compile(r"\.(experts|norms)\.(\d+)\.")
_MERGED: Final = re.compile(
    r"model\.layers\.(\d+)\.(?:(?:.+\.)?experts\.(gate_up_proj|down_proj)|block_sparse_moe\.(?:(input)|output)_linear\.weight)"
)
_LAYER_TENSOR: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_UNUSED: Final = ".rotary_emb.inv_freq"  # buffers that older checkpoints hold


@frozen(kw_only=True)
class CheckpointNames:
    """Holds a family's names for the tensors of a checkpoint.

    :ivar body: the prefix of the decoder's tensors
    :ivar head: the name of the output projection
    :ivar experts: the names of the tensors of a mixture of experts within a layer, by GGUF stem, with :data:`EACH` for
        the number of an expert
    """

    body: str
    head: str
    experts: Mapping[str, str] = MappingProxyType({})


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


@frozen(eq=False, kw_only=True)
class GgufMatrix:
    """Holds the matrices of a checkpoint that, stacked vertically, make up a GGUF tensor.

    :ivar shape: the GGUF tensor's shape, in torch's order
    :ivar permuted_heads: the number of heads, if GGUF permutes the rows within each head; 0: no permutation
    :ivar columns: GGUF's order of groups of columns, and the width of a group; None: the order is the same
    :ivar offset: a constant that GGUF adds to the values
    :ivar factors: what GGUF multiplies each row of each matrix by; None: nothing
    """

    shape: tuple[int, ...]
    matrices: Sequence[StoredMatrix]
    permuted_heads: int = 0
    columns: tuple[Tensor, int] | None = None
    offset: float = 0.0
    factors: Tensor | None = None

    def pieces(self, num_rows: int) -> Iterator[tuple[int, Callable[[], Tensor]]]:
        """Yield the rows in pieces of at most about ``num_rows``, in GGUF's order.

        :returns: for each piece, the index of the GGUF tensor's matrix that contains it, and a function that decodes
            it: float32 ``[rows, columns]``
        """
        height, done = self.shape[-2 if len(self.shape) > 1 else 0], 0
        for matrix in self.matrices:
            rows, first = matrix.shape[0], 0
            head = rows // self.permuted_heads if self.permuted_heads else 1
            step = max(1, num_rows // head) * head
            while first < rows:
                number, row = divmod(done + first, height)
                last = min(rows, first + step, first + height - row)
                yield number, partial(self._decoded, matrix, slice(first, last), head)
                first = last
            done += rows

    def _decoded(self, matrix: StoredMatrix, rows: slice, head: int) -> Tensor:
        values = matrix.rows(rows).decoded(torch.float32)
        if self.offset:
            values = values + self.offset
        if self.factors is not None:
            values = values * self.factors[rows, None]
        if self.columns is not None:
            order, width = self.columns
            values = torch.unflatten(values, 1, (-1, width))[:, order].flatten(1)
        return _permuted(values, head) if self.permuted_heads else values


def gguf_tensors(
    source: WeightSource, config: DecoderConfig, names: CheckpointNames, divisors: Tensor | None
) -> dict[str, GgufMatrix]:
    """Return the tensors that the model uses, by GGUF name, in the order of layers.

    :param divisors: a divisor for each rotary frequency, if the scaling has no keys in GGUF's metadata; None otherwise
    :raises UnsupportedArchitectureError: GGUF has no name for a tensor or the rotary scaling
    :raises CheckpointError: experts are missing
    """
    architecture = architecture_of(config)
    found: dict[str, GgufMatrix] = {}
    stacks: dict[str, dict[int, str]] = {}
    for name, place in gguf_places(source.names(), config, names).items():
        if place is None:
            raise not_writable(config, f"GGUF has no name for tensor {shown(name)}")
        (stored, *others), expert = place.names, place.expert
        if expert is not None:
            stacks.setdefault(stored, {})[expert] = name
        elif place.is_stack:
            found |= _merged_experts(source, name, [stored, *others], config)
        elif stem_of(stored) in LATENT_UP:
            found |= _latent_up(source, name, [stored, *others], config)
        elif others:
            found |= _divided(source, name, [stored, *others], config)
        else:
            found[stored] = _one(source, name, stored, config, architecture)
    for stored, members in stacks.items():
        found[stored] = _stack(source, stored, members, config)
    found |= _rope_tensors(config, architecture, divisors)
    for stored, factors in row_factors(config).items():
        found |= {name: evolve(each, factors=factors) for name, each in found.items() if _is_named(name, stored)}
    return {name: found[name] for name in sorted(found, key=_place)}


def architecture_of(config: DecoderConfig) -> GgufArchitecture:
    """Return the architecture of a model's files.

    :raises UnsupportedArchitectureError: the model cannot be written as GGUF
    """
    found = ARCHITECTURES[gguf_architecture(config)]
    return found if config.moe is None or found.mixture is None else found.mixture


def _is_named(name: str, stem: str) -> bool:
    """Return whether a GGUF tensor is the weight of a name outside of the layers, or within one."""
    return name.endswith(".weight") and stem in (name.removesuffix(".weight"), stem_of(name))


def gguf_places(stored: Iterable[str], config: DecoderConfig, names: CheckpointNames) -> dict[str, GgufPlace | None]:
    """Return the place in a GGUF file of each tensor that the model uses; None if GGUF has no name for the tensor.

    :param stored: the names of all tensors of the checkpoint
    """
    architecture = architecture_of(config)
    plain_names = {name: _plain_name(name, names, architecture) for name in stored}
    table = f"{architecture.top_names['token_embd']}.weight"
    has_table = table in plain_names.values()
    places: dict[str, GgufPlace | None] = {}
    for name, plain in plain_names.items():
        if plain == "lm_head.weight" and config.tie_embeddings and not has_table:
            plain = table  # tied weights, stored under this name alone
        if plain is None or plain.endswith(_UNUSED) or (plain == "lm_head.weight" and config.tie_embeddings):
            continue
        merged = _MERGED.fullmatch(plain)
        if merged is not None:
            has_two = merged[2] == "gate_up_proj" or merged[3] is not None
            stems = ("ffn_gate_exps", "ffn_up_exps") if has_two else ("ffn_down_exps",)
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


def column_order(config: DecoderConfig, stored: str) -> Tensor | None:
    """Return the indices of a checkpoint's columns in GGUF's order, int64; None if the order is the same.

    :param stored: the name of the GGUF tensor
    """
    if not ARCHITECTURES[gguf_architecture(config)].tiled_heads or not stored.endswith(".ssm_out.weight"):
        return None
    delta = _delta_of(config)
    return rows_of_heads(tiled_heads(delta.num_key_heads, delta.num_value_heads), delta.value_dim)


def _place(name: str) -> int:
    """Return a tensor's sort key in the file: embeddings come first, then layers by number, then the output."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" else 1 << 20 if parts[0].startswith("output") else -1


def _plain_name(name: str, names: CheckpointNames, architecture: GgufArchitecture) -> str | None:
    """Return the tensor's name with the prefixes of a text-only checkpoint; None if it is not part of the decoder."""
    parent, _, kind = name.rpartition(".")
    if parent == names.head:
        return f"lm_head.{kind}"
    if name.startswith(names.body):
        return f"{architecture.body}{name.removeprefix(names.body)}"
    return None


def _of_mixture(plain: str, names: CheckpointNames) -> str | None:
    """Return GGUF's name for a tensor of a layer's mixture of experts; None if it is not one."""
    match = _LAYER_TENSOR.fullmatch(plain)
    stem = None if match is None else next((stem for stem, own in names.experts.items() if own == match[2]), None)
    return None if match is None or stem is None else f"blk.{match[1]}.{stem}.weight"


def _one(
    source: WeightSource, name: str, stored: str, config: DecoderConfig, architecture: GgufArchitecture
) -> GgufMatrix:
    shape, stem = source.shape(name), stem_of(stored)
    if architecture.grouped_qkv and stem == "attn_qkv":
        return _in_order(source, name, qkv_order(config.num_heads, config.num_kv_heads, config.head_dim))
    if stem in VECTORS and (mamba := _mamba_of(config)) is not None:
        return _of_mamba(source, name, stem, mamba)
    if stem == RATES or (architecture.tiled_heads and stem in TILED):
        return _of_delta(source, name, stem, config, architecture)
    heads = 0
    if architecture.permuted_qk:
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(stored.split(".")[-2], 0)
    if len(shape) == 1:
        return GgufMatrix(
            shape=shape,
            matrices=[_column(source, name)],
            permuted_heads=heads,
            offset=architecture.norm_offset
            if stored.endswith("norm.weight") and stem not in architecture.plain_norms
            else 0.0,
        )
    squeezed = shape
    if stored.endswith(".ffn_gate_inp_shexp.weight"):  # the gate of the shared expert has one row: a vector in GGUF
        squeezed = shape[1:]
    elif stored.endswith(".exp_probs_b.bias"):  # ernie4_5_moe has it as a matrix of one row
        squeezed = shape[-1:]
    elif stored.endswith((".shortconv.conv.weight", ".ssm_conv1d.weight")):
        squeezed = _without_input_channel(shape)
    return GgufMatrix(shape=squeezed, matrices=[source.matrix(name)], permuted_heads=heads)


def _without_input_channel(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a convolution with one input channel, of which GGUF has no dimension."""
    return shape[0], shape[-1]


def _in_order(source: WeightSource, name: str, order: Tensor) -> GgufMatrix:
    """Return a tensor with its rows in another order.

    :param order: for each row of GGUF's, its index in the checkpoint's
    """
    shape = source.shape(name)
    whole = source.matrix(name) if len(shape) > 1 else _column(source, name)
    if shape[0] != len(order):
        raise malformed(source, name, f"tensor {shown(name)} has {shape[0]} rows: expected {len(order)}")
    return GgufMatrix(
        shape=shape if len(shape) < 3 else _without_input_channel(shape),
        matrices=[whole.rows(slice(first, end)) for first, end in runs(order)],
    )


def _of_delta(
    source: WeightSource, name: str, stem: str, config: DecoderConfig, architecture: GgufArchitecture
) -> GgufMatrix:
    """Return a tensor of gated delta networks, with value heads in GGUF's order, and rates instead of their logarithms.

    :param stem: GGUF's name within the layer
    """
    delta = _delta_of(config)
    heads = torch.arange(delta.num_value_heads)
    if architecture.tiled_heads:
        heads = tiled_heads(delta.num_key_heads, delta.num_value_heads)
    if stem == "ssm_out":
        return GgufMatrix(shape=source.shape(name), matrices=[source.matrix(name)], columns=(heads, delta.value_dim))
    if stem == RATES:
        logarithms = _column(source, name).weight
        if len(logarithms) != len(heads):
            raise malformed(source, name, f"tensor {shown(name)} has {len(logarithms)} numbers: expected {len(heads)}")
        return GgufMatrix(shape=(len(heads),), matrices=[DenseMatrix(-logarithms[heads].exp())])
    before = 2 * delta.key_width if stem in ("attn_qkv", "ssm_conv1d") else 0
    width = 1 if stem in ("ssm_alpha", "ssm_beta", "ssm_dt") else delta.value_dim
    return _in_order(source, name, rows_of_heads(heads, width, before))


def _delta_of(config: DecoderConfig) -> GatedDeltaConfig:
    delta = next(iter(config.recurrent_layers.values()))
    assert isinstance(delta, GatedDeltaConfig)
    return delta


def _mamba_of(config: DecoderConfig) -> Mamba2Config | None:
    found = next(iter(config.recurrent_layers.values()), None)
    return found if isinstance(found, Mamba2Config) else None


def _of_mamba(source: WeightSource, name: str, stem: str, mamba: Mamba2Config) -> GgufMatrix:
    """Return one of Mamba-2's vectors, with a row for each head or group of heads, and rates instead of logarithms.

    :param stem: GGUF's name within the layer
    """
    column = _column(source, name).weight
    count, width = (mamba.num_groups, mamba.width) if stem == "ssm_norm" else (mamba.num_heads, mamba.num_heads)
    if len(column) != width:
        raise malformed(source, name, f"tensor {shown(name)} has {len(column)} numbers: expected {width}")
    values = -column.exp() if stem == RATES else column
    return GgufMatrix(shape=(count, width // count), matrices=[DenseMatrix(values.view(count, -1))])


def _divided(source: WeightSource, name: str, stored: Sequence[str], config: DecoderConfig) -> dict[str, GgufMatrix]:
    """Split a fused projection: that of gated delta networks into one to queries, keys and values, and one to gates; or
    a gate and an up projection.
    """
    whole = source.matrix(name)
    order, heights = torch.arange(2 * config.intermediate_size), [config.intermediate_size] * 2
    if _mamba_of(config) is None:
        delta = _delta_of(config)
        order = qkvz_order(delta.num_key_heads, delta.num_value_heads, delta.key_dim, delta.value_dim)
        heights = [delta.channels, delta.value_width]
    if whole.shape[0] != len(order):
        raise malformed(source, name, f"tensor {shown(name)} has {whole.shape[0]} rows: expected {len(order)}")
    found: dict[str, GgufMatrix] = {}
    for own, rows in zip(stored, torch.split(order, heights), strict=True):
        matrices = [whole.rows(slice(first, end)) for first, end in runs(rows)]
        found[own] = GgufMatrix(shape=(len(rows), whole.shape[1]), matrices=matrices)
    return found


def _latent_up(source: WeightSource, name: str, stored: Sequence[str], config: DecoderConfig) -> dict[str, GgufMatrix]:
    """Split the projection of latent vectors into that to keys, transposed for each head, and that to values."""
    latent, heads, whole = config.latent, config.num_heads, source.matrix(name)
    assert latent is not None
    keys, values, rank = latent.nope_dim, latent.value_dim, latent.rank
    if whole.shape != (heads * (keys + values), rank):
        expected = f"expected {[heads * (keys + values), rank]}"
        raise malformed(source, name, f"tensor {shown(name)} has shape {list(whole.shape)}: {expected}")
    firsts = range(0, whole.shape[0], keys + values)
    of_keys = [whole.rows(slice(first, first + keys)) for first in firsts]
    of_values = [whole.rows(slice(first + keys, first + keys + values)) for first in firsts]
    return {
        stored[0]: GgufMatrix(shape=(heads, rank, keys), matrices=list(map(_transposed, of_keys))),
        stored[1]: GgufMatrix(shape=(heads, values, rank), matrices=of_values),
    }


def _transposed(matrix: StoredMatrix) -> DenseMatrix:
    """Return the transposed matrix, which is decoded when it is read."""

    def read(first: int, last: int) -> Tensor:
        return matrix.decoded(torch.float32).T[first:last].contiguous()

    rows, cols = matrix.shape
    return DenseMatrix(UnreadRows(shape=(cols, rows), itemsize=torch.float32.itemsize, read=read))


def _column(source: WeightSource, name: str) -> DenseMatrix:
    """Return a vector as a matrix with one column."""
    return DenseMatrix(source.tensor(name, torch.float32, torch.device("cpu")).view(-1, 1))


def _stack(source: WeightSource, stored: str, members: Mapping[int, str], config: DecoderConfig) -> GgufMatrix:
    if "_norm." in stored:
        return _norms_of_heads(source, stored, members, config)
    count = 0 if config.moe is None else config.moe.num_experts
    if sorted(members) != list(range(count)):
        raise malformed(source, stored, f"there are {len(members)} of the {count} experts of {shown(stored)}")
    matrices = [source.matrix(members[expert]) for expert in range(count)]
    return GgufMatrix(shape=(count, *matrices[0].shape), matrices=matrices)


def _norms_of_heads(source: WeightSource, stored: str, members: Mapping[int, str], config: DecoderConfig) -> GgufMatrix:
    count = config.num_heads if ".attn_q_norm." in stored else config.num_kv_heads
    if sorted(members) != list(range(count)):
        raise malformed(source, stored, f"there are {len(members)} of the {count} norms of {shown(stored)}")
    rows = [source.tensor(members[head], torch.float32, torch.device("cpu")).view(1, -1) for head in range(count)]
    return GgufMatrix(shape=(count, rows[0].shape[1]), matrices=[DenseMatrix(row) for row in rows])


def _merged_experts(
    source: WeightSource, name: str, stored: Sequence[str], config: DecoderConfig
) -> dict[str, GgufMatrix]:
    """Split the tensor in which transformers merges all experts of a layer."""
    assert config.moe is not None
    whole, count = source.matrix(name), config.moe.num_experts
    rows = config.hidden_size if len(stored) == 1 else config.moe.intermediate_size
    height = rows * len(stored)
    if whole.shape[0] != count * height:
        raise malformed(source, name, f"tensor {shown(name)} has {whole.shape[0]} rows: expected {count * height}")
    return {
        own: GgufMatrix(
            shape=(count, rows, whole.shape[1]),
            matrices=[whole.rows(slice(first, first + rows)) for first in range(part * rows, count * height, height)],
        )
        for part, own in enumerate(stored)
    }


def _rope_tensors(
    config: DecoderConfig, architecture: GgufArchitecture, divisors: Tensor | None
) -> dict[str, GgufMatrix]:
    rope = global_rope(config)
    tensors: dict[str, Iterable[float]] = {}
    if architecture.model_type == "gemma4_text":
        tensors["rope_freqs.weight"] = gemma4_divisors(config).tolist()
    elif divisors is not None:
        tensors["rope_freqs.weight"] = divisors.tolist()
    if rope.kind is RopeKind.LONGROPE:
        tensors |= {"rope_factors_long.weight": rope.long_factor, "rope_factors_short.weight": rope.short_factor}
    if tensors and architecture.model_type not in ("llama", "phi3", "gemma4_text"):
        raise not_writable(config, f"GGUF has no key for its rotary scaling ({rope.kind.value})")
    return {
        name: GgufMatrix(shape=(len(values),), matrices=[DenseMatrix(values.view(-1, 1))])
        for name, values in ((name, torch.tensor(list(each))) for name, each in tensors.items())
    }


def _permuted(rows: Tensor, head: int) -> Tensor:
    """Return rows in GGUF's order: within each head, the rows of its two halves interleaved."""
    heads = rows.numpy().reshape(-1, 2, head // 2, rows.shape[1])
    return torch.from_numpy(np.ascontiguousarray(heads.swapaxes(1, 2))).view(rows.shape)
