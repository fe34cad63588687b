"""A GGUF file shows the Hugging Face checkpoint that it was made from, values and configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor, load_gguf_checkpoint

import tiny
from gguf_files import LLAMA, VOCAB, add_metadata, llama_tensors, write_gguf
from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError
from paged_sdk.weights.embedded import embedded_model_path
from paged_sdk.weights.gguf.file import GgufFile
from paged_sdk.weights.gguf.source import GgufSource

CPU = torch.device("cpu")

HUGGING_FACE = {"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj"}

#: Every family, and settings that change what is stored, or where.
MODELS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in tiny.FAMILIES),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 32, "attention_bias": True}),
    ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32}),
]


def transformers_config(source: GgufSource, model: PreTrainedModel) -> Any:
    """Return the source's config, read by transformers."""
    return type(model.config)(**source.config)


@pytest.mark.parametrize(("family", "overrides"), MODELS)
def test_values_are_the_models(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    model = tiny.build_gguf_model(family, seed=1, **overrides)
    source = GgufSource(tiny.make_gguf(tmp_path, family=family, seed=1, **overrides))
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    assert set(source.names()) == expected.keys()
    for name, tensor in expected.items():
        assert name in source
        # gemma's norms were rounded when 1 was added
        torch.testing.assert_close(source.tensor(name, torch.float32, CPU), tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("family", "overrides"), MODELS)
def test_config_is_the_models(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    model = tiny.build_gguf_model(family, **overrides)
    source = GgufSource(tiny.make_gguf(tmp_path, family=family, **overrides))
    # GGUF has no mistral: without a window it is a llama.
    assert source.config["model_type"] == ("llama" if family == "mistral" else family)
    got, expected = transformers_config(source, model).to_dict(), model.config.to_dict()
    # tiny's files leave out phi3's trained context.
    not_stored = {"model_type", "architectures", "dtype", "initializer_range", "original_max_position_embeddings"}
    if family == "mistral":  # its class has a window where the file says nothing
        not_stored.add("sliding_window")
    for key in expected.keys() - not_stored:
        value = expected[key]
        assert got[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_values_equal_transformers(quantization: str, tmp_path: Path) -> None:
    path = tiny.make_gguf(tmp_path, quantization=quantization)
    load: Any = load_gguf_checkpoint  # it has no annotations
    expected = load(str(path), return_tensors=True, model_to_load=tiny.build_gguf_model("llama"))["tensors"]
    source = GgufSource(path)
    assert set(source.names()) == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(source.tensor(name, torch.float32, CPU), tensor), name
        assert torch.equal(source.tensor(name, torch.bfloat16, CPU), tensor.bfloat16()), name


@pytest.mark.parametrize("quantization", ["F32", "F16", "Q8_0"])
def test_the_rows_of_two_answers_become_one(quantization: str, tmp_path: Path) -> None:
    path = tiny.make_gguf(tmp_path, family="qwen3", quantization=quantization, ranks_by=((5, 7), None))
    source = GgufSource(path)
    stored = next(each for each in gguf.GGUFReader(path).tensors if each.name == "cls.output.weight")
    first, second = torch.tensor(gguf.quants.dequantize(stored.data, stored.tensor_type))
    assert source.shape("score.weight") == (1, first.shape[0])
    torch.testing.assert_close(
        source.tensor("score.weight", torch.float32, CPU), (first - second)[None], rtol=0, atol=0
    )
    torch.testing.assert_close(source.matrix("score.weight").decoded(), (first - second)[None], rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(2,), (2, 1, 32)])
def test_the_rows_of_two_answers_must_make_a_matrix(shape: tuple[int, ...], tmp_path: Path) -> None:
    metadata = {key.replace("llama.", "qwen3."): value for key, value in LLAMA.items()}
    tensors = llama_tensors() | {"cls.output.weight": np.zeros(shape, np.float32)}
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors, architecture="qwen3")
    with pytest.raises(CheckpointError, match=r"cls\.output\.weight.* is no matrix") as caught:
        GgufSource(path)
    assert caught.value.path == path


def test_tensors_own_their_memory(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    source = GgufSource(path)
    first, again = (source.tensor("model.norm.weight", torch.float32, CPU) for _ in range(2))
    assert first.data_ptr() != again.data_ptr()
    source.close()
    path.write_bytes(bytes(path.stat().st_size))
    assert np.array_equal(first.numpy(), llama_tensors()["output_norm.weight"])


def test_missing_tensor_and_closed_source(tmp_path: Path) -> None:
    source = GgufSource(write_gguf(tmp_path / "model.gguf"))
    assert "lm_head.weight" not in source
    with pytest.raises(CheckpointError, match=r"no tensor for 'lm_head\.weight'"):
        source.tensor("lm_head.weight", torch.float32, CPU)
    source.close()
    with pytest.raises(CheckpointError, match="is closed"):
        source.tensor("model.norm.weight", torch.float32, CPU)


@pytest.mark.parametrize(
    ("there", "field", "left_out"),
    [
        ("attn_q attn_k attn_v", "attention_bias", "self_attn.o_proj"),
        ("attn_output", "attention_bias", "self_attn.q_proj"),
        ("ffn_gate", "mlp_bias", "mlp.down_proj"),
    ],
)
def test_biases_that_a_llama_leaves_out_are_zero(there: str, field: str, left_out: str, tmp_path: Path) -> None:
    tensors = llama_tensors(2)
    for name in there.split():  # of the second layer alone
        weight = tensors[f"blk.1.{name}.weight"]
        tensors[f"blk.1.{name}.bias"] = np.arange(len(weight), dtype=np.float32)
    source = GgufSource(write_gguf(tmp_path / "model.gguf", {**LLAMA, "llama.block_count": 2}, tensors))
    assert source.config[field] is True
    others = "mlp" if field == "attention_bias" else "self_attn"
    assert not any(others in name for name in source.names() if name.endswith(".bias"))
    for layer in range(2):
        zeros = source.tensor(f"model.layers.{layer}.{left_out}.bias", torch.float32, CPU)
        assert torch.equal(zeros, torch.zeros(source.shape(f"model.layers.{layer}.{left_out}.weight")[0]))
    assert not source.tensor(f"model.layers.0.{HUGGING_FACE[there.split()[-1]]}.bias", torch.float32, CPU).any()
    kept = source.tensor(f"model.layers.1.{HUGGING_FACE[there.split()[-1]]}.bias", torch.float32, CPU)
    assert torch.equal(kept, torch.arange(len(kept)).float())


def test_settings_are_no_weights(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"rope_freqs.weight": np.ones(4, np.float32)}
    with_settings = GgufSource(write_gguf(tmp_path / "a.gguf", LLAMA, tensors))
    assert set(with_settings.names()) == set(GgufSource(write_gguf(tmp_path / "b.gguf")).names())


def test_tensor_that_the_architecture_does_not_have(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"blk.0.ssm_in.weight": np.zeros((4, 32), np.float32)}
    with pytest.raises(UnsupportedArchitectureError, match=r"blk\.0\.ssm_in\.weight"):
        GgufSource(write_gguf(tmp_path / "model.gguf", LLAMA, tensors))


def test_query_rows_must_make_heads(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"blk.0.attn_q.weight": np.zeros((36, 32), np.float32)}
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight.* cannot be 4 heads"):
        GgufSource(write_gguf(tmp_path / "model.gguf", LLAMA, tensors))


def test_parts_must_not_repeat_tensors(tmp_path: Path) -> None:
    for part in (1, 2):
        write_gguf(tmp_path / f"m-{part:05}-of-00002.gguf", {**LLAMA, "split.count": 2})
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf repeats tensor"):
        GgufSource(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.smollm2
class TestSmolLM2:
    def test_config(self) -> None:
        source = GgufSource(embedded_model_path())
        config: Any = LlamaConfig(**source.config)
        assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
        assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100_000.0}
        assert config.rms_norm_eps == pytest.approx(1e-5)
        assert config.tie_word_embeddings
        assert not config.attention_bias

    def test_tensors_equal_transformers(self) -> None:
        source = GgufSource(embedded_model_path())
        processor: Any = LlamaTensorProcessor(config={"num_attention_heads": 9, "num_key_value_heads": 3})  # type: ignore[no-untyped-call]
        wanted = {
            "token_embd.weight": "model.embed_tokens.weight",
            "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
            "blk.29.attn_k.weight": "model.layers.29.self_attn.k_proj.weight",
            "blk.7.attn_v.weight": "model.layers.7.self_attn.v_proj.weight",
            "blk.13.ffn_down.weight": "model.layers.13.mlp.down_proj.weight",
        }
        stored = GgufFile(embedded_model_path()).tensors
        for gguf_name, name in wanted.items():
            rows = stored[gguf_name].blocks()[:1024].numpy()  # not the whole vocabulary
            values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(stored[gguf_name].type))
            expected = torch.from_numpy(processor.process(weights=values, name=gguf_name).weights.copy())
            assert torch.equal(source.tensor(name, torch.float32, CPU)[:1024], expected), name
        assert len(source.names()) == 272


def write_nvfp4(path: Path, factors: dict[str, list[float]]) -> Path:
    """Write a llama with experts, of random NVFP4 blocks, and factors by GGUF name."""
    sizes = {"embedding_length": 64, "feed_forward_length": 64, "attention.head_count": 4, "attention.head_count_kv": 4}
    sizes |= {"expert_count": 3, "expert_used_count": 2}
    writer = gguf.GGUFWriter(path, "llama")
    add_metadata(writer, {**LLAMA, **{f"llama.{key}": value for key, value in sizes.items()}})
    random = np.random.default_rng(0)
    writer.add_tensor("blk.0.ffn_gate_inp.weight", random.standard_normal((3, 64), np.float32))
    for name in llama_tensors():
        if "norm" in name or name.startswith("token"):
            writer.add_tensor(name, random.standard_normal((64,) if "norm" in name else (VOCAB, 64), np.float32))
            continue
        is_stack = ".ffn_" in name
        blocks = random.integers(0, 256, (3, 64, 36) if is_stack else (64, 36), np.uint8)
        blocks[..., :4] = random.integers(40, 80, blocks[..., :4].shape)  # the scales
        own = name.replace(".weight", "_exps.weight") if is_stack else name
        writer.add_tensor(own, blocks, raw_dtype=gguf.GGMLQuantizationType.NVFP4)
    for name, numbers in factors.items():
        writer.add_tensor(name, np.array(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_factors_beside_nvfp4_blocks(tmp_path: Path) -> None:
    """llama.cpp's converter writes one for a matrix or for that of each expert. Those of activations are not used."""
    of_activations = {"blk.0.attn_q.input_scale": [7.0], "blk.0.ffn_up_exps.input_scale": [7.0, 8.0, 9.0]}
    factors = {"blk.0.attn_q.scale": [0.3], "blk.0.attn_v.scale": [2.0], "blk.0.ffn_down_exps.scale": [0.1, 1.0, 3.0]}
    plain = GgufSource(write_nvfp4(tmp_path / "plain.gguf", {}))
    source = GgufSource(write_nvfp4(tmp_path / "factors.gguf", factors | of_activations))
    assert set(source.names()) == set(plain.names())
    experts = "model.layers.0.block_sparse_moe.experts"
    expected = {
        "model.layers.0.self_attn.q_proj.weight": 0.3,
        "model.layers.0.self_attn.v_proj.weight": 2.0,
        **{f"{experts}.{expert}.w2.weight": factor for expert, factor in enumerate((0.1, 1.0, 3.0))},
    }
    assert expected.keys() <= set(source.names()), sorted(source.names())
    for name in source.names():
        found, stored = (each.tensor(name, torch.float32, CPU) for each in (source, plain))
        torch.testing.assert_close(found, stored * expected.get(name, 1.0), rtol=1e-6, atol=0)
        if found.dim() > 1:
            assert torch.equal(source.matrix(name).rows(slice(1, 3)).decoded(torch.float32), found[1:3])
            assert source.matrix(name).is_dense == plain.matrix(name).is_dense
    plain.close()
    source.close()


@pytest.mark.parametrize("numbers", [[1.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
def test_factors_of_other_matrices_are_refused(numbers: list[float], tmp_path: Path) -> None:
    for name in ("blk.0.attn_q.scale", "blk.0.ffn_up_exps.scale"):
        with pytest.raises(CheckpointError, match="is no factor of"):
            GgufSource(write_nvfp4(tmp_path / "model.gguf", {name: numbers}))
