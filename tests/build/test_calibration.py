"""What is collected of a text, beside transformers' activations, and files that are quantized by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import tiny
from paged_sdk import ConfigError, write_gguf
from paged_sdk.build import calibration
from paged_sdk.build.calibration import calibrate
from paged_sdk.build.importance import load_importance
from paged_sdk.config.build import BuildSettings
from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS
from paged_sdk.weights.checkpoint import open_checkpoint
from paged_sdk.weights.gguf.file import GgufFile
from paged_sdk.weights.importance import ImportanceMatrix, read_importance

TEXT = "the quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@contextmanager
def squares_of(model: Any) -> Iterator[dict[str, Tensor]]:
    """Keep the mean squares of what each linear module multiplies."""
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, args: tuple[Tensor, ...]) -> None:
            seen[name] = args[0].flatten(0, -2).square().mean(0)

        return hook

    hooks = [
        module.register_forward_pre_hook(watch(name))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])
def test_squares_are_those_of_transformers(family: str, tmp_path: Path, text: Path) -> None:
    path = tiny.make_checkpoint(family, tmp_path / "model")
    found = calibrate(path, text, dtype=torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    token_ids = tiny.tokenizer().encode(TEXT, add_special_tokens=False).ids
    assert 100 < len(token_ids) < 500
    with torch.inference_mode(), squares_of(model) as expected:
        model(torch.tensor([token_ids]))
    names = {
        "attn_output": "self_attn.o_proj",
        "ffn_down": "mlp.down_proj",
        **(
            {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
            if family == "phi3"
            else {"attn_q": "self_attn.q_proj", "attn_v": "self_attn.v_proj", "ffn_gate": "mlp.gate_proj"}
        ),
    }
    for layer in range(model.config.num_hidden_layers):
        for own, name in names.items():
            entry = found.means(f"blk.{layer}.{own}.weight")
            assert relative(entry, expected[f"model.layers.{layer}.{name}"]) < 1e-4, (layer, own)
    if not model.config.tie_word_embeddings:
        assert relative(found.means("output.weight"), expected["lm_head"]) < 1e-4


@pytest.mark.parametrize("query_rank", [24, pytest.param(None, marks=pytest.mark.long)])
def test_latent_attention_and_shared_experts(query_rank: int | None, tmp_path: Path, text: Path) -> None:
    config: dict[str, Any] = {
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 24,
        "v_head_dim": 20,
        "kv_lora_rank": 32,
        "q_lora_rank": query_rank,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 2 if query_rank else 27,  # GGUF has no other models without that vector
    }
    path = tiny.make_other_checkpoint("deepseek_v3", tmp_path / "model", **config)
    found = calibrate(path, text, dtype=torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    token_ids = tiny.tokenizer().encode(TEXT, add_special_tokens=False).ids
    with torch.inference_mode(), squares_of(model) as expected:
        model(torch.tensor([token_ids]))
    queries = {"attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj"}
    attention = {"attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_output": "self_attn.o_proj"}
    attention |= queries if query_rank else {"attn_q": "self_attn.q_proj"}
    shared = {"ffn_up_shexp": "mlp.shared_experts.up_proj", "ffn_down_shexp": "mlp.shared_experts.down_proj"}
    for layer, own in enumerate(({"ffn_down": "mlp.down_proj"}, shared)):
        for stem, name in (attention | own).items():
            entry = found.means(f"blk.{layer}.{stem}.weight")
            assert relative(entry, expected[f"model.layers.{layer}.{name}"]) < 1e-4, (layer, stem)


def test_experts_have_their_own(tmp_path: Path, text: Path) -> None:
    overrides = tiny.GGUF_OVERRIDES.get("qwen3_moe", {})
    path = tiny.make_checkpoint("qwen3_moe", tmp_path / "model", **overrides)
    found = calibrate(path, text, dtype=torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")
    experts = model.model.layers[0].mlp.experts
    inputs: list[tuple[Tensor, Tensor]] = []
    hook = experts.register_forward_pre_hook(lambda _, args: inputs.append((args[0], args[1])))
    token_ids = tiny.tokenizer().encode(TEXT, add_special_tokens=False).ids
    with torch.inference_mode():
        model(torch.tensor([token_ids]))
    hook.remove()
    model.requires_grad_(False)
    ((hidden, ids),) = inputs
    count = model.config.num_experts
    gate_up = found.means("blk.0.ffn_gate_exps.weight").view(count, -1)
    down = found.means("blk.0.ffn_down_exps.weight").view(count, -1)
    for expert in range(count):
        chosen = hidden.flatten(0, -2)[(ids == expert).any(-1)]
        if not len(chosen):
            assert not gate_up[expert].any()
            continue
        gate, up = torch.nn.functional.linear(chosen, experts.gate_up_proj[expert]).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        assert relative(gate_up[expert], chosen.square().mean(0)) < 1e-4
        assert relative(down[expert], inner.square().mean(0)) < 1e-4


def weighted_error(path: Path, exact: GgufFile, importance: ImportanceMatrix) -> float:
    """Return the squared error of a file's matrices, times the squares of what they multiply."""
    total = 0.0
    for name, tensor in GgufFile(path).tensors.items():
        if name in importance.sums:
            squares = importance.means(name)
            errors = (tensor.decoded() - exact.tensors[name].decoded()).square()
            total += float((errors.reshape(-1, errors.shape[-2], errors.shape[-1]).sum(1).flatten() * squares).sum())
    return total


