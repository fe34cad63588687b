"""Convert the names and values of a checkpoint's tensors to llama.cpp's conventions for GGUF.

:mod:`paged_sdk.weights.gguf.source` is the inverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from attrs import evolve
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.rope import RopeKind
from paged_sdk.errors import shown
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix, UnreadRows
from paged_sdk.weights.expert_stacks import are_transposed
from paged_sdk.weights.gguf.architecture import LATENT_UP, RATES, TILED, VECTORS, GgufArchitecture, stem_of
from paged_sdk.weights.gguf.config_export import gguf_architecture, not_writable
from paged_sdk.weights.gguf.export_matrix import GgufMatrix, column, in_order, without_input_channel
from paged_sdk.weights.gguf.export_places import CheckpointNames, architecture_of, gguf_places
from paged_sdk.weights.gguf.export_recurrent import delta_of, mamba_of, of_delta, of_mamba
from paged_sdk.weights.gguf.gemma4 import gemma4_divisors
from paged_sdk.weights.gguf.mamba import row_factors
from paged_sdk.weights.gguf.rope import DIVISORS, LONG_FACTORS, ROPE_TENSORS, SHORT_FACTORS, global_rope
from paged_sdk.weights.qkv_order import qkv_order, qkvz_order, runs
from paged_sdk.weights.source import WeightSource, malformed

__all__ = ["gguf_tensors"]


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


def _is_named(name: str, stem: str) -> bool:
    """Return whether a GGUF tensor is the weight of a name outside of the layers, or within one."""
    return name.endswith(".weight") and stem in (name.removesuffix(".weight"), stem_of(name))


def _place(name: str) -> int:
    """Return a tensor's sort key in the file: embeddings come first, then layers by number, then the output."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" else 1 << 20 if parts[0].startswith("output") else -1


def _one(
    source: WeightSource, name: str, stored: str, config: DecoderConfig, architecture: GgufArchitecture
) -> GgufMatrix:
    shape, stem = source.shape(name), stem_of(stored)
    if architecture.grouped_qkv and stem == "attn_qkv":
        return in_order(source, name, qkv_order(config.num_heads, config.num_kv_heads, config.head_dim))
    if stem in VECTORS and (mamba := mamba_of(config)) is not None:
        return of_mamba(source, name, stem, mamba)
    if stem == RATES or (architecture.tiled_heads and stem in TILED):
        return of_delta(source, name, stem, config, architecture)
    heads = 0
    if architecture.permuted_qk:
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(stored.split(".")[-2], 0)
    if len(shape) == 1:
        return GgufMatrix(
            shape=shape,
            matrices=[column(source, name)],
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
        squeezed = without_input_channel(shape)
    return GgufMatrix(shape=squeezed, matrices=[source.matrix(name)], permuted_heads=heads)


def _divided(source: WeightSource, name: str, stored: Sequence[str], config: DecoderConfig) -> dict[str, GgufMatrix]:
    """Split a fused projection: that of gated delta networks into one to queries, keys and values, and one to gates; or
    a gate and an up projection.
    """
    whole = source.matrix(name)
    if stem_of(stored[0]) == "attn_qkv":
        delta = delta_of(config)
        order = qkvz_order(delta.num_key_heads, delta.num_value_heads, delta.key_dim, delta.value_dim)
        heights = [delta.channels, delta.value_width]
    else:
        shared = None if config.moe is None else config.moe.shared_intermediate_size
        heights = [shared or config.intermediate_size] * 2
        order = torch.arange(sum(heights))
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


def _transposed(matrix: StoredMatrix, cols: slice | None = None) -> DenseMatrix:
    """Return the transposed matrix, which is decoded when it is read.

    :param cols: the columns that become its rows; None: all
    """
    start, stop, _ = (cols or slice(None)).indices(matrix.shape[1])

    def read(first: int, last: int) -> Tensor:
        return matrix.decoded(torch.float32)[:, start + first : start + last].T.contiguous()

    return DenseMatrix(UnreadRows(shape=(stop - start, matrix.shape[0]), itemsize=torch.float32.itemsize, read=read))


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
    """Split the tensor in which transformers merges all experts of a layer, of which some checkpoints have the matrices
    transposed.
    """
    assert config.moe is not None
    whole, count, is_down = source.matrix(name), config.moe.num_experts, stem_of(stored[0]) == "ffn_down_exps"
    hidden = config.moe.latent_size or config.hidden_size
    rows, cols = (hidden, config.moe.intermediate_size)[:: 1 if is_down else -1]
    height = rows * len(stored)
    if _are_transposed(source, name, config):
        each = [whole.rows(slice(first, first + cols)) for first in range(0, count * cols, cols)]
        return {
            own: GgufMatrix(
                shape=(count, rows, cols),
                matrices=[_transposed(matrix, slice(part * rows, (part + 1) * rows)) for matrix in each],
            )
            for part, own in enumerate(stored)
        }
    if whole.shape[0] != count * height:
        raise malformed(source, name, f"tensor {shown(name)} has {whole.shape[0]} rows: expected {count * height}")
    return {
        own: GgufMatrix(
            shape=(count, rows, whole.shape[1]),
            matrices=[whole.rows(slice(first, first + rows)) for first in range(part * rows, count * height, height)],
        )
        for part, own in enumerate(stored)
    }


def _are_transposed(source: WeightSource, name: str, config: DecoderConfig) -> bool:
    """Return whether a tensor of all experts has their matrices transposed."""
    assert config.moe is not None
    block = name.rpartition(".")[0]
    pair = f"{block}.gate_up_proj", f"{block}.down_proj"
    if not all(each in source for each in pair):
        return False
    return are_transposed(
        *map(source.shape, pair),
        hidden_size=config.hidden_size,
        intermediate_size=config.moe.intermediate_size,
    )


def _rope_tensors(
    config: DecoderConfig, architecture: GgufArchitecture, divisors: Tensor | None
) -> dict[str, GgufMatrix]:
    rope = global_rope(config)
    tensors: dict[str, Iterable[float]] = {}
    if architecture.model_type in ("gemma4_text", "gemma4_assistant"):
        tensors[DIVISORS] = gemma4_divisors(config).tolist()
    elif divisors is not None:
        tensors[DIVISORS] = divisors.tolist()
    if rope.kind is RopeKind.LONGROPE:
        tensors |= {LONG_FACTORS: rope.long_factor, SHORT_FACTORS: rope.short_factor}
    if not tensors.keys() <= {*ROPE_TENSORS.get(gguf_architecture(config), ())}:
        raise not_writable(config, f"GGUF has no key for its rotary scaling ({rope.kind.value})")
    return {
        name: GgufMatrix(shape=(len(values),), matrices=[DenseMatrix(values.view(-1, 1))])
        for name, values in ((name, torch.tensor(list(each))) for name, each in tensors.items())
    }
