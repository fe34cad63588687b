"""Write safetensors files, tensor by tensor: a header of JSON behind its length, then all bytes in order."""

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
"""transformers cuts at so many, too: a file system may have a limit, and a download begins again with one file."""
_NAMES: Final[Mapping[torch.dtype, str]] = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ALIGNMENT: Final = 8


@frozen(kw_only=True, eq=False)
class NewTensor:
    """Describes a tensor that is to be written.

    :ivar make: returns it, in its shape and dtype
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Return how many bytes it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_shards(
    directory: Path,
    tensors: list[NewTensor],
    *,
    on_progress: Callable[[int, int], None] | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write ``model.safetensors``, or shards with an index where that would be larger than a shard may be.

    :param directory: where; it exists and holds none of these files
    :param on_progress: called with the number of tensors written and of all
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
