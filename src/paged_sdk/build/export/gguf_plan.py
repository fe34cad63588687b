"""Plan a GGUF file from a checkpoint, write it, and compare it with the checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, fields, frozen
from torch import Tensor

from paged_sdk.build.calibration import CHUNK_TOKENS, calibrate
from paged_sdk.build.collector import collector_paused
from paged_sdk.build.export.gguf_encoding import TensorEncoder, tensor_encoder
from paged_sdk.build.importance import checkpoint_names
from paged_sdk.build.progress import LoadingBar
from paged_sdk.build.topology import gguf_overrides
from paged_sdk.chat.gguf_tokenizer_export import gguf_from_text_processor
from paged_sdk.chat.text_processor import load_text_processor
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.moe import MoeConfig
from paged_sdk.config.rope import RopeConfig, RopeKind
from paged_sdk.config.topology import Topology
from paged_sdk.errors import CheckpointError, ConfigError, UnsupportedArchitectureError, shown
from paged_sdk.kernels.quantized.gguf_blocks import block_format, tensor_type_of
from paged_sdk.layers.rotary import RotaryEmbedding
from paged_sdk.logs import get_logger
from paged_sdk.models.checkpoint_layout import read_shape
from paged_sdk.models.family import has_head, read_config
from paged_sdk.weights.checkpoint import Checkpoint, open_checkpoint, refuse_other_files
from paged_sdk.weights.gguf.config import must_be_model
from paged_sdk.weights.gguf.config_export import config_metadata, gguf_architecture, with_mtp_layer
from paged_sdk.weights.gguf.export import gguf_tensors
from paged_sdk.weights.gguf.export_matrix import GgufMatrix
from paged_sdk.weights.gguf.file import GgufFile, open_gguf, tensors_of_parts
from paged_sdk.weights.gguf.layer_numbers import number_metadata
from paged_sdk.weights.gguf.mamba import with_factors_in_weights
from paged_sdk.weights.gguf.mixtures import PLAIN_TYPES, ModelShape, file_type, tensor_types
from paged_sdk.weights.gguf.rope import global_rope
from paged_sdk.weights.gguf.source import GgufSource
from paged_sdk.weights.gguf.tensor import GgufTensor, stored_matrix
from paged_sdk.weights.gguf.writer import GgufValue, PlannedTensor, write_gguf_file
from paged_sdk.weights.hub import resolve_model
from paged_sdk.weights.importance import ImportanceMatrix, read_importance, write_importance
from paged_sdk.weights.new_target import must_be_new, new_file

__all__ = ["write"]

_log = get_logger(__name__)

_CPU: Final = torch.device("cpu")
_BYTES_AT_ONCE: Final = 1 << 25
_QUANTIZATION_VERSION: Final = 2
_F32: Final = tensor_type_of("F32")
# Keys of the source file that the written file sets itself.
_REPLACED_KEYS: Final = ("general.file_type", "general.quantization_version", "general.alignment")
_CLOSE: Final = 1e-5
# Architectures that have sliding windows in llama.cpp.
_WITH_WINDOWS: Final = frozenset(
    {"gemma2", "gemma3", "gemma4", "olmo2", "exaone4", "exaone-moe", "cohere2", "afmoe"},
)


def write(
    source: str | Path,
    target: str | Path,
    type: str,
    overrides: Sequence[tuple[str, str]],
    imatrix: str | Path | None,
    calibrate_on: str | Path | None,
    imatrix_out: str | Path | None,
    topology: Topology | None,
    *,
    show_progress: bool,
) -> Path:
    """Implement :func:`paged_sdk.build.export.gguf.write_gguf`."""
    target = Path(os.path.expanduser(target))
    must_be_new(target)
    path = resolve_model(source)
    importance = _importance(path, imatrix, calibrate_on, imatrix_out, show_progress=show_progress)
    wanted = _Wanted(type, overrides, importance, topology)
    with tensor_encoder() as encoder:
        make = _from_directory if path.is_dir() else _from_gguf
        plan = make(path, wanted, encoder)
        try:
            total = sum(tensor.num_bytes for tensor in plan.tensors)
            with (
                new_file(target, total) as part,
                LoadingBar(f"Writing {target.name}", visible=show_progress) as bar,
            ):
                write_gguf_file(part, plan.metadata, plan.tensors, on_progress=bar.update)
                plan.check(part)
        finally:
            plan.close()
    return target


def _importance(
    path: Path,
    imatrix: str | Path | None,
    calibrate_on: str | Path | None,
    imatrix_out: str | Path | None,
    *,
    show_progress: bool,
) -> ImportanceMatrix | None:
    """Read an importance matrix, collect one, or add a collected one to the one read; None: none is requested.

    :raises ConfigError: ``imatrix_out`` is given, but nothing is collected
    """
    read = None if imatrix is None else read_importance(Path(os.path.expanduser(imatrix)))
    if calibrate_on is None:
        if imatrix_out is not None:
            raise ConfigError.of("imatrix_out", str(imatrix_out), "None where nothing is calibrated")
        return read
    kept = None if imatrix_out is None else Path(os.path.expanduser(imatrix_out))
    # Checked before calibration, which takes long.
    if read is not None:
        read.must_count_tokens()
    if kept is not None:
        must_be_new(kept, setting="imatrix_out")
    text = Path(os.path.expanduser(calibrate_on))
    with LoadingBar(f"Reading {text.name}", visible=show_progress) as bar:
        found = calibrate(path, text, bar.update)
    if read is not None:
        found = read.plus(found)
    if kept is not None:
        write_importance(found, kept, chunk_tokens=CHUNK_TOKENS, setting="imatrix_out")
    return found


@frozen
class _Wanted:
    """Decides the types of the written tensors; see :func:`paged_sdk.build.export.gguf.write_gguf`."""

    type: str
    overrides: Sequence[tuple[str, str]]
    importance: ImportanceMatrix | None
    topology: Topology | None

    def types(self, shapes: Mapping[str, tuple[int, ...]], model: ModelShape, architecture: str) -> dict[str, int]:
        """Return the type of each tensor, except for tensors that keep their values exactly."""
        by_layer: list[tuple[str, str]] = []
        if self.topology is not None:
            by_layer = gguf_overrides(self.topology, architecture, shapes, num_layers=model.num_layers)
        types = tensor_types(self.type, shapes, model, [*by_layer, *self.overrides])
        if self.importance is not None:
            self.importance.check_model({name: _matrices(shape) for name, shape in shapes.items()}, types)
        return types

    def importance_of(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return the weights of errors in the columns of a tensor's matrices; None: unweighted."""
        if self.importance is None or len(shape) < 2:
            return None
        return self.importance.column_weights(name, *_matrices(shape))


