"""Convert the values of recurrent layers' tensors to llama.cpp's conventions for GGUF."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.recurrent import GatedDeltaConfig, Mamba2Config
from paged_sdk.errors import shown
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix
from paged_sdk.weights.gguf.architecture import RATES, GgufArchitecture
from paged_sdk.weights.gguf.config_export import gguf_architecture
from paged_sdk.weights.gguf.export_matrix import GgufMatrix, column, in_order
from paged_sdk.weights.gguf.names import ARCHITECTURES
from paged_sdk.weights.qkv_order import rows_of_heads, tiled_heads
from paged_sdk.weights.source import WeightSource, malformed

__all__ = ["column_order", "delta_of", "mamba_of", "of_delta", "of_mamba"]


def column_order(config: DecoderConfig, stored: str) -> Tensor | None:
    """Return the indices of a checkpoint's columns in GGUF's order, int64; None if the order is the same.

    :param stored: the name of the GGUF tensor
    """
    if not ARCHITECTURES[gguf_architecture(config)].tiled_heads or not stored.endswith(".ssm_out.weight"):
        return None
    delta = delta_of(config)
    return rows_of_heads(tiled_heads(delta.num_key_heads, delta.num_value_heads), delta.value_dim)


def of_delta(
    source: WeightSource, name: str, stem: str, config: DecoderConfig, architecture: GgufArchitecture
) -> GgufMatrix:
    """Return a tensor of gated delta networks, with value heads in GGUF's order, and rates instead of their logarithms.

    :param stem: GGUF's name within the layer
    """
    delta = delta_of(config)
    heads = torch.arange(delta.num_value_heads)
    if architecture.tiled_heads:
        heads = tiled_heads(delta.num_key_heads, delta.num_value_heads)
    if stem == "ssm_out":
        return GgufMatrix(shape=source.shape(name), matrices=[source.matrix(name)], columns=(heads, delta.value_dim))
    if stem == RATES:
        logarithms = column(source, name).weight
        if len(logarithms) != len(heads):
            raise malformed(source, name, f"tensor {shown(name)} has {len(logarithms)} numbers: expected {len(heads)}")
        return GgufMatrix(shape=(len(heads),), matrices=[DenseMatrix(-logarithms[heads].exp())])
    before = 2 * delta.key_width if stem in ("attn_qkv", "ssm_conv1d") else 0
    width = 1 if stem in ("ssm_alpha", "ssm_beta", "ssm_dt") else delta.value_dim
    return in_order(source, name, rows_of_heads(heads, width, before))


def of_mamba(source: WeightSource, name: str, stem: str, mamba: Mamba2Config) -> GgufMatrix:
    """Return one of Mamba-2's vectors, with a row for each head or group of heads, and rates instead of logarithms.

    :param stem: GGUF's name within the layer
    """
    vector = column(source, name).weight
    count, width = (mamba.num_groups, mamba.width) if stem == "ssm_norm" else (mamba.num_heads, mamba.num_heads)
    if len(vector) != width:
        raise malformed(source, name, f"tensor {shown(name)} has {len(vector)} numbers: expected {width}")
    values = -vector.exp() if stem == RATES else vector
    return GgufMatrix(shape=(count, width // count), matrices=[DenseMatrix(values.view(count, -1))])


def delta_of(config: DecoderConfig) -> GatedDeltaConfig:
    """Return the shape of a model's gated delta networks, which its recurrent layers are."""
    delta = next(iter(config.recurrent_layers.values()))
    assert isinstance(delta, GatedDeltaConfig)
    return delta


def mamba_of(config: DecoderConfig) -> Mamba2Config | None:
    """Return the shape of a model's Mamba-2 layers; None if its recurrent layers, if any, are others."""
    found = next(iter(config.recurrent_layers.values()), None)
    return found if isinstance(found, Mamba2Config) else None
