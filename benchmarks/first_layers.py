"""Write a model's first layers as a separate model: a draft model with the same vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from benchmarks.random_gguf import finish

__all__ = ["write_first_layers"]

_WRITTEN_BY_WRITER: Final = ("GGUF.", "general.architecture")


def write_first_layers(path: Path, source: Path, num_layers: int) -> None:
    """Write embeddings, the first layers, the last norm and the output projection of a GGUF file, as they are stored.

    :param source: the file of the whole model
    """
    import gguf

    reader: Any = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer: Any = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name.startswith(_WRITTEN_BY_WRITER):
            continue
        value = num_layers if name == f"{architecture}.block_count" else field.contents()
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        block, _, rest = tensor.name.partition(".")
        if block != "blk" or int(rest.partition(".")[0]) < num_layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
