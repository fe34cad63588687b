"""Read the GGUF format: metadata, the table of tensors, and the tensors' data.

See https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

from paged_sdk.errors import CheckpointError, UnsupportedQuantizationError, shown
from paged_sdk.kernels.quantized.gguf_blocks import block_format
from paged_sdk.system.files import is_file
from paged_sdk.weights.gguf.ggml_file import GGJT, read_ggml
from paged_sdk.weights.gguf.metadata import ARRAY, GgufCursor
from paged_sdk.weights.gguf.split import split_parts
from paged_sdk.weights.gguf.tensor import GgufTensor
from paged_sdk.weights.gguf.writer import GgufValue
from paged_sdk.weights.weight_file import WeightFile

__all__ = ["GgufFile", "open_gguf", "tensors_of_parts"]

_MAGIC = b"GGUF"
_LEGACY_MAGICS = frozenset({b"ggml", b"ggmf", b"ggla"})
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
# The largest models in use have some 50 keys, 2,000 tensors and 100 parts.
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 18
_MAX_PARTS = 1024


class GgufFile:
    """Reads one GGUF file: metadata and the table of tensors on construction, tensors' data on demand.

    A llama file in the older ggjt format is presented as the equivalent GGUF file.

    :ivar path: the file
    :ivar metadata: the values by GGUF key: int, float, bool, str, or lists of these
    :ivar metadata_types: the GGUF type id of each value by key, and that of the entries if the value is an array
    :ivar tensors: the tensors by GGUF name
    :raises CheckpointError: the file is missing, truncated, malformed, big endian, or of an older format
    :raises UnsupportedQuantizationError: a tensor has a type that cannot be decoded
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any]
        self.metadata_types: dict[str, tuple[int, int | None]] = {}
        self.tensors: dict[str, GgufTensor]
        self._file = WeightFile(path)
        try:
            self._read_head()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; tensors that were read stay valid."""
        self._file.close()

    def _read_head(self) -> None:
        """Read all that comes before the tensors' data."""
        cursor = GgufCursor(self._file)
        magic = cursor.head(len(_MAGIC))
        if magic == GGJT:
            self.metadata, self.tensors = read_ggml(self._file)
            values = {key: GgufValue.of(value) for key, value in self.metadata.items()}
            self.metadata_types = {key: (value.kind, value.inner) for key, value in values.items()}
            return
        self._check_magic(magic)
        self._check_version(cursor.u32())
        num_tensors, num_values = cursor.u64(), cursor.u64()
        if num_values > _MAX_KEYS or num_tensors > _MAX_TENSORS:
            raise cursor.malformed(f"it has {num_values} metadata keys and {num_tensors} tensors")
        self.metadata = self._read_metadata(cursor, num_values)
        self.tensors = self._read_tensors(cursor, num_tensors)

    def _check_magic(self, magic: bytes) -> None:
        if magic == _MAGIC:
            return
        if magic[::-1] == _MAGIC:
            raise self._refused("is a big-endian GGUF file: use a little-endian one, or convert the model again")
        if _LEGACY_MAGICS & {magic.lower(), magic[::-1].lower()}:
            raise self._refused("is in a format older than GGUF: use a GGUF version, or convert the model again")
        raise self._refused(
            f"is not a GGUF file: it begins with {shown(magic)}, not {shown(_MAGIC)}; "
            "if it should be one, download it again"
        )

    def _check_version(self, version: int) -> None:
        if version in _VERSIONS:
            return
        if version and version & 0xFFFF == 0:
            raise self._refused("is a big-endian GGUF file: use a little-endian one, or convert the model again")
        raise self._refused(f"is GGUF version {version}: supported are 2 and 3; convert the model again")

    def _read_metadata(self, cursor: GgufCursor, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = cursor.string()
            if key in metadata:
                raise cursor.malformed(f"it has metadata key {shown(key)} twice")
            kind = cursor.u32()
            self.metadata_types[key] = kind, cursor.next_u32() if kind == ARRAY else None
            metadata[key] = cursor.value(kind)
        return metadata

    def _read_tensors(self, cursor: GgufCursor, count: int) -> dict[str, GgufTensor]:
        table = [self._read_entry(cursor) for _ in range(count)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise cursor.malformed(f"general.alignment is {shown(alignment)}, not a multiple of 8")
        data_start = -(-cursor.offset // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, tensor_type, offset in table:
            if name in tensors:
                raise cursor.malformed(f"it has tensor {shown(name)} twice")
            tensors[name] = self._tensor(cursor, name, shape, tensor_type, data_start + offset)
        in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for first, second in pairwise(in_order):
            if first.offset + first.num_bytes > second.offset:
                raise cursor.malformed(f"tensors {shown(first.name)} and {shown(second.name)} overlap")
        return tensors

    def _read_entry(self, cursor: GgufCursor) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = cursor.string(), cursor.u32()
        if not 1 <= num_dims <= _MAX_DIMS:
            raise cursor.malformed(f"tensor {shown(name)} has {num_dims} dimensions")
        shape = tuple(cursor.u64() for _ in range(num_dims))[::-1]
        return name, shape, cursor.u32(), cursor.u64()

    def _tensor(
        self, cursor: GgufCursor, name: str, shape: tuple[int, ...], tensor_type: int, offset: int
    ) -> GgufTensor:
        try:
            form = block_format(tensor_type)
        except UnsupportedQuantizationError as error:
            raise UnsupportedQuantizationError(
                f"{self.path}: tensor {shown(name)}: {error}",
                path=self.path,
                quantization=error.quantization,
                supported=error.supported,
            ) from None
        if not all(shape) or shape[-1] % form.elements:
            raise cursor.malformed(f"tensor {shown(name)} of type {form.name} has shape {list(shape)}")
        num_bytes = math.prod(shape) // form.elements * form.num_bytes
        if offset % 8:
            raise cursor.malformed(f"tensor {shown(name)} is not aligned")
        if offset + num_bytes > self._file.size:
            raise cursor.malformed(
                f"it is cut off: tensor {shown(name)} ends at byte {offset + num_bytes}, the file has {self._file.size}"
            )
        return GgufTensor(name, shape, tensor_type, self._file, offset, num_bytes)

    def _refused(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {what}", path=self.path)


def open_gguf(path: Path) -> list[GgufFile]:
    """Open a GGUF file, and if it is part of a split model, all other parts. After an error none stays open.

    :param path: the file, or any part
    :returns: the parts in order; the first has the model's metadata
    :raises CheckpointError: a part is missing, or one cannot be read: see :class:`GgufFile`
    :raises UnsupportedQuantizationError: a tensor has a type that cannot be decoded
    """
    with ExitStack() as on_error:
        file = on_error.enter_context(closing(GgufFile(path)))
        parts = [
            file if part == path else on_error.enter_context(closing(GgufFile(part)))
            for part in _paths_of_parts(path, file.metadata.get("split.count", 1))
        ]
        on_error.pop_all()
    return parts


def _paths_of_parts(path: Path, count: Any) -> list[Path]:
    """Return the paths of all parts of a model, in order.

    :param path: one of them
    :param count: their number, as the file says
    :raises CheckpointError: there are too many, or some are missing
    """
    if count in (0, 1):
        return [path]
    if not isinstance(count, int) or not 0 < count <= _MAX_PARTS:
        raise CheckpointError(f"{path} is one part of {str(count)[:40]}: at most {_MAX_PARTS} can be read", path=path)
    parts = [path.with_name(name) for name in split_parts(path.name)]
    if len(parts) != count:
        raise CheckpointError(
            f"{path} is one part of {count}: keep their original names, which end in -00001-of-00002.gguf and so on",
            path=path,
        )
    missing = [part.name for part in parts if not is_file(part)]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{path} is one part of {count}: put {', '.join(missing[:3])}{more} into the same directory",
            path=path,
        )
    return parts


def tensors_of_parts(files: Iterable[GgufFile]) -> dict[str, GgufTensor]:
    """Return the tensors of all parts of a model, by GGUF name.

    :raises CheckpointError: two parts have a tensor of the same name
    """
    tensors: dict[str, GgufTensor] = {}
    for file in files:
        if twice := tensors.keys() & file.tensors:
            raise CheckpointError(f"{file.path} repeats tensor {shown(min(twice))} of another part", path=file.path)
        tensors |= file.tensors
    return tensors