@pytest.mark.parametrize(("family", "type_"), [("llama", "Q4_0"), ("qwen3_moe", "Q4_0"), ("llama", "IQ4_NL")])
def test_a_calibrated_file_is_nearer_where_it_matters(family: str, type_: str, tmp_path: Path, text: Path) -> None:
    overrides = tiny.GGUF_OVERRIDES.get(family, {})
    source = tiny.make_checkpoint(family, tmp_path / "model", dtype="bfloat16", **overrides)
    exact = GgufFile(write_gguf(source, tmp_path / "exact.gguf", type="F32"))
    plain = write_gguf(source, tmp_path / "plain.gguf", type=type_)
    calibrated = write_gguf(source, tmp_path / "calibrated.gguf", type=type_, calibrate=text)
    importance = calibrate(source, text)
    gain = weighted_error(calibrated, exact, importance) / weighted_error(plain, exact, importance)
    assert gain < 0.97
    own, other = GgufFile(calibrated), GgufFile(plain)
    kinds = [{name: BLOCK_FORMATS[each.type].name for name, each in file.tensors.items()} for file in (own, other)]
    assert kinds[0] == kinds[1]
    again = write_gguf(calibrated, tmp_path / "again.gguf", type="Q5_0", calibrate=text)
    assert GgufFile(again).metadata["quantize.imatrix.entries_count"] == len(importance.sums)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_what_was_collected_is_kept_and_added_to(family: str, tmp_path: Path, text: Path) -> None:
    source = tiny.make_checkpoint(family, tmp_path / "model", **tiny.GGUF_OVERRIDES.get(family, {}))
    other = tmp_path / "other.txt"
    other.write_text("pack my box with five dozen liquor jugs. " * 5)
    first, both = tmp_path / "first.gguf", tmp_path / "both.gguf"
    calibrated = write_gguf(source, tmp_path / "a.gguf", type="Q4_0", calibrate=text, imatrix_out=first)
    collected, kept = calibrate(source, text), read_importance(first)
    assert kept.sums.keys() == collected.sums.keys()
    for name, squares in collected.sums.items():
        assert torch.equal(kept.sums[name], squares)
        assert torch.equal(kept.counts[name], collected.counts[name])
    read = write_gguf(source, tmp_path / "b.gguf", type="Q4_0", imatrix=first)
    assert all(
        torch.equal(tensor.blocks(), GgufFile(read).tensors[name].blocks())
        for name, tensor in GgufFile(calibrated).tensors.items()
    )
    write_gguf(source, tmp_path / "c.gguf", type="Q4_0", imatrix=first, calibrate=other, imatrix_out=both)
    sums, more = read_importance(both), calibrate(source, other)
    for name, squares in sums.sums.items():
        assert torch.equal(squares, collected.sums[name] + more.sums[name])
    metadata = GgufFile(both).metadata
    assert metadata["imatrix.datasets"] == [str(text), str(other)]
    assert (metadata["imatrix.chunk_count"], metadata["imatrix.chunk_size"]) == (2, 512)


