"""Read a checkpoint's shape, and which of its family's tensor names it uses."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

import torch
from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.logs import get_logger
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, find_family
from paged_sdk.models.tensor_names import TensorNames
from paged_sdk.weights.source import WeightSource

__all__ = ["have_same_values", "names_in", "read_shape", "stored_table"]

_log = get_logger(__name__)

_ELEMENTS_AT_ONCE: Final = 1 << 22


def read_shape(config: Mapping[str, Any], source: WeightSource) -> tuple[DecoderConfig, TensorNames]:
    """Read the shape of a checkpoint's decoder, and which of its family's tensor names it uses.

    If the config ties the output projection to the embeddings but the checkpoint holds another one, as some fine-tuned
    models do, the checkpoint's is used, as in transformers.

    :param config: ``config.json``'s content
    :raises UnsupportedArchitectureError: no family has this ``model_type``
    :raises CheckpointError: the config is invalid
    """
    family = find_family(config)
    shape, names = family.read(ConfigFields(config)), names_in(source, family)
    head = f"{names.head}.weight"
    has_both = shape.tie_embeddings and head in source and names.table in source
    if has_both and not have_same_values(source, head, names.table):
        _log.warning("By its config, %s is %s: the checkpoint holds another one, which is used.", head, names.table)
        shape = evolve(shape, tie_embeddings=False)
    return shape, names


def names_in(source: WeightSource, family: DecoderFamily) -> TensorNames:
    """Return those of the family's tensor names that the checkpoint uses; if none match, the usual ones, for the error
    message.

    Most checkpoints saved without an output projection lack the body's prefix.
    """
    known = (*family.names, *(evolve(names, body="") for names in family.names))
    found = next((names for names in known if names.table in source), None)
    # Embeddings may be saved only under the output projection's name; then the last norm decides.
    return found or next((names for names in known if f"{names.body}{names.norms.last}.weight" in source), known[0])


def stored_table(stored: Container[str], config: DecoderConfig, names: TensorNames) -> str:
    """Return the name of the tensor that holds the embeddings; tied embeddings may be saved only under the output
    projection's name.

    :param stored: the names of the checkpoint's tensors
    """
    head = f"{names.head}.weight"
    return head if config.tie_embeddings and names.table not in stored and head in stored else names.table


def have_same_values(source: WeightSource, first: str, second: str) -> bool:
    """Return whether two tensors of a checkpoint have the same shape and, if matrices, the same values, reading some
    rows at a time.
    """
    shape = source.shape(first)
    if shape != source.shape(second) or len(shape) != 2:
        return shape == source.shape(second)
    one, other = source.matrix(first), source.matrix(second)
    rows, cols = shape
    step = max(1, _ELEMENTS_AT_ONCE // max(1, cols))
    parts = (slice(row, row + step) for row in range(0, rows, step))
    return all(_are_equal(one.rows(part), other.rows(part)) for part in parts)


def _are_equal(first: StoredMatrix, second: StoredMatrix) -> bool:
    # Values of the same dtype are compared without conversion, which would take most of the time.
    one, other = (each.weight if isinstance(each, DenseMatrix) else each.decoded() for each in (first, second))
    return torch.equal(one, other) if one.dtype == other.dtype else torch.equal(one.double(), other.double())
