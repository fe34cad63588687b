"""A written GGUF file is what llama.cpp's converter would have written, and means what its source means."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

import paged_sdk.weights
import tiny
from paged_sdk import write_gguf
from paged_sdk.build.export import gguf_encoding, gguf_plan
from paged_sdk.chat.gguf_tokenizer_export import _PROBE as PROBE
from paged_sdk.chat.pre_tokenizers import PRE_TOKENIZERS
from paged_sdk.chat.text_processor import load_text_processor, text_processor_from_gguf
from paged_sdk.errors import CheckpointError, ConfigError, UnsupportedArchitectureError, UnsupportedQuantizationError
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, tensor_type_of
from paged_sdk.models.family import read_config
from paged_sdk.weights.checkpoint import open_checkpoint
from paged_sdk.weights.gguf.file import GgufFile, open_gguf
from paged_sdk.weights.gguf.mixtures import MIXTURES, ModelShape, tensor_types, writable_types
from paged_sdk.weights.gguf.source import GgufSource

CPU = torch.device("cpu")
#: What a GGUF file says and a checkpoint does not, or otherwise.
OWN_KEYS = {"general.name", "general.file_type", "general.type", "tokenizer.ggml.add_eos_token"}


def make_checkpoint(family: str, directory: Path, **overrides: Any) -> Path:
    """Make a checkpoint of which a GGUF file can hold everything."""
    return tiny.make_checkpoint(family, directory, **(tiny.GGUF_OVERRIDES.get(family, {}) | overrides))


def make_qwen2_moe(directory: Path) -> Path:
    """Make a checkpoint with experts beside one that serves every token."""
    tiny.make_checkpoint("llama", directory)
    (directory / "model.safetensors").unlink()
    config = Qwen2MoeConfig(
        vocab_size=tiny.VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
    )
    torch.manual_seed(0)
    Qwen2MoeForCausalLM(config).save_pretrained(directory)
    return directory


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_checkpoint_is_written_as_the_converter_writes_it(family: str, tmp_path: Path) -> None:
    expected = GgufFile(tiny.make_gguf(tmp_path, family=family))
    written = GgufFile(write_gguf(make_checkpoint(family, tmp_path / "model"), tmp_path / "written.gguf", type="F32"))
    assert written.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert written.tensors[name].shape == tensor.shape
        torch.testing.assert_close(written.tensors[name].decoded(), tensor.decoded(), rtol=0, atol=1e-6)
    for key, value in expected.metadata.items():
        if key not in OWN_KEYS:
            assert (key, written.metadata[key]) == (key, value)
            assert written.metadata_types[key] == expected.metadata_types[key]
    assert written.metadata["tokenizer.ggml.eot_token_id"] == 0  # generation_config.json has a second end


def test_qwen2_moe_comes_back(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_qwen2_moe(tmp_path / "model"))
    read = GgufSource(paged_sdk.weights.write_gguf(tmp_path / "model", tmp_path / "m.gguf", type="F32"))
    stored = GgufFile(tmp_path / "m.gguf").tensors
    assert stored["blk.0.ffn_gate_inp_shexp.weight"].shape == (64,)
    assert stored["blk.1.ffn_down_exps.weight"].shape == (4, 64, 32)
    own_shape = read_config(checkpoint.config)
    assert evolve(read_config(read.config), norm_eps=own_shape.norm_eps) == own_shape
    for name in checkpoint.source.names():
        own = checkpoint.source.tensor(name, torch.float32, CPU)
        assert torch.equal(read.tensor(name, torch.float32, CPU), own), name


def test_missing_experts_are_an_error_that_names_the_checkpoint(tmp_path: Path) -> None:
    directory = make_qwen2_moe(tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    left = {name: each for name, each in tensors.items() if not (".layers.1." in name and ".experts.3." in name)}
    assert len(left) < len(tensors)
    save_file(left, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"^{directory}: there are 3 of the 4 experts of 'blk\.1\.") as caught:
        write_gguf(directory, tmp_path / "m.gguf")
    assert caught.value.path == directory


def test_an_output_projection_of_its_own_that_the_config_ties(tmp_path: Path) -> None:
    directory = make_checkpoint("llama", tmp_path / "model", tie_word_embeddings=False)
    config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(directory)
    own = checkpoint.source.tensor("lm_head.weight", torch.float32, CPU)
    read = GgufSource(write_gguf(directory, tmp_path / "m.gguf", type="F32"))
    assert not read_config(read.config).tie_embeddings
    assert torch.equal(read.tensor("lm_head.weight", torch.float32, CPU), own)


def test_embeddings_by_the_output_projections_name_alone(tmp_path: Path) -> None:
    directory = make_checkpoint("llama", tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(directory / "model.safetensors")
    table = tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, directory / "model.safetensors")
    read = GgufSource(write_gguf(directory, tmp_path / "m.gguf", type="F32"))
    assert read_config(read.config).tie_embeddings
    assert torch.equal(read.tensor("model.embed_tokens.weight", torch.float32, CPU), table)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_quantized_values_are_the_gguf_packages(mixture: str, tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "model", hidden_size=256, intermediate_size=512)
    whole = GgufFile(write_gguf(source, tmp_path / "whole.gguf", type="F32"))
    path = write_gguf(source, tmp_path / "m.gguf", type=mixture.lower())
    ours, fields = GgufFile(path), gguf.GGUFReader(path)
    kind = "ALL_F32" if mixture == "F32" else f"MOSTLY_{mixture}"
    assert ours.metadata["general.file_type"] == gguf.LlamaFileType[kind]
    for tensor in fields.tensors:
        decoded = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(ours.tensors[tensor.name].decoded(), decoded)
        exact = whole.tensors[tensor.name].decoded()
        bits = mixture.lstrip("I")[1]  # "Q" of TQ1_0 and TQ2_0
        bound = {"Q": 0.5, "2": 0.3, "3": 0.2, "4": 0.1}.get(bits, 0.05)
        assert float((decoded - exact).norm() / exact.norm()) < bound


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_gguf_file_keeps_its_metadata_and_what_has_the_type_already(kind: str, tmp_path: Path) -> None:
    path = tiny.make_gguf(tmp_path, family="qwen3", quantization=kind)
    own, copy = GgufFile(path), GgufFile(write_gguf(path, tmp_path / "copy.gguf", type=kind))
    for key, value in own.metadata.items():
        assert copy.metadata[key] == value
        assert copy.metadata_types[key] == own.metadata_types[key]
    for name, tensor in own.tensors.items():
        if name != "output.weight":  # Q6_K beside Q4_0, but 64 columns are too few
            assert copy.tensors[name].type == tensor.type
            assert torch.equal(copy.tensors[name].blocks(), tensor.blocks())
    assert BLOCK_FORMATS[copy.tensors["output.weight"].type].name == "Q8_0"


def test_parts_become_one_file(tmp_path: Path) -> None:
    whole = tiny.make_gguf(tmp_path)
    reader = GgufFile(whole)
    names = list(reader.tensors)
    for part in (1, 2):
        writer = gguf.GGUFWriter(tmp_path / f"p-{part:05}-of-00002.gguf", "llama")
        if part == 1:
            for key, value in reader.metadata.items():
                if key.startswith("llama."):
                    add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
                    add(key, value)
        writer.add_uint16("split.count", 2)
        for name in names[part - 1 :: 2]:
            writer.add_tensor(name, reader.tensors[name].decoded().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    (joined,) = open_gguf(write_gguf(tmp_path / "p-00002-of-00002.gguf", tmp_path / "joined.gguf", type="f16"))
    assert joined.tensors.keys() == reader.tensors.keys()
    assert "split.count" not in joined.metadata
    expected = reader.tensors["output.weight"].decoded().half().float()
    assert torch.equal(joined.tensors["output.weight"].decoded(), expected)


def test_a_file_that_is_no_model_is_refused_as_such_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = gguf.GGUFWriter(tmp_path / "lora.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.ones((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    opened: list[GgufFile] = []

    def open_and_note(path: Path) -> list[GgufFile]:
        opened.extend(open_gguf(path))
        return opened

    monkeypatch.setattr(gguf_plan, "open_gguf", open_and_note)
    with pytest.raises(CheckpointError, match="holds a LoRA adapter"):
        write_gguf(tmp_path / "lora.gguf", tmp_path / "m.gguf", type="Q8_0", overrides=[("attn_v", "F16")])
    with pytest.raises(CheckpointError, match="is closed"):
        next(iter(opened[0].tensors.values())).blocks()


SCALINGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_type": "linear", "factor": 4.0}),
    ("qwen2", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}),
    (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ),
    ("phi3", {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.5 + i for i in range(8)]}),
]


@pytest.mark.parametrize(("family", "scaling"), SCALINGS)
def test_scaled_positions_come_back(family: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    directory = make_checkpoint(family, tmp_path / "model")
    content = json.loads((directory / "config.json").read_text())
    content.pop("rope_parameters")
    content |= {"rope_theta": 10_000.0, "rope_scaling": scaling}
    if family == "phi3":
        content |= {"original_max_position_embeddings": 256}
    (directory / "config.json").write_text(json.dumps(content))
    read = read_config(GgufSource(write_gguf(directory, tmp_path / "m.gguf", type="F16")).config)
    own = read_config(content)
    for first, second in zip(own.ropes, read.ropes, strict=True):
        assert gguf_plan._rotate_alike(first, second)
    plain = read_config({**content, "rope_scaling": None})
    assert not gguf_plan._rotate_alike(own.ropes[0], plain.ropes[0])


def test_what_gguf_cannot_say_is_refused(tmp_path: Path) -> None:
    partly = tiny.make_checkpoint("qwen3_moe", tmp_path / "partly")  # one layer has no experts
    with pytest.raises(UnsupportedArchitectureError, match="layers without experts"):
        write_gguf(partly, tmp_path / "m.gguf")
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    uneven = tiny.make_checkpoint("gemma3_text", tmp_path / "uneven", layer_types=kinds)
    with pytest.raises(UnsupportedArchitectureError, match=r"its (sliding_windows|ropes) "):
        write_gguf(uneven, tmp_path / "m.gguf")
    assert names_in(tmp_path) == ["partly", "uneven"]


def test_a_window_that_llama_cpp_does_not_have_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tiny.make_checkpoint("mistral", tmp_path / "model")
    with caplog.at_level("WARNING", logger="paged_sdk"):
        write_gguf(directory, tmp_path / "m.gguf")
    assert "no sliding windows" in caplog.text


#: Qwen2.5-1.5B
SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (151936, 1536),
    "output_norm.weight": (1536,),
    "output.weight": (151936, 1536),
    **{
        f"blk.{layer}.{name}.weight": shape
        for layer in range(28)
        for name, shape in {
            "attn_norm": (1536,),
            "attn_q": (1536, 1536),
            "attn_k": (256, 1536),
            "attn_v": (256, 1536),
            "attn_output": (1536, 1536),
            "ffn_gate": (8960, 1536),
            "ffn_up": (8960, 1536),
            "ffn_down": (1536, 8960),
        }.items()
    },
}
MODEL = ModelShape(num_layers=28, queries_per_key=6)


class TestMixtures:
    def test_q4_k_m_is_that_of_published_files(self) -> None:
        types = tensor_types("Q4_K_M", SHAPES, MODEL)
        names = [BLOCK_FORMATS[number].name for number in types.values()]
        # What Qwen2.5-Coder-1.5B-Instruct's Q4_K_M has.
        assert (names.count("Q4_K"), names.count("Q6_K")) == (169, 29)
        rich = [name for name, number in types.items() if BLOCK_FORMATS[number].name == "Q6_K" and "ffn_down" in name]
        assert [int(name.split(".")[1]) for name in rich] == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]

    @pytest.mark.parametrize(
        ("mixture", "expected"),
        [
            ("Q2_K", {"attn_v": "Q4_K", "attn_output": "Q3_K", "ffn_down": "Q3_K", "ffn_up": "Q2_K"}),
            ("Q3_K_S", {"attn_v": "Q3_K", "attn_output": "Q3_K", "ffn_down": "Q3_K", "ffn_up": "Q3_K"}),
            ("Q3_K_M", {"attn_v": "Q4_K", "attn_output": "Q4_K", "ffn_down": "Q4_K", "ffn_up": "Q3_K"}),
            ("Q3_K_L", {"attn_v": "Q5_K", "attn_output": "Q5_K", "ffn_down": "Q5_K", "ffn_up": "Q3_K"}),
            ("Q4_K_S", {"attn_v": "Q4_K", "attn_output": "Q4_K", "ffn_down": "Q4_K", "ffn_up": "Q4_K"}),
            ("Q5_K_M", {"attn_v": "Q6_K", "attn_output": "Q5_K", "ffn_down": "Q6_K", "ffn_up": "Q5_K"}),
            ("IQ4_XS", {"attn_v": "Q5_K", "attn_output": "IQ4_XS", "ffn_down": "IQ4_XS", "ffn_up": "IQ4_XS"}),
            ("TQ2_0", {"attn_v": "TQ2_0", "attn_output": "TQ2_0", "ffn_down": "TQ2_0", "ffn_up": "TQ2_0"}),
        ],
    )
    def test_a_middle_layer_of_other_mixtures(self, mixture: str, expected: dict[str, str]) -> None:
        types = tensor_types(mixture, SHAPES, MODEL)
        assert {name: BLOCK_FORMATS[types[f"blk.8.{name}.weight"]].name for name in expected} == expected
        assert BLOCK_FORMATS[types["output.weight"]].name == "Q6_K"

    def test_values_are_counted_where_not_all_layers_have_some(self) -> None:
        # As in Qwen 3.5 of 32 layers, and in LFM2 of 16.
        fused = {f"blk.{layer}.{'attn_v' if layer % 4 == 3 else 'attn_qkv'}.weight": (512, 4096) for layer in range(32)}
        few = {f"blk.{layer}.attn_v.weight": (512, 2048) for layer in (2, 5, 8, 10, 12, 14)}
        for shapes, num_layers, rich in (
            (fused, 32, [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]),
            (few, 16, [8, 14]),
        ):
            types = tensor_types("Q4_K_M", shapes, ModelShape(num_layers=num_layers, queries_per_key=4))
            found = [name for name, number in types.items() if BLOCK_FORMATS[number].name == "Q6_K"]
            assert [int(name.split(".")[1]) for name in found] == rich

    def test_what_gated_delta_networks_keep_exactly(self) -> None:
        shapes: dict[str, tuple[int, ...]] = {
            "blk.0.ssm_conv1d.weight": (8192, 4),
            "blk.0.ssm_a": (32,),
            "blk.0.ssm_dt.bias": (32,),
            "blk.0.ssm_norm.weight": (128,),
            "blk.0.ssm_alpha.weight": (32, 4096),
            "blk.0.ssm_out.weight": (4096, 4096),
            "blk.0.attn_gate.weight": (4096, 4096),
        }
        types = tensor_types("Q4_K_M", shapes, ModelShape(num_layers=32))
        assert {name: BLOCK_FORMATS[number].name for name, number in types.items()} == dict.fromkeys(
            ("blk.0.ssm_alpha.weight", "blk.0.ssm_out.weight", "blk.0.attn_gate.weight"), "Q4_K"
        )

    def test_narrow_rows_and_tied_embeddings(self) -> None:
        shapes = {"token_embd.weight": (512, 576), "blk.0.attn_q.weight": (576, 576), "blk.0.ffn_up.weight": (8, 24)}
        types = tensor_types("Q4_K_S", shapes, ModelShape(num_layers=1, has_output=False))
        assert [BLOCK_FORMATS[number].name for number in types.values()] == ["Q8_0", "Q5_0", "F16"]

    def test_the_last_override_decides(self) -> None:
        overrides = [("ffn_down", "q8_0"), (r"blk\.[01]\.", "F16")]
        types = tensor_types("Q4_K_M", SHAPES, MODEL, overrides)
        assert types["blk.0.ffn_down.weight"] == tensor_type_of("F16")
        assert types["blk.2.ffn_down.weight"] == tensor_type_of("Q8_0")
        assert types["blk.2.ffn_up.weight"] == tensor_type_of("Q4_K")

    def test_llama_cpps_exceptions(self) -> None:
        iq4 = tensor_types("IQ4_NL", SHAPES, MODEL)
        assert [BLOCK_FORMATS[iq4[f"blk.{layer}.ffn_down.weight"]].name for layer in (0, 2, 3)] == [
            "Q5_K",
            "Q5_K",
            "IQ4_NL",
        ]
        ternary = tensor_types("TQ1_0", SHAPES, MODEL)
        assert BLOCK_FORMATS[ternary["token_embd.weight"]].name == "Q4_K"
        experts = {"blk.0.ffn_up_exps.weight": (4, 64, 64), "blk.0.attn_q.weight": (64, 64)}
        mxfp4 = tensor_types("MXFP4_MOE", experts, evolve(MODEL, num_experts=4))
        assert [BLOCK_FORMATS[number].name for number in mxfp4.values()] == ["MXFP4", "Q8_0"]

    def test_what_cannot_be_is_refused(self) -> None:
        for mixture, overrides in (("IQ2_XS", []), ("iq3_m", []), ("Q4_0", [("attn", "IQ1_S")])):
            with pytest.raises(UnsupportedQuantizationError, match="is read, but not written"):
                tensor_types(mixture, SHAPES, MODEL, overrides)
        with pytest.raises(ConfigError, match=r"type = 'Q9_X' .*Q4_K_M"):
            tensor_types("Q9_X", SHAPES, MODEL)
        wrong = (("nothing", "F16", "found in the name"), ("a", "Q9", "Q4_K"), ("(", "F16", "regular"))
        for pattern, kind, why in wrong:
            with pytest.raises(ConfigError, match=why):
                tensor_types("Q8_0", SHAPES, MODEL, [(pattern, kind)])
        with pytest.raises(UnsupportedQuantizationError, match=r"attn_q\.weight has rows of 64 elements"):
            tensor_types("F16", {"blk.0.attn_q.weight": (64, 64)}, MODEL, [("attn_q", "Q4_K")])
        assert set(writable_types()) >= {"F32", "F16", "BF16", "Q8_0", "Q4_K"}


class TestNothingIsLeftBehind:
    def test_a_target_that_exists(self, tmp_path: Path) -> None:
        path = tiny.make_gguf(tmp_path)
        content = path.read_bytes()
        with pytest.raises(ConfigError, match="nothing is yet"):
            write_gguf(path, path)
        with pytest.raises(ConfigError, match="a directory that exists"):
            write_gguf(path, tmp_path / "nowhere" / "m.gguf")
        assert path.read_bytes() == content

    @pytest.mark.parametrize(
        "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), MemoryError()]
    )
    def test_a_writing_that_ends_early(
        self, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tiny.make_gguf(tmp_path)

        def fail(*args: Any) -> Any:
            assert len(names_in(tmp_path)) == 2  # the file is under way
            raise error

        monkeypatch.setattr(gguf_encoding.TensorEncoder, "_piece", fail)
        with pytest.raises(CheckpointError if isinstance(error, OSError) else type(error), match=r"$") as caught:
            write_gguf(path, tmp_path / "m.gguf", type="F16")
        if isinstance(error, OSError):
            assert str(caught.value) == f"{tmp_path / 'm.gguf'} cannot be written: No space left on device"
        assert names_in(tmp_path) == [path.name]

    def test_too_little_space_is_said_before(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tiny.make_gguf(tmp_path)
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
        with pytest.raises(CheckpointError, match=r"it takes \d+ MiB, and 1 are free"):
            write_gguf(path, tmp_path / "m.gguf")
        assert names_in(tmp_path) == [path.name]

    def test_values_that_do_not_fit(self, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
        writer.add_tensor("output.weight", np.full((32, 32), 1e6, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        for kind in ("F16", "Q8_0"):
            with pytest.raises(CheckpointError, match=r"tensor 'output\.weight': "):
                write_gguf(tmp_path / "a.gguf", tmp_path / "m.gguf", type=kind)
        assert names_in(tmp_path) == ["a.gguf"]


TEXTS = [
    "Hello, world! It's 12345 o'clock.",
    "  two  spaces\n\n\tand tabs ",
    "naïve cafe\u0301 中文 한국어 🙂👍🏽",
    "x=y+1;//",
]


class TestTokenizers:
    def check(self, directory: Path, tmp_path: Path) -> dict[str, Any]:
        """Write the checkpoint, and compare what its two tokenizers make of texts."""
        path = write_gguf(directory, tmp_path / "m.gguf", type="F16")
        metadata = GgufFile(path).metadata
        own, read = load_text_processor(directory), text_processor_from_gguf(metadata)
        for text in TEXTS:
            for special in (True, False):
                ids = own.tokenizer.encode(text, add_special_tokens=special)
                assert read.tokenizer.encode(text, add_special_tokens=special) == ids
                assert read.tokenizer.decode(ids) == own.tokenizer.decode(ids)
        assert read.stop_token_ids == own.stop_token_ids
        own_names = own.tokenizer.special.names
        assert {name: read.tokenizer.special.names[name] for name in own_names} == own_names
        return metadata

    @pytest.mark.parametrize("name", ["gpt-2", "smollm", "mpt", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o"])
    def test_the_way_to_cut_words_is_named(self, name: str, tmp_path: Path) -> None:
        directory = make_checkpoint("llama", tmp_path / "model")
        backend, way = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")), PRE_TOKENIZERS[name]
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(each), behavior="isolated") for each in way.splits),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        if way.nfc:
            backend.normalizer = normalizers.NFC()
        backend.model.ignore_merges = way.ignore_merges
        backend.save(str(directory / "tokenizer.json"))
        assert PRE_TOKENIZERS[self.check(directory, tmp_path)["tokenizer.ggml.pre"]] == way

    @pytest.mark.parametrize("prefix", [True, False])
    def test_sentencepiece_merges(self, prefix: bool, tmp_path: Path) -> None:
        directory = make_checkpoint("llama", tmp_path / "model")
        marks = ["<unk>", *tiny.SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
        backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        spaces: list[Any] = [normalizers.Prepend("▁")] if prefix else []
        backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", left=1)] if prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=marks, show_progress=False)
        backend.train_from_iterator([*TEXTS, "hello world and hello word, two worlds"] * 3, trainer)
        content = json.loads(backend.to_str())
        content["added_tokens"] = [each for each in content["added_tokens"] if not each["content"].startswith("<0x")]
        (directory / "tokenizer.json").write_text(json.dumps(content))
        metadata = self.check(directory, tmp_path)
        assert metadata["tokenizer.ggml.model"] == "llama"
        assert metadata["tokenizer.ggml.add_space_prefix"] is prefix
        assert metadata["tokenizer.ggml.token_type"][:5] == [2, 3, 3, 3, 6]

    @pytest.mark.parametrize("collapsed", [True, False])
    def test_unigram_pieces(self, collapsed: bool, tmp_path: Path) -> None:
        directory = make_checkpoint("llama", tmp_path / "model")
        backend = tokenizers.Tokenizer(models.Unigram())
        if collapsed:
            ends, runs = (normalizers.Replace(Regex(each), to) for each, to in (("^ +| +$", ""), (" {2,}", " ")))
            backend.normalizer = normalizers.Sequence([ends, runs])
            backend.pre_tokenizer = pre_tokenizers.Metaspace()
        else:
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=400, special_tokens=["<unk>", *tiny.SPECIAL_TOKENS], unk_token="<unk>", show_progress=False
        )
        backend.train_from_iterator([*TEXTS, PROBE, "hello world ... and hello word, two worlds ..."] * 3, trainer)
        backend.save(str(directory / "tokenizer.json"))
        metadata = self.check(directory, tmp_path)
        assert metadata["tokenizer.ggml.model"] == "t5"
        assert metadata["tokenizer.ggml.token_type"][:5] == [2, 3, 3, 3, 1]
        assert metadata["tokenizer.ggml.remove_extra_whitespaces"] is collapsed
        assert metadata["tokenizer.ggml.unknown_token_id"] == 0

    def test_others_are_refused(self, tmp_path: Path) -> None:
        directory = make_checkpoint("llama", tmp_path / "model")
        backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex("[aeiou]"), behavior="isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
        )
        backend.save(str(directory / "tokenizer.json"))
        with pytest.raises(CheckpointError, match="no name for its pre-tokenizer"):
            write_gguf(directory, tmp_path / "m.gguf")
        assert names_in(tmp_path) == ["model"]
