"""GGUF files of gpt-oss, as llama.cpp's converter writes them, say what their checkpoints do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

import tiny
from paged_sdk import CheckpointError, GgufModelBuilder, SamplingParams, TextModelBuilder, write_gguf
from paged_sdk.errors import UnsupportedArchitectureError

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0.0, max_len=16, ignore_eos=True)
PROMPTS = [list(range(5, 5 + length)) for length in (4, 60)]  # one is longer than the window
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, 4)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_other_checkpoint(
        "gpt_oss",
        tmp_path_factory.mktemp("gpt-oss"),
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
    )


def write(checkpoint: Path, tokens: Path, path: Path, kind: gguf.GGMLQuantizationType, **changes: int) -> Path:
    """Write the file by the converter's rules.

    :param tokens: a GGUF file that holds the tokenizer
    :param kind: of the experts' matrices
    """
    config = json.loads((checkpoint / "config.json").read_text())
    rope = config.get("rope_parameters") or config["rope_scaling"]
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "expert_feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        **changes,
    }
    writer = gguf.GGUFWriter(path, "gpt-oss")
    for key, value in values.items():
        adders: dict[type, Any] = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        adders[type(value)](f"gpt-oss.{key}", value)
    for field in gguf.GGUFReader(tokens).fields.values():
        if field.name.startswith("tokenizer."):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)

    def add(name: str, tensor: torch.Tensor, type_: gguf.GGMLQuantizationType | None = None) -> None:
        stored = NAMES.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        array = tensor.float().contiguous().numpy()
        if type_ is None or type_ is gguf.GGMLQuantizationType.F32:
            writer.add_tensor(stored, array)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(array, type_), raw_dtype=type_)

    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name.endswith("sinks"):
            add(f"{name}.weight", tensor)
        elif name.endswith("gate_up_proj"):
            for part, rows in (("gate", tensor.mT[:, 0::2]), ("up", tensor.mT[:, 1::2])):
                add(name.replace("gate_up_proj", f"{part}_proj.weight"), rows, kind)
        elif name.endswith("gate_up_proj_bias"):
            for part, rows in (("gate", tensor[:, 0::2]), ("up", tensor[:, 1::2])):
                add(name.replace("gate_up_proj_bias", f"{part}_proj.bias"), rows)
        elif name.endswith("down_proj"):
            add(f"{name}.weight", tensor.mT, kind)
        elif name.endswith("down_proj_bias"):
            add(name.replace("down_proj_bias", "down_proj.bias"), tensor)
        else:
            add(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


async def texts(builder: Any) -> list[str]:
    async with builder.with_dtype("float32").build() as model:
        return [(await model.send_completion_request(each, GREEDY)).choices[0].text for each in PROMPTS]


async def test_texts_are_those_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    tokens = tiny.make_gguf(tmp_path)
    path = write(checkpoint, tokens, tmp_path / "f32.gguf", gguf.GGMLQuantizationType.F32)
    want = await texts(TextModelBuilder(checkpoint))
    assert await texts(GgufModelBuilder(path)) == want
    path = write(checkpoint, tokens, tmp_path / "mxfp4.gguf", gguf.GGMLQuantizationType.MXFP4)
    async with GgufModelBuilder(path).build() as model:  # its experts keep their blocks
        assert (await model.send_completion_request(PROMPTS[1], GREEDY)).usage.completion_tokens == 16


async def test_what_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    tokens = tiny.make_gguf(tmp_path)
    path = write(checkpoint, tokens, tmp_path / "more.gguf", gguf.GGMLQuantizationType.F32, expert_count=5)
    with pytest.raises(CheckpointError, match="router"):
        await GgufModelBuilder(path).build()
    with pytest.raises(UnsupportedArchitectureError, match="no GGUF architecture is written"):
        write_gguf(checkpoint, tmp_path / "written.gguf", type="F32")
