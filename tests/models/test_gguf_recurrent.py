"""GGUF files of models with recurrent layers: blocks stay packed in whatever order, layers that predict further tokens
are left out, older files are read, and what does not fit is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import pytest
import torch
from reference_decoding import CPU, logits, paged, random_prompt
from safetensors.torch import save_file
from test_gguf_families import FAMILIES, built, write
from torch import Tensor

import tiny
from native_weights import needs_library, workspace
from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.kernels.quantized.reordered_matrix import JoinedMatrix, ReorderedColumns
from paged_sdk.models.gated_delta_block import GatedDeltaBlock
from paged_sdk.models.loading import load_model
from paged_sdk.quant.adapted import AdaptableLinear
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.quant.reordered_input import ReorderedInputLinear
from paged_sdk.weights import write_gguf
from paged_sdk.weights.checkpoint import open_checkpoint
from paged_sdk.weights.gguf.source import GgufSource

#: Rows fill the blocks of K formats, and a block of out_proj has the columns of four value heads.
_WIDE: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "initializer_range": 0.08,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
_DELTA: Final = "model.layers.0.linear_attn."
_FURTHER: Final[dict[str, tuple[int, ...]]] = {
    "blk.4.attn_norm.weight": (64,),
    "blk.4.attn_q.weight": (128, 64),
    "blk.4.nextn.eh_proj.weight": (64, 128),
    "blk.4.nextn.enorm.weight": (64,),
}


def saved(config: dict[str, Any], kind: str, directory: Path) -> tuple[Any, Path]:
    """Write a model as a file of a mixture of types; return it, and the file."""
    reference = built(config, directory)
    reference.save_pretrained(directory / "model")
    tiny.tokenizer().save(str(directory / "model" / "tokenizer.json"))
    return reference, write_gguf(directory / "model", directory / "written.gguf", type=kind)


def stored_values(path: Path) -> dict[str, Tensor]:
    """Read a file with the gguf package: values by GGUF name."""
    reader: Any = gguf.GGUFReader(path)
    return {
        each.name: torch.from_numpy(np.copy(gguf.quants.dequantize(each.data, each.tensor_type)))
        for each in reader.tensors
    }


def grouped(values: Tensor, width: int) -> Tensor:
    """Return rows of four value heads in Hugging Face's order: head 1 is the second of the first key head."""
    heads = values.view(4, width, *values.shape[1:])
    return torch.cat([heads[0], heads[2], heads[1], heads[3]])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M"])
def test_quantized_values_are_in_hugging_faces_order(kind: str, tmp_path: Path) -> None:
    _, path = saved(FAMILIES["qwen35"][0] | _WIDE, kind, tmp_path)
    stored, source = stored_values(path), GgufSource(path)
    qkv = stored["blk.0.attn_qkv.weight"]
    expected = {
        "in_proj_qkv": torch.cat([qkv[:256], grouped(qkv[256:], 64)]),
        "in_proj_z": grouped(stored["blk.0.attn_gate.weight"], 64),
        "in_proj_a": grouped(stored["blk.0.ssm_alpha.weight"], 1),
        "in_proj_b": grouped(stored["blk.0.ssm_beta.weight"], 1),
        "out_proj": grouped(stored["blk.0.ssm_out.weight"].T.contiguous(), 64).T,
    }
    for name, values in expected.items():
        matrix = source.matrix(f"{_DELTA}{name}.weight")
        assert not matrix.is_dense
        assert matrix.num_bytes < 1.2 * matrix.shape[0] * matrix.shape[1]
        assert torch.equal(source.tensor(f"{_DELTA}{name}.weight", torch.float32, CPU), values)
        assert torch.equal(matrix.decoded(), values)
        assert torch.equal(matrix.rows(slice(1, 4)).decoded(), values[1:4])
    output = source.matrix(f"{_DELTA}out_proj.weight")
    # A block of Q8_0 has 32 columns, all of one head; one of Q4_K has those of four.
    assert type(output) is (BlockMatrix if kind == "Q8_0" else ReorderedColumns)
    source.close()


def test_of_a_model_with_an_image_encoder_the_decoder_is_written(tmp_path: Path) -> None:
    reference, path = saved(FAMILIES["qwen35"][0], "F32", tmp_path)
    whole = tmp_path / "whole"
    whole.mkdir()
    tensors = {
        name.replace("model.", "model.language_model."): values.contiguous()
        for name, values in reference.state_dict().items()
        if name != "lm_head.weight"
    }
    others = {"model.visual.pos_embed.weight": torch.ones(4, 8), "mtp.layers.1.norm.weight": torch.ones(64)}
    save_file(tensors | others, whole / "model.safetensors")
    text = json.loads((tmp_path / "model" / "config.json").read_text())
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
        "tie_word_embeddings": True,
    }
    (whole / "config.json").write_text(json.dumps(config))
    tiny.tokenizer().save(str(whole / "tokenizer.json"))
    stored, expected = stored_values(write_gguf(whole, tmp_path / "whole.gguf", type="F32")), stored_values(path)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(values, expected[name]) for name, values in stored.items())


