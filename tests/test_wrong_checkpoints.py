"""A checkpoint that is wrong in one place is a typed error that names the file and the tensor, or the setting."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paged_sdk import GgufModelBuilder, IsqType, LayerTopology, TextModelBuilder, Topology, write_gguf
from paged_sdk.errors import CheckpointError, ConfigError, PagedError, UnsupportedQuantizationError
from quantized_writers import WRITERS, gptq, pack_tensors

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def build_fails(
    builder: TextModelBuilder | GgufModelBuilder, error: type[PagedError], *words: str, path: Path | None = None
) -> None:
    with pytest.raises(error) as caught:
        await builder.with_force_cpu().build()
    for word in words:
        assert word in str(caught.value)
    if path is not None:
        assert str(path) in str(caught.value)
        assert getattr(caught.value, "path", None) == path


def edit_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def plain(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint, tmp_path / "model")


def packed(directory: Path, name: str) -> dict[str, torch.Tensor]:
    """Quantize the checkpoint's matrices in a format."""
    write, settings = WRITERS[name]
    tensors, _ = pack_tensors(load_file(directory / "model.safetensors"), write)
    save_file(tensors, directory / "model.safetensors")
    edit_config(directory, quantization_config=settings)
    return tensors


NAME = "model.layers.1.mlp.up_proj"


async def test_a_wrong_shape(plain: Path) -> None:
    tensors = load_file(plain / "model.safetensors")
    tensors[f"{NAME}.weight"] = torch.zeros(128, 32)
    save_file(tensors, plain / "model.safetensors")
    said = f"tensor '{NAME}.weight' has shape [128, 32]: expected [128, 64]"
    await build_fails(TextModelBuilder(plain), CheckpointError, said, path=plain / "model.safetensors")


async def test_a_wrong_shape_in_one_part_of_a_split_gguf_file(plain: Path, tmp_path: Path) -> None:
    whole = gguf.GGUFReader(write_gguf(plain, tmp_path / "whole.gguf", type="F32"))
    for part in (1, 2):
        writer = gguf.GGUFWriter(tmp_path / f"p-{part:05}-of-00002.gguf", "llama")
        if part == 1:
            for name, field in whole.fields.items():
                if name.startswith("llama."):
                    add = writer.add_float32 if isinstance(field.contents(), float) else writer.add_uint32
                    add(name, field.contents())
        writer.add_uint16("split.count", 2)
        for tensor in whole.tensors[part - 1 :: 2]:
            data = tensor.data[:, :32] if tensor.name == "blk.1.ffn_up.weight" else tensor.data
            writer.add_tensor(tensor.name, np.ascontiguousarray(data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    parts = [tmp_path / f"p-{part:05}-of-00002.gguf" for part in (1, 2)]
    holding = parts[[tensor.name for tensor in whole.tensors].index("blk.1.ffn_up.weight") % 2]
    said = f"tensor '{NAME}.weight' has shape [128, 32]: expected [128, 64]"
    builder = GgufModelBuilder(parts[0]).with_tokenizer_json(plain / "tokenizer.json")
    await build_fails(builder, CheckpointError, said, path=holding)
    parts[1].unlink()
    await build_fails(builder, CheckpointError, "is one part of 2", parts[1].name, path=parts[0])


async def test_a_missing_shard(plain: Path) -> None:
    tensors = load_file(plain / "model.safetensors")
    (plain / "model.safetensors").unlink()
    half = len(tensors) // 2
    shards = {"a.safetensors": list(tensors)[:half], "b.safetensors": list(tensors)[half:]}
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, plain / shard)
    index = {name: shard for shard, names in shards.items() for name in names}
    (plain / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (plain / "b.safetensors").unlink()
    await build_fails(TextModelBuilder(plain), CheckpointError, "b.safetensors", path=plain)


@pytest.mark.parametrize("name", WRITERS)
async def test_a_packed_matrix_that_is_cut(name: str, plain: Path) -> None:
    tensors = packed(plain, name)
    found = next(each for each in tensors if each.startswith(NAME) and tensors[each].ndim and len(tensors[each]) > 1)
    tensors[found] = tensors[found][: len(tensors[found]) // 2].clone()
    save_file(tensors, plain / "model.safetensors")
    await build_fails(TextModelBuilder(plain), CheckpointError, NAME, path=plain / "model.safetensors")


@pytest.mark.parametrize("change", [{"bits": 8}, {"group_size": 24}])
async def test_gptq_of_other_bits_or_groups_than_its_config_says(change: dict[str, int], plain: Path) -> None:
    packed(plain, "gptq")
    settings = json.loads((plain / "config.json").read_text())["quantization_config"]
    edit_config(plain, quantization_config=settings | change)
    await build_fails(TextModelBuilder(plain), CheckpointError, "model.layers.0", path=plain / "model.safetensors")


async def test_gptq_of_mixed_bits(plain: Path) -> None:
    tensors = packed(plain, "gptq")
    own = gptq(torch.randn(128, 64, generator=torch.Generator().manual_seed(0)), bits=8)
    tensors |= {f"{NAME}{suffix}": tensor for suffix, tensor in own.tensors.items()}
    save_file(tensors, plain / "model.safetensors")
    await build_fails(TextModelBuilder(plain), CheckpointError, NAME, path=plain / "model.safetensors")


def uqff(directory: Path) -> Path:
    (directory / "model.safetensors").unlink()
    (directory / "q4k-0.uqff").write_bytes(b"uqff")
    return directory


def pickled(directory: Path) -> Path:
    (directory / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(1)}, directory / "pytorch_model.bin")
    return directory


def of_no_known_format(directory: Path) -> Path:
    edit_config(directory, quantization_config={"quant_method": "brand_new"})
    return directory


@pytest.mark.parametrize(
    ("make", "error", "word"),
    [
        (uqff, UnsupportedQuantizationError, "UQFF"),
        (pickled, CheckpointError, "pytorch_model.bin"),
        (of_no_known_format, UnsupportedQuantizationError, "'brand_new': supported are"),
    ],
)
async def test_what_nothing_here_reads(
    make: Callable[[Path], Path], error: type[PagedError], word: str, plain: Path
) -> None:
    await build_fails(TextModelBuilder(make(plain)), error, word)


@pytest.mark.parametrize(("kind", "word"), [("adapter", "adapter"), ("mmproj", "mmproj")])
async def test_gguf_files_that_hold_no_model(kind: str, word: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(path := tmp_path / "other.gguf", "clip" if kind == "mmproj" else "llama")
    writer.add_type(kind)
    writer.add_tensor("a.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    await build_fails(GgufModelBuilder(path), CheckpointError, word, path=path)


@pytest.mark.parametrize(
    "topology",
    [
        Topology.empty().with_regex(r"no_such_proj", LayerTopology(isq=IsqType.Q4K)),
        Topology.empty().with_range(range(2, 4), LayerTopology(isq=IsqType.Q4K)),
    ],
)
async def test_a_selector_that_selects_nothing(topology: Topology, plain: Path) -> None:
    await build_fails(TextModelBuilder(plain).with_topology(topology), ConfigError, "topology")