def _matrices(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of matrices in a tensor, and their number of columns."""
    return math.prod(shape[:-2]), shape[-1]


@frozen(kw_only=True)
class _Plan:
    """Describes the file to write.

    :ivar check: raises if the written file does not describe the same model as its source
    :ivar close: closes the source
    """

    metadata: Mapping[str, GgufValue]
    tensors: Sequence[PlannedTensor]
    check: Callable[[Path], None]
    close: Callable[[], None]


def _from_directory(path: Path, wanted: _Wanted, encoder: TensorEncoder) -> _Plan:
    checkpoint = open_checkpoint(path)
    try:
        return _from_checkpoint(checkpoint, wanted, encoder)
    except BaseException:
        checkpoint.source.close()
        raise


def _from_checkpoint(checkpoint: Checkpoint, wanted: _Wanted, encoder: TensorEncoder) -> _Plan:
    (config, _), path = read_shape(checkpoint.config, checkpoint.source), checkpoint.path
    if not has_head(checkpoint.config) or config.bidirectional:
        lacks = "is an encoder" if config.bidirectional else "has no output projection"
        raise UnsupportedArchitectureError(
            f"{path} {lacks} (architectures = {checkpoint.config['architectures']}), and is not written as a GGUF file",
            path=path,
            architecture=config.model_type,
        )
    values = config_metadata(config, _attention_factor(global_rope(config)))
    names = checkpoint_names(checkpoint)
    if names.has_mtp:
        values = with_mtp_layer(values)
    stored = gguf_tensors(checkpoint.source, config, names, _divisors(global_rope(config)))
    shape = ModelShape(
        num_layers=config.num_layers,
        queries_per_key=config.num_heads // config.num_kv_heads,
        num_experts=0 if config.moe is None else config.moe.num_experts,
        has_output="output.weight" in stored,
    )
    architecture = next(iter(values)).partition(".")[0]
    types = wanted.types({name: tensor.shape for name, tensor in stored.items()}, shape, architecture)
    with collector_paused():
        text = load_text_processor(path)
        try:
            tokenizer = gguf_from_text_processor(text, architecture, config.vocab_size)
        finally:
            text.close()
    metadata = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": path.resolve().name,
        **_written_keys(wanted),
        **values,
        **number_metadata(checkpoint.source, config, names),
        **tokenizer,
    }
    return _Plan(
        metadata={key: GgufValue.of(value) for key, value in metadata.items()},
        tensors=[
            PlannedTensor(
                name=name,
                shape=tensor.shape,
                type=types.get(name, _F32),
                parts=partial(_encoded, encoder, wanted, name, types.get(name, _F32), tensor),
            )
            for name, tensor in stored.items()
        ],
        check=partial(_check_written_file, config),
        close=checkpoint.source.close,
    )


def _from_gguf(path: Path, wanted: _Wanted, encoder: TensorEncoder) -> _Plan:
    refuse_other_files(path)
    files = open_gguf(path)

    def close() -> None:
        for file in files:
            file.close()

    try:
        return _from_parts(files, path, wanted, encoder, close)
    except BaseException:
        close()
        raise


def _from_parts(
    files: Sequence[GgufFile], path: Path, wanted: _Wanted, encoder: TensorEncoder, close: Callable[[], None]
) -> _Plan:
    """Plan a file from the parts of another; a model in one file has one part.

    :param close: closes the parts
    """
    first = files[0]
    must_be_model(first.metadata, path)
    if "general.architecture" not in first.metadata:
        raise CheckpointError(f"{path} does not say its architecture", path=path)
    stored = tensors_of_parts(files)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    types = wanted.types(shapes, _shape_of(first, stored), str(first.metadata["general.architecture"]))
    kept = {
        key: GgufValue(value, *first.metadata_types[key])
        for key, value in first.metadata.items()
        if not key.startswith("split.") and key not in _REPLACED_KEYS
    }
    planned = []
    for name, tensor in stored.items():
        number = types.get(name, tensor.type)
        matrix = GgufMatrix(shape=tensor.shape, matrices=[stored_matrix(tensor.type, tensor.unread_rows())])
        as_it_is, anew = partial(_copied, tensor), partial(_encoded, encoder, wanted, name, number, matrix)
        parts = as_it_is if number == tensor.type else anew
        planned.append(PlannedTensor(name=name, shape=tensor.shape, type=number, parts=parts))

    def check(part: Path) -> None:
        GgufFile(part).close()

    metadata = kept | {key: GgufValue.of(value) for key, value in _written_keys(wanted).items()}
    return _Plan(metadata=metadata, tensors=planned, check=check, close=close)


def _written_keys(wanted: _Wanted) -> dict[str, Any]:
    keys = {"general.file_type": file_type(wanted.type), "general.quantization_version": _QUANTIZATION_VERSION}
    if wanted.importance is None:
        return keys
    return keys | {
        "quantize.imatrix.file": Path(wanted.importance.source).name,
        "quantize.imatrix.entries_count": len(wanted.importance.sums),
    }


def _shape_of(file: GgufFile, tensors: Mapping[str, GgufTensor]) -> ModelShape:
    """Return the properties of a model that mixtures depend on; keys that are missing or not a positive number get
    defaults.
    """

    def number(key: str, default: int) -> int:
        value = file.metadata.get(f"{file.metadata.get('general.architecture')}.{key}", default)
        return value if isinstance(value, int) and value > 0 else default

    heads = number("attention.head_count", 1)
    return ModelShape(
        num_layers=number("block_count", 1),
        queries_per_key=max(1, heads // number("attention.head_count_kv", heads)),
        num_experts=number("expert_count", 0),
        has_output="output.weight" in tensors,
    )


def _copied(tensor: GgufTensor) -> Iterator[npt.NDArray[np.uint8]]:
    rows = tensor.unread_rows()
    step = max(1, _BYTES_AT_ONCE // rows.shape[1])
    for first in range(0, rows.shape[0], step):
        yield rows[first : first + step].tensor().numpy()


def _encoded(
    encoder: TensorEncoder, wanted: _Wanted, name: str, tensor_type: int, matrix: GgufMatrix
) -> Iterator[npt.NDArray[np.uint8]]:
    is_plain = block_format(tensor_type).name in PLAIN_TYPES
    return encoder.encoded(name, tensor_type, matrix, None if is_plain else wanted.importance_of(name, matrix.shape))


def _divisors(rope: RopeConfig) -> Tensor | None:
    """Return the divisors of rotary frequencies that GGUF stores (rope_freqs); None: none."""
    if rope.kind is RopeKind.LLAMA3:
        plain = evolve(rope, kind=RopeKind.DEFAULT, inv_freq_divisors=())
        return _frequencies(plain) / _frequencies(rope)
    return torch.tensor(rope.inv_freq_divisors, dtype=torch.float32) if rope.inv_freq_divisors else None


def _frequencies(rope: RopeConfig) -> Tensor:
    """Return the rotary frequencies: the angles at position 1, in radians."""
    rotation = RotaryEmbedding(rope, device=_CPU).at(torch.tensor([1]))
    return torch.atan2(rotation.sin[0, 0, 1], rotation.cos[0, 0, 0])


def _attention_factor(rope: RopeConfig) -> float:
    return float(RotaryEmbedding(rope, device=_CPU).at(torch.tensor([0])).cos[0, 0, 0, 0])


def _check_written_file(config: DecoderConfig, path: Path) -> None:
    """Read the config of a written file, and compare it with the checkpoint's.

    :raises UnsupportedArchitectureError: they differ, since GGUF cannot express a setting
    """
    source = GgufSource(path)
    try:
        read = read_config(source.config)
    finally:
        source.close()
    config = with_factors_in_weights(config)
    has_windows = gguf_architecture(config) in _WITH_WINDOWS
    for field in fields(DecoderConfig):
        own, other = getattr(config, field.name), getattr(read, field.name)
        match field.name:
            case "model_type":
                continue
            case "intermediate_size" if not _has_dense_mlps(config):
                continue
            case "layer_inputs" if own is not None and other is not None:
                is_equal = evolve(own, image_token=other.image_token) == other  # files hold no images
            case "ropes":
                is_equal = all(_rotate_alike(*pair) for pair in zip(own, other, strict=True))
            case "sliding_windows" if not has_windows:
                if own != other:
                    window = min(width for width in own if width is not None)
                    _log.warning("GGUF has no sliding windows for this model: texts of %d tokens have none.", window)
                continue
            case "assistant" if own is not None:
                is_equal = evolve(own, num_clusters=0, num_searched=0) == other  # llama.cpp reads no clusters
            case "latent" if own is not None and other is not None:
                if not math.isclose(own.norm_eps, other.norm_eps, rel_tol=_CLOSE):
                    _log.warning("GGUF has one epsilon for all norms: those of latent vectors get %g.", other.norm_eps)
                is_equal = evolve(own, norm_eps=other.norm_eps) == other
            case "moe" if own is not None and other is not None:
                is_equal = all(
                    _is_close(getattr(own, each.name), getattr(other, each.name)) for each in fields(MoeConfig)
                )
            case _:
                is_equal = _is_close(own, other)
        if not is_equal:
            raise UnsupportedArchitectureError(
                f"a {config.model_type} model cannot be written: its {field.name} {shown(own)} would be read as "
                f"{shown(other)} from a GGUF file",
                architecture=config.model_type,
            )


def _is_close(own: object, other: object) -> bool:
    """Return whether two values are the same, numbers up to the rounding of a file's float32."""
    if isinstance(own, float) and isinstance(other, float):
        return math.isclose(own, other, rel_tol=_CLOSE)
    return own == other


def _has_dense_mlps(config: DecoderConfig) -> bool:
    moe = config.moe
    return (
        moe is None
        or moe.beside_mlp
        or any(config.has_mlp(layer) for layer in range(config.num_layers) if layer not in moe.layers)
    )


def _rotate_alike(first: RopeConfig, second: RopeConfig) -> bool:
    if any(getattr(first, name) != getattr(second, name) for name in ("switch", "rotary_dim", "axis_of_frequency")):
        return False
    if not math.isclose(first.query_scale_beta, second.query_scale_beta, rel_tol=_CLOSE):
        return False
    if first.query_scale_beta and first.original_max_position != second.original_max_position:
        return False
    positions, is_long = torch.tensor([0, 1, 7, 7]), torch.tensor([False, False, False, True])
    own, other = (RotaryEmbedding(each, device=_CPU).at(positions, is_long) for each in (first, second))
    pairs = ((own.cosines, other.cosines), (own.sines, other.sines))
    return all(torch.allclose(*pair, rtol=0, atol=_CLOSE) for pair in pairs)