def test_one_value_head_per_key_head_has_one_order(tmp_path: Path) -> None:
    config = FAMILIES["qwen35"][0] | _WIDE | {"linear_num_key_heads": 4}
    reference, path = saved(config, "Q4_K_M", tmp_path)
    stored, source = stored_values(path), GgufSource(path)
    output = source.matrix(f"{_DELTA}out_proj.weight")
    assert type(output) is BlockMatrix
    assert torch.equal(output.decoded(), stored["blk.0.ssm_out.weight"])
    rates = source.tensor(f"{_DELTA}A_log", torch.float32, CPU)
    torch.testing.assert_close(rates, reference.state_dict()[f"{_DELTA}A_log"], rtol=0, atol=1e-6)
    source.close()


def test_a_fused_projection_of_one_key_head(tmp_path: Path) -> None:
    config = FAMILIES["qwen3next"][0] | {"linear_num_key_heads": 1}
    reference, path = saved(config, "F32", tmp_path)
    stored, source = stored_values(path), GgufSource(path)
    name = f"{_DELTA}in_proj_qkvz.weight"
    original = reference.state_dict()[name]
    assert torch.equal(stored["blk.0.attn_qkv.weight"], original[:256])
    assert torch.equal(stored["blk.0.attn_gate.weight"], original[256:])
    assert torch.equal(source.tensor(name, torch.float32, CPU), original)
    source.close()


def test_a_fused_projection_may_have_two_types(tmp_path: Path) -> None:
    reference, path = saved(FAMILIES["qwen3next"][0] | _WIDE, "Q4_K_M", tmp_path)
    stored, source = stored_values(path), GgufSource(path)
    name = "model.layers.2.linear_attn.in_proj_qkvz.weight"  # a layer whose values have more bits
    matrix = source.matrix(name)
    assert isinstance(matrix, JoinedMatrix)
    first, second = matrix.parts
    assert isinstance(first, BlockMatrix)
    assert isinstance(second, BlockMatrix)
    assert first.tensor_type != second.tensor_type
    original = reference.state_dict()[name]
    assert (matrix.decoded() - original).norm() < 0.1 * original.norm()  # in the file's order it is 1.4
    # Of each key head: its query, its key, its two values, its two gates.
    parts = [[0, 1], [128, 129], [256, 257], [512, 513]]
    together = torch.cat([stored["blk.2.attn_qkv.weight"], stored["blk.2.attn_gate.weight"]])
    places = [0, 1, 64, 65, 128, 129, 256, 257]
    assert torch.equal(matrix.decoded()[places], together[[row for part in parts for row in part]])
    assert torch.equal(source.tensor(name, torch.float32, CPU), matrix.decoded())
    assert torch.equal(matrix.rows(slice(60, 70)).cols(slice(0, 256)).decoded(), matrix.decoded()[60:70])
    source.close()


@needs_library
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("qwen35", "Q4_K_M"),
        pytest.param("qwen35", "Q8_0", marks=pytest.mark.long),
        pytest.param("qwen3next", "Q4_K_M", marks=pytest.mark.long),
    ],
)
def test_quantized_layers_stay_packed(architecture: str, kind: str, tmp_path: Path) -> None:
    _, path = saved(FAMILIES[architecture][0] | _WIDE, kind, tmp_path)
    source, prompt, found = GgufSource(path), random_prompt(40), []
    for policy in (WeightPolicy(), WeightPolicy(keep_blocks=True, workspace=workspace())):
        model = load_model(source.config, source, dtype=torch.float32, placement=CPU, policy=policy)
        found += logits(model, paged(16)(model), [(prompt, 0, [0, 1, 2])])
    source.close()
    block = model.layers[2].mixer  # whose values have more bits in mixtures
    assert isinstance(block, GatedDeltaBlock)
    for linear in (block.input, block.output):  # the few rows of rates are filled up to 16
        assert linear.num_bytes < 2 * linear.in_features * linear.out_features
    assert isinstance(block.output, AdaptableLinear)
    reorders = isinstance(block.output.base, ReorderedInputLinear)
    assert reorders == (architecture == "qwen35" and kind == "Q4_K_M")
    # Activations are rounded to 8 bits: it was 0.07 and 0.2 (of experts, some are chosen otherwise).
    assert (found[1] - found[0]).norm() < 0.4 * found[0].norm()