@pytest.mark.parametrize("family", ["starcoder2", "nemotron"])
def test_mlps_without_a_gate(family: str, tmp_path: Path, text: Path) -> None:
    path = tiny.make_other_checkpoint(family, tmp_path / "model")
    found = calibrate(path, text, dtype=torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    token_ids = tiny.tokenizer().encode(TEXT, add_special_tokens=False).ids
    with torch.inference_mode(), squares_of(model) as expected:
        model(torch.tensor([token_ids]))
    names = ("mlp.c_fc", "mlp.c_proj") if family == "starcoder2" else ("mlp.up_proj", "mlp.down_proj")
    for own, name in zip(("ffn_up", "ffn_down"), names, strict=True):
        assert relative(found.means(f"blk.1.{own}.weight"), expected[f"model.layers.1.{name}"]) < 1e-4, own


def test_experts_without_a_gate(tmp_path: Path, text: Path) -> None:
    """They read latent vectors; what maps to these, and the shared expert, read the model's."""
    config: dict[str, Any] = {
        "layers_block_type": ["moe", "full_attention", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "moe_latent_size": 32,
    }
    path = tiny.make_other_checkpoint("nemotron_h", tmp_path / "model", **config)
    found = calibrate(path, text, dtype=torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")
    token_ids = tiny.tokenizer().encode(TEXT, add_special_tokens=False).ids
    experts, inputs = model.model.layers[0].mixer.experts.requires_grad_(False), list[tuple[Tensor, Tensor]]()
    experts.register_forward_pre_hook(lambda _, args: inputs.append((args[0], args[1])))
    with torch.inference_mode(), squares_of(model) as expected:
        model(torch.tensor([token_ids]))
    names = {"up_shexp": "shared_experts.up_proj", "down_shexp": "shared_experts.down_proj"}
    for own, name in (names | {"latent_down": "fc1_latent_proj", "latent_up": "fc2_latent_proj"}).items():
        assert relative(found.means(f"blk.0.ffn_{own}.weight"), expected[f"model.layers.0.mixer.{name}"]) < 1e-4, own
    ((hidden, ids),) = inputs
    up, down = (found.means(f"blk.0.ffn_{own}_exps.weight").view(4, -1) for own in ("up", "down"))
    assert "blk.0.ffn_gate_exps.weight" not in found.sums
    for expert in sorted(set(ids.flatten().tolist())):
        chosen = hidden[(ids == expert).any(-1)]
        inner = torch.nn.functional.linear(chosen, experts.up_proj[expert]).relu().square()
        assert relative(up[expert], chosen.square().mean(0)) < 1e-4
        assert relative(down[expert], inner.square().mean(0)) < 1e-4


_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_NEXT: dict[str, Any] = {
    "mlp_only_layers": [],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


@pytest.mark.parametrize(
    ("family", "config", "names"),
    [
        ("qwen3_5_text", _DELTA, {"attn_qkv": "in_proj_qkv", "attn_gate": "in_proj_z", "ssm_alpha": "in_proj_a"}),
        (
            "qwen3_next",
            _DELTA | _NEXT,
            {"attn_qkv": "in_proj_qkvz", "attn_gate": "in_proj_qkvz", "ssm_ba": "in_proj_ba"},
        ),
    ],
)
def test_gated_delta_networks(
    family: str, config: dict[str, Any], names: dict[str, str], tmp_path: Path, text: Path
) -> None:
    path = tiny.make_other_checkpoint(family, tmp_path / "model", **config)
    found = calibrate(path, text, dtype=torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    token_ids = tiny.tokenizer().encode(TEXT, add_special_tokens=False).ids
    with torch.inference_mode(), squares_of(model) as expected:
        model(torch.tensor([token_ids]))
    for own, name in names.items():
        assert relative(found.means(f"blk.2.{own}.weight"), expected[f"model.layers.2.linear_attn.{name}"]) < 1e-4
    assert relative(found.means("blk.1.attn_q.weight"), expected["model.layers.1.self_attn.q_proj"]) < 1e-4
    output = expected["model.layers.2.linear_attn.out_proj"]
    # In files of qwen35, the three value heads of a key head are not side by side.
    heads = output.view(2, 3, 16).transpose(0, 1).flatten() if family == "qwen3_5_text" else output
    assert relative(found.means("blk.2.ssm_out.weight"), heads) < 1e-4
    # The file of what was collected has an entry for each of its own matrices, and serves the checkpoint's.
    kept = tmp_path / "kept.gguf"
    written = write_gguf(path, tmp_path / "m.gguf", type="Q4_0", calibrate=text, imatrix_out=kept)
    assert found.sums.keys() <= GgufFile(written).tensors.keys()
    opened = open_checkpoint(path)
    importance = load_importance(opened, BuildSettings(imatrix=kept), lambda: None)
    opened.source.close()
    assert importance is not None
    weights = importance.of("model.layers.2.linear_attn.out_proj.weight", ())
    assert weights is not None
    weights, wanted = weights / weights.mean(), output / output.mean()
    assert relative(weights, wanted) < 0.05  # bfloat16; in the file's order it is 0.4


def test_what_cannot_be_calibrated_on(tiny_checkpoint: Path, tmp_path: Path, text: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    for path, said in ((empty, "some text"), (tmp_path / "none.txt", "none.txt"), (tiny_checkpoint, "a file of text")):
        with pytest.raises(ConfigError, match="calibrate") as caught:
            write_gguf(tiny_checkpoint, tmp_path / "m.gguf", calibrate=path)
        assert said in str(caught.value)
    with pytest.raises(CheckpointError, match="cannot be read as an importance matrix"):
        write_gguf(tiny_checkpoint, tmp_path / "m.gguf", calibrate=text, imatrix=text)
    with pytest.raises(ConfigError, match="where nothing is calibrated"):
        write_gguf(tiny_checkpoint, tmp_path / "m.gguf", imatrix_out=tmp_path / "imatrix.gguf")
    for taken in (text, tmp_path / "none" / "imatrix.gguf"):
        with pytest.raises(ConfigError, match="imatrix_out"):
            write_gguf(tiny_checkpoint, tmp_path / "m.gguf", calibrate=text, imatrix_out=taken)
    with pytest.raises(CheckpointError, match="cannot be read as an importance matrix"):
        write_gguf(tiny_checkpoint, tmp_path / "m.gguf", imatrix=text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "text.txt"]


def test_a_model_without_names_in_gguf_is_refused_before_it_is_loaded(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, Any] = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "attn_layer_indices": [1]}
    path = tiny.make_other_checkpoint("bamba", tmp_path / "model", **sizes)
    loaded: list[object] = []
    monkeypatch.setattr(calibration, "load_model", lambda *_, **__: loaded.append(None))
    with pytest.raises(UnsupportedArchitectureError, match=r"bamba model do not have; with_isq \(--isq\) quantizes"):
        calibrate(path, text)
    with pytest.raises(UnsupportedArchitectureError, match=r"written for it; with_isq \(--isq\) quantizes"):
        write_gguf(path, tmp_path / "written.gguf", type="F32")
    assert not loaded
