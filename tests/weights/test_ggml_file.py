"""Llama files of before GGUF hold the model that they were written from, or are refused by name."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import tiny
from ggjt_files import PIECES, write_ggjt
from paged_sdk import BlockingModel, GgufModelBuilder, SamplingParams, write_gguf
from paged_sdk.chat.gguf_tokenizer import tokenizer_from_gguf
from paged_sdk.errors import (
    CheckpointError,
    ModelLoadError,
    UnsupportedArchitectureError,
    UnsupportedQuantizationError,
)
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS
from paged_sdk.weights.checkpoint import open_checkpoint
from paged_sdk.weights.gguf.file import GgufFile, open_gguf

CPU = torch.device("cpu")
PROMPT = list(range(5, 200, 7))


def llama(**overrides: Any) -> Any:
    """Build the model that the files are written from; they leave out epsilon."""
    return tiny.build_model("llama", rms_norm_eps=1e-5, **overrides)


def first_tensor(path: Path) -> int:
    """Return where the first tensor's description begins."""
    data = path.read_bytes()
    return data.index(b"tok_embeddings.weight") - 20


@pytest.mark.parametrize("version", [1, 2, 3])
def test_it_says_what_transformers_says(version: int, tmp_path: Path) -> None:
    model = llama()
    path = write_ggjt(tmp_path / "ggml-model-f32.bin", model, version=version)
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    tokens = torch.tensor([PROMPT])
    with torch.inference_mode():
        expected = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=16, do_sample=False, pad_token_id=0
        )
    builder = GgufModelBuilder(tmp_path, [path.name]).with_tokenizer_json(tmp_path / "tokenizer.json")
    builder = builder.with_dtype("float32").with_force_cpu().with_num_threads(1)
    with BlockingModel(builder.build()) as blocking:
        sampling = SamplingParams(temperature=0, max_len=16, ignore_eos=True)
        text = blocking.send_completion_request(PROMPT, sampling).choices[0].text
    assert text == tiny.tokenizer().decode(expected[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize(
    "kind", ["F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
)
def test_every_type_is_read(kind: str, tmp_path: Path) -> None:
    model = llama(hidden_size=256, num_hidden_layers=1, intermediate_size=256, head_dim=64)
    path = write_ggjt(tmp_path / "m.bin", model, kind)
    checkpoint = open_checkpoint(path)
    assert checkpoint.is_quantized is (kind != "F16")
    names = set(checkpoint.source.names())
    for name, values in model.state_dict().items():
        read = checkpoint.source.tensor(name, torch.float32, CPU)
        bound = 0.4 if kind[1] == "2" else 0.2
        assert float((read - values).norm() / values.norm()) < (bound if values.ndim == 2 else 1e-6)
        names.remove(name)
    assert not names
    copy = GgufFile(write_gguf(path, tmp_path / "m.gguf", type="Q8_0", overrides=[(".", kind)]))
    for name, tensor in GgufFile(path).tensors.items():
        assert torch.equal(copy.tensors[name].blocks(), tensor.blocks())
        assert BLOCK_FORMATS[tensor.type].name == ("F32" if len(tensor.shape) == 1 else kind)


def test_the_vocabulary_is_a_tokenizer(tmp_path: Path) -> None:
    (file,) = open_gguf(write_ggjt(tmp_path / "m.bin", llama()))
    tokenizer = tokenizer_from_gguf(file.metadata)
    ids = tokenizer.encode("hello wo\u00e9", add_special_tokens=True)
    pieces = {piece: 259 + place for place, piece in enumerate(PIECES)}
    assert ids == [1, pieces[" "], pieces["hello"], pieces[" wo"], 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(ids) == "hello wo\u00e9"
    assert file.metadata["llama.attention.head_count_kv"] == 2
    (grouped,) = open_gguf(write_ggjt(tmp_path / "n.bin", llama(num_key_value_heads=4), words=False))
    assert grouped.metadata["llama.context_length"] == 2048
    with pytest.raises(CheckpointError, match="with_tokenizer_json"):
        tokenizer_from_gguf(grouped.metadata)


@pytest.mark.parametrize(("version", "kind"), [(1, "Q5_0"), (1, "Q8_0"), (2, "Q4_0"), (2, "Q8_0"), (2, "Q4_K")])
def test_blocks_of_another_layout_are_refused(version: int, kind: str, tmp_path: Path) -> None:
    model = llama(hidden_size=256, num_hidden_layers=1, intermediate_size=256, head_dim=64)
    path = write_ggjt(tmp_path / "m.bin", model, kind, version=version)
    with pytest.raises(
        UnsupportedQuantizationError, match=f"tok_embeddings.*cannot be read from ggjt version {version}"
    ) as caught:
        GgufFile(path)
    assert caught.value.path == path


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = write_ggjt(tmp_path / "m.bin", llama())
    data, at = path.read_bytes(), first_tensor(path)
    end = at + 12

    def refused(content: bytes, error: type[ModelLoadError], message: str) -> None:
        (tmp_path / "bad.bin").write_bytes(content)
        with pytest.raises(error, match=message) as caught:
            GgufFile(tmp_path / "bad.bin")
        assert caught.value.path == tmp_path / "bad.bin"

    refused(data[:4] + struct.pack("<I", 4) + data[8:], CheckpointError, "ggjt file of version 4")
    refused(data[:8] + bytes(4) + data[12:], CheckpointError, "0 tokens")
    refused(data[:8] + b"\xff" * 4 + data[12:], CheckpointError, "4294967295 tokens")
    refused(data[:36] + b"\xff" * 4 + data[40:], CheckpointError, "a text of 4294967295 bytes")
    refused(data[:at] + struct.pack("<I", 3) + data[at + 4 :], CheckpointError, "3 dimensions")
    refused(data[: at + 8] + struct.pack("<I", 4) + data[end:], UnsupportedQuantizationError, "type 4")
    refused(data[:end] + bytes(4) + data[end + 4 :], CheckpointError, r"has shape \[512, 0\]")
    refused(data.replace(b"tok_embeddings", b"wok_embeddings"), UnsupportedArchitectureError, "'wok_embeddings")
    refused(data.replace(b"attention.wk", b"attention.wv"), CheckpointError, "'blk.0.attn_v.weight' twice")
    for length in (5, 30, 100, at + 5, at + 30, len(data) - 1):
        refused(data[:length], CheckpointError, "cut off")