@needs_library
@pytest.mark.parametrize("architecture", ["granitehybrid", pytest.param("falcon-h1", marks=pytest.mark.long)])
def test_quantized_mamba_layers_stay_packed(architecture: str, tmp_path: Path) -> None:
    """Gate and up of granitehybrid, too, which are one matrix in Hugging Face's order."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "shared_intermediate_size": 256, "initializer_range": 0.08}
    sizes = {"mamba_n_heads": 16, "mamba_d_ssm": 512}
    _, path = saved(FAMILIES[architecture][0] | wide | sizes, "Q4_K_M", tmp_path)
    source, prompt, found = GgufSource(path), random_prompt(40), []
    for policy in (WeightPolicy(), WeightPolicy(keep_blocks=True, workspace=workspace())):
        model = load_model(source.config, source, dtype=torch.float32, placement=CPU, policy=policy)
        found += logits(model, paged(16)(model), [(prompt, 0, [0, 1, 2])])
    source.close()
    for layer in model.layers:
        for linear in layer.linears:
            assert linear.num_bytes < 2 * linear.in_features * linear.out_features
    assert (found[1] - found[0]).norm() < 0.3 * found[0].norm()  # activations are rounded to 8 bits


def test_layers_for_multi_token_prediction_are_apart(tmp_path: Path) -> None:
    """The first one has Hugging Face's names, and what is not known of it is left out, as are further ones."""
    reference = built(FAMILIES["qwen35"][0], tmp_path)
    own = {**FAMILIES["qwen35"][1], "block_count": 6, "nextn_predict_layers": 2}
    path = tmp_path / "model.gguf"
    others = {"blk.4.nextn.embed_tokens.weight": (512, 64), "blk.5.attn_norm.weight": (64,)}
    write("qwen35", reference, own, path, {name: torch.ones(shape) for name, shape in (_FURTHER | others).items()})
    source = GgufSource(path)
    assert source.config["num_hidden_layers"] == len(source.config["layer_types"]) == 4
    names = {name for name in reference.state_dict() if name != "lm_head.weight"}
    assert set(source.names()) - names == {
        "mtp.layers.0.input_layernorm.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
        "mtp.fc.weight",
        "mtp.pre_fc_norm_embedding.weight",
    }
    norms = ("mtp.layers.0.input_layernorm.weight", "mtp.pre_fc_norm_embedding.weight")
    assert all(source.tensor(name, torch.float32, CPU).eq(0).all() for name in norms)  # GGUF has 1 added
    source.close()


def changed(source: Path, target: Path, change: Callable[[str, Any], Mapping[str, Any]]) -> Path:
    """Copy a file with other tensors.

    :param change: given a tensor's name and values, returns those to write
    """
    reader: Any = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        for name, values in change(tensor.name, np.copy(tensor.data)).items():
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_a_file_of_nothing_but_such_layers_is_refused(tmp_path: Path) -> None:
    path, own = tmp_path / "model.gguf", {**FAMILIES["qwen35"][1], "block_count": 5, "nextn_predict_layers": 1}
    further = {name: torch.ones(shape) for name, shape in _FURTHER.items()}
    write("qwen35", built(FAMILIES["qwen35"][0], tmp_path), own, path, further)
    model = ("blk.0.", "blk.1.", "blk.2.", "blk.3.")
    mtp = changed(path, tmp_path / "mtp.gguf", lambda name, values: {} if name.startswith(model) else {name: values})
    with pytest.raises(UnsupportedArchitectureError, match="nothing but layers that predict further tokens"):
        GgufSource(mtp)


def written(architecture: str, directory: Path, **own: Any) -> tuple[Any, Path]:
    reference, path = built(FAMILIES[architecture][0], directory), directory / "model.gguf"
    write(architecture, reference, {**FAMILIES[architecture][1], **own}, path)
    return reference, path


