"""Write safetensors files, with one tensor in memory at a time."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

__all__ = ["NewTensor", "write_shards"]

_SHARD_BYTES: Final = 5 * 10**9
"""huggingface_hub's limit, too: file systems may limit file sizes, and a failed download restarts with one shard."""
_NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
}
_ALIGNMENT: Final = 8


@frozen(kw_only=True, eq=False)
class NewTensor:
    """Describes a tensor to write.

    :ivar make: returns the tensor, with this shape and dtype
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Return the tensor's size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_shards(
    directory: Path,
    tensors: list[NewTensor],
    *,
    on_progress: Callable[[int, int], None] | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write ``model.safetensors``, or several shards with an index if one would exceed the size limit.

    :param directory: an existing directory without these files
    :param on_progress: called with the number of tensors written so far and in total
    :param shard_bytes: the size limit of a shard; a single larger tensor has a shard of its own
    :raises OSError: a file cannot be written
    """
    shards = list(_shards(tensors, shard_bytes))
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    done = 0
    for name, shard in zip(names, shards, strict=True):
        with open(directory / name, "xb") as file:
            header = _header(shard)
            file.write(struct.pack("<Q", len(header)) + header)
            for tensor in shard:
                values = tensor.make()
                assert (values.shape, values.dtype) == (tensor.shape, tensor.dtype), tensor.name
                file.write(values.contiguous().view(-1).view(torch.uint8).numpy().data)
                done += 1
                if on_progress is not None:
                    on_progress(done, len(tensors))
    if len(shards) > 1:
        places = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)}, "weight_map": places}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _shards(tensors: list[NewTensor], limit: int) -> Iterator[list[NewTensor]]:
    shard: list[NewTensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.num_bytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.num_bytes
    yield shard


def _header(shard: list[NewTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    first = 0
    for tensor in shard:
        end = first + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [first, end],
        }
        first = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % _ALIGNMENT)
