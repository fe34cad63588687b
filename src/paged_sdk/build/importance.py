"""Apply llama.cpp's importance matrices to a checkpoint: weights of quantization errors by column."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import frozen
from torch import Tensor

from paged_sdk.build.calibration import calibrate
from paged_sdk.build.progress import LoadingBar
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.errors import UnsupportedArchitectureError
from paged_sdk.logs import get_logger
from paged_sdk.models.checkpoint_layout import names_in, read_shape
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import find_family
from paged_sdk.models.mtp_module import mtp_names
from paged_sdk.weights.checkpoint import Checkpoint
from paged_sdk.weights.gguf.architecture import EACH
from paged_sdk.weights.gguf.config_export import gguf_architecture
from paged_sdk.weights.gguf.export_places import CheckpointNames, GgufPlace, gguf_places
from paged_sdk.weights.gguf.export_recurrent import column_order
from paged_sdk.weights.gguf.mixtures import is_quantizable
from paged_sdk.weights.gguf.names import ARCHITECTURES
from paged_sdk.weights.importance import ImportanceMatrix, read_importance

__all__ = ["CheckpointImportance", "checkpoint_names", "load_importance"]

_log = get_logger(__name__)


@frozen(eq=False, kw_only=True)
class CheckpointImportance:
    """Holds an importance matrix, and the GGUF names of a checkpoint's tensors.

    :ivar places: by checkpoint name, the tensor's place in GGUF
    :ivar sizes: by GGUF name, the number of matrices in a tensor and their number of columns
    :ivar columns: by GGUF name, the index in GGUF of each of the checkpoint's columns, where the order is another
    """

    matrix: ImportanceMatrix
    places: Mapping[str, GgufPlace]
    sizes: Mapping[str, tuple[int, int]]
    columns: Mapping[str, Tensor]

    @property
    def source(self) -> str:
        """Return the importance matrix's name, for messages."""
        return self.matrix.source

    def of(self, name: str, index: tuple[int, ...]) -> Tensor | None:
        """Implement :attr:`paged_sdk.quant.policy.WeightPolicy.importance`."""
        place = self.places.get(name)
        if place is None:
            return None
        stored, member = place.names[0], 0
        if place.expert is not None:
            member = place.expert
        elif place.is_stack:
            member, *parts = index
            stored = place.names[parts[0] if parts else 0]
        found = self.matrix.column_weights(stored, *self.sizes[stored], only=member)
        if found is None:
            return None
        order = self.columns.get(stored)
        return found[0] if order is None else found[0][order]


def load_importance(
    checkpoint: Checkpoint, settings: BuildSettings, check_cancelled: Callable[[], None]
) -> CheckpointImportance | None:
    """Read the importance matrix that the settings name, or collect one; None: none is requested.

    :param check_cancelled: called regularly; an exception that it raises stops the work
    :raises CheckpointError: the file is not an importance matrix, or belongs to another model
    :raises UnsupportedArchitectureError: GGUF has no names for this model's tensors
    :raises ConfigError: the calibration text cannot be read
    """
    if settings.imatrix is None and settings.calibration_file is None:
        return None
    config = _config(checkpoint)
    if settings.imatrix is not None:
        matrix = read_importance(Path(os.path.expanduser(settings.imatrix)))
    else:
        assert settings.calibration_file is not None
        text = Path(os.path.expanduser(settings.calibration_file))
        with LoadingBar(f"Reading {text.name}", visible=settings.logging) as bar:

            def progress(done: int, total: int) -> None:
                check_cancelled()
                bar.update(done, total)

            matrix = calibrate(
                checkpoint.path, text, progress, setting="with_calibration_file", num_threads=settings.num_threads
            )
    return _of_checkpoint(matrix, checkpoint, config)


def checkpoint_names(checkpoint: Checkpoint) -> CheckpointNames:
    """Return the naming scheme of the checkpoint, among those of its family."""
    family, source = find_family(checkpoint.config), checkpoint.source
    names, shape = names_in(source, family), family.read(ConfigFields(checkpoint.config))
    has_mtp = mtp_names(source, names, shape.num_layers) is not None
    layer = names.layer(0)
    experts = next((each for each in names.experts if f"{layer}{each.block}.gate.weight" in source), None)
    if experts is None:
        return CheckpointNames(body=names.body, head=names.head, has_mtp=has_mtp)
    each = f"{experts.block}.experts.{EACH}"
    return CheckpointNames(
        body=names.body,
        head=names.head,
        has_mtp=has_mtp,
        experts={
            "ffn_gate_inp": f"{experts.block}.gate",
            **({} if experts.gate is None else {"ffn_gate_exps": f"{each}.{experts.gate}"}),
            "ffn_up_exps": f"{each}.{experts.up}",
            "ffn_down_exps": f"{each}.{experts.down}",
        },
    )


def _config(checkpoint: Checkpoint) -> DecoderConfig:
    try:
        config, _ = read_shape(checkpoint.config, checkpoint.source)
        gguf_architecture(config)
    except UnsupportedArchitectureError as error:
        raise UnsupportedArchitectureError(
            f"{checkpoint.path}: importance matrices have no names for the tensors of a {error.architecture} model; "
            "with_isq (--isq) quantizes it without one",
            path=checkpoint.path,
            architecture=error.architecture,
            supported=ARCHITECTURES,
        ) from error
    return config


def _of_checkpoint(matrix: ImportanceMatrix, checkpoint: Checkpoint, config: DecoderConfig) -> CheckpointImportance:
    """Match an importance matrix with a checkpoint.

    :raises CheckpointError: it belongs to another model
    """
    source = checkpoint.source
    found = gguf_places(source.names(), config, checkpoint_names(checkpoint))
    places = {name: place for name, place in found.items() if place is not None}
    count = 1 if config.moe is None else config.moe.num_experts
    sizes: dict[str, tuple[int, int]] = {}
    wanted: dict[str, None] = {}
    for name, place in places.items():
        shape = source.shape(name)
        for own in place.names:
            sizes[own] = (count if place.is_stack else 1), shape[-1]
            if is_quantizable(own, shape):
                wanted[own] = None
    matrix.check_model(sizes, wanted)
    orders = {own: column_order(config, own) for own in sizes}
    columns = {own: order.argsort() for own, order in orders.items() if order is not None}
    _log.info("Errors of quantized weights are weighted by %s.", matrix.source)
    return CheckpointImportance(matrix=matrix, places=places, sizes=sizes, columns=columns)