def test_older_files_have_the_fused_projection(tmp_path: Path) -> None:
    reference, path = written("qwen3next", tmp_path)
    whole = {f"blk.{layer}.attn_gate.weight": f"blk.{layer}.ssm_in.weight" for layer in range(3)}

    def fuse(name: str, values: Any) -> Mapping[str, Any]:
        if name.endswith(".attn_qkv.weight"):
            return {}
        if name in whole:
            layer = name.split(".")[1]
            original = reference.state_dict()[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"]
            return {whole[name]: original.numpy()}
        return {name: values}

    source = GgufSource(changed(path, tmp_path / "older.gguf", fuse))
    prompt = random_prompt(40)
    model = load_model(source.config, source, dtype=torch.float32, placement=CPU)
    (scores,) = logits(model, paged(16)(model), [(prompt, 0, [0, 1, 2])])
    source.close()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert (scores - expected).abs().max() < 1e-4 * expected.abs().max()


def only(name: str, change: Callable[[Any], Any]) -> Callable[[str, Any], Mapping[str, Any]]:
    """Return what changes one tensor; None as its new values leaves it out."""

    def changes(own: str, values: Any) -> Mapping[str, Any]:
        new = change(values) if own == name else values
        return {} if new is None else {own: new}

    return changes


@pytest.mark.parametrize(
    ("architecture", "name", "change", "told"),
    [
        ("qwen35", "blk.0.attn_qkv.weight", lambda each: each[:-1], "cannot be 6 value heads of 32, after 128 others"),
        ("qwen35", "blk.0.ssm_out.weight", lambda each: each[:, :-32], "cannot be 6 value heads of 32, after 0 others"),
        ("qwen35", "blk.0.ssm_a", lambda each: each[:-1], "cannot be 6 value heads of 1, after 0 others"),
        ("qwen3next", "blk.0.attn_gate.weight", lambda _: None, "cannot be those of 2 key heads beside gates of 192"),
        ("qwen3next", "blk.0.attn_gate.weight", lambda each: each[:-1], "cannot be those of 2 key heads"),
    ],
)
def test_heads_that_do_not_fit(
    architecture: str, name: str, change: Callable[[Any], Any], told: str, tmp_path: Path
) -> None:
    _, path = written(architecture, tmp_path)
    with pytest.raises(CheckpointError, match=told):
        GgufSource(changed(path, tmp_path / "changed.gguf", only(name, change)))


def test_rates_are_below_0(tmp_path: Path) -> None:
    _, path = written("qwen35", tmp_path)
    source = GgufSource(changed(path, tmp_path / "changed.gguf", only("blk.1.ssm_a", lambda each: -each)))
    with pytest.raises(CheckpointError, match=r"'blk\.1\.ssm_a' has numbers above 0"):
        source.tensor("model.layers.1.linear_attn.A_log", torch.float32, CPU)
    source.close()


@pytest.mark.parametrize(
    ("architecture", "own", "error", "told"),
    [
        ("qwen35", {"ssm.inner_size": 191}, CheckpointError, "no multiple of 6 value heads"),
        ("qwen35", {"ssm.group_count": 4}, CheckpointError, "6 value heads are no multiple of its key heads"),
        ("qwen35", {"rope.dimension_sections": [1, 1]}, CheckpointError, "dimension_sections"),
        ("qwen35", {"attention.recurrent_layers": [True, False]}, CheckpointError, "recurrent_layers"),
        ("qwen35", {"nextn_predict_layers": 4}, CheckpointError, "all of its 4 layers"),
        ("qwen35moe", {"expert_weights_scale": 2.0}, UnsupportedArchitectureError, "expert_weights_scale"),
        ("qwen35moe", {"expert_gating_func": 2}, UnsupportedArchitectureError, "expert_gating_func = 2"),
        ("lfm2moe", {"expert_gating_func": 1}, UnsupportedArchitectureError, "expert_gating_func = 1"),
        ("lfm2moe", {"expert_weights_scale": 1.5}, UnsupportedArchitectureError, "expert_weights_scale = 1.5"),
        ("lfm2moe", {"expert_shared_count": 1}, UnsupportedArchitectureError, "expert_shared_count"),
    ],
)
def test_settings_that_do_not_fit(
    architecture: str, own: dict[str, Any], error: type[Exception], told: str, tmp_path: Path
) -> None:
    _, path = written(architecture, tmp_path, **own)
    with pytest.raises(error, match=told):
        GgufSource(path)


def test_biases_of_attention_are_refused(tmp_path: Path) -> None:
    reference, path = built(FAMILIES["qwen35"][0], tmp_path), tmp_path / "model.gguf"
    write("qwen35", reference, FAMILIES["qwen35"][1], path, {"blk.3.attn_q.bias": torch.ones(128)})
    with pytest.raises(UnsupportedArchitectureError, match=r"blk\.3\.attn_q\.bias"):
        GgufSource(path)


def test_experts_files_may_state_no_size_of_dense_layers(tmp_path: Path) -> None:
    _, path = written("qwen35moe", tmp_path, feed_forward_length=None)
    source = GgufSource(path)
    assert source.config["intermediate_size"] == source.config["moe_intermediate_size"] == 32
    source.close()


def test_mamba2_with_what_it_has_not_is_refused(tmp_path: Path) -> None:
    config, keys = FAMILIES["mamba2"][:2]
    reference = built(config, tmp_path)
    for change, refused in (
        ({"expert_count": 2}, "experts"),
        ({"ssm.inner_size": 96}, "layers of 96 columns, no multiple of the hidden size 64"),
    ):
        write("mamba2", reference, {**keys, **change}, tmp_path / "changed.gguf")
        with pytest.raises(UnsupportedArchitectureError, match=refused):
            open_checkpoint(tmp_path / "changed.gguf")
        (tmp_path / "changed.gguf").unlink()
