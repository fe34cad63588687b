"""Experts of transformers' classes are in this package's weight forms, and compute what transformers computes."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.tiny_classes import MODEL_TYPES, tiny_config, tiny_model
from reference_decoding import CPU, DictSource, logits, ours, paged
from torch import Tensor
from transformers import PreTrainedModel

import tiny
from native_weights import needs_library, workspace
from paged_sdk import (
    BlockingModel,
    ConfigError,
    IsqType,
    LayerTopology,
    PagedAttentionMeta,
    SamplingParams,
    TextModelBuilder,
    Topology,
)
from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError
from paged_sdk.kernels.placement import Placement
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.models.moe_mlp import MoeMlp
from paged_sdk.models.transformers_door import experts as door_experts
from paged_sdk.models.transformers_door.experts import OwnExperts
from paged_sdk.models.transformers_door.loading import TransformersDoor, open_door
from paged_sdk.models.transformers_door.model import TransformersModel
from paged_sdk.quant.dense_experts import DenseExperts
from paged_sdk.quant.native_block_experts import NativeBlockExperts
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.weights.checkpoint import open_checkpoint
from paged_sdk.weights.source import WeightSource
from quantized_writers import WRITERS, pack_checkpoint

PROMPT = (5, 9, 33, 120, 77, 41, 8, 250, 16, 93, 11, 61, 28)

pytestmark = needs_library


def through_the_door(
    reference: PreTrainedModel, directory: Path, *, source: WeightSource | None = None, **policy: Any
) -> TransformersModel:
    """Save a model, and load what was saved, with native kernels."""
    reference.save_pretrained(directory)
    checkpoint = open_checkpoint(directory)
    door = open_door(checkpoint.config, torch.float32)
    try:
        return load(door, checkpoint.source if source is None else source, **policy)
    finally:
        checkpoint.source.close()


def load(door: TransformersDoor, source: WeightSource, **policy: Any) -> TransformersModel:
    chosen = WeightPolicy(workspace=workspace(), **policy)
    placement = Placement.on(CPU, door.config.num_layers)
    return door.load(source, dtype=torch.float32, placement=placement, policy=chosen, num_threads=2)


def scores_of(model: Any) -> Tensor:
    """Return a prompt's logits, its last tokens computed in a step of their own."""
    backend = paged(16)(model)
    return torch.cat([logits(model, backend, [(PROMPT[a:b], a, [0])])[0] for a, b in ((0, 9), (9, len(PROMPT)))])


def scores_of_transformers(reference: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        made: Tensor = reference(torch.tensor([PROMPT])).logits[0]
    return made


def forms(model: TransformersModel) -> list[Any]:
    """Return the forms of a model's experts, layer by layer."""
    return [getattr(own, "experts", own) for own in model.seam.experts.values()]


def close(some: Tensor, others: Tensor) -> bool:
    return float((some - others).abs().max()) < 2e-4 * float(others.abs().max())


def of(reference: PreTrainedModel) -> list[Any]:
    """Return the modules of a model that follow transformers' interface for experts."""
    return [module for module in reference.modules() if hasattr(module, "has_post_expert_norm")]


def assert_near_in_8_bits(reference: PreTrainedModel, directory: Path) -> None:
    """Compare quantized experts with those of transformers; Llama 4's take other arguments."""
    quantized = through_the_door(reference, directory, isq=IsqType.Q8_0)
    for own, module in zip(quantized.seam.experts.values(), of(reference), strict=bool(of(reference))):
        assert_near(own, module)


def assert_near(own: OwnExperts, module: Any) -> None:
    matrix = module.down_proj
    hidden = torch.randn(7, matrix.shape[2 if module.is_transposed else 1])
    indices = torch.rand(7, len(matrix)).argsort(-1)[:, :3]
    weights = torch.rand(7, 3)
    with torch.inference_mode():
        expected: Tensor = module(hidden, indices, weights)
    difference = own.mix(hidden, indices, weights) - expected
    assert 0 < float(difference.norm()) < 0.02 * float(expected.norm())


# Matrices with a row per input; a sigmoid, a shared expert and a layer without experts; clamps in the gate; biases, and
# gates interleaved with up projections; a gate in float32; a mixture that this package writes anew.
@pytest.mark.parametrize("model_type", ["aria_text", "hy_v3", "minimax_m3_vl_text", "gpt_oss", "beam", "llama4_text"])
def test_logits_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    reference = tiny_model(model_type)
    model = through_the_door(reference, tmp_path)
    is_swiglu = model_type not in ("minimax_m3_vl_text", "gpt_oss")
    assert {isinstance(each, NativeBlockExperts) for each in forms(model)} == {is_swiglu}
    assert close(scores_of(model), scores_of_transformers(reference))
    assert_near_in_8_bits(reference, tmp_path)


# All at once, and one after the other.
@pytest.mark.parametrize("model_type", ["hy_v3", "minimax_m3_vl_text"])
@pytest.mark.parametrize("isq", [IsqType.Q4_0, IsqType.AFQ4])
def test_tokens_do_not_depend_on_one_another(model_type: str, isq: IsqType, tmp_path: Path) -> None:
    """Many rows of an expert are multiplied as few are, to the last bit."""
    model = through_the_door(tiny_model(model_type), tmp_path, isq=isq)
    hidden, indices, weights = torch.randn(80, 64), torch.tensor([[1, 3]] * 80), torch.rand(80, 2)
    for own in model.seam.experts.values():
        together = own.mix(hidden, indices, weights)
        alone = [own.mix(*(each[row : row + 1] for each in (hidden, indices, weights))) for row in range(80)]
        assert torch.equal(together, torch.cat(alone))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_class_with_experts(model_type: str, tmp_path: Path) -> None:
    """Dense, they are as exact as any matrix; in 8 bits, they are near."""
    try:
        door = open_door(tiny_config(model_type).to_dict(), torch.float32)
    except Exception:  # configs validate themselves with errors of many classes
        pytest.skip("it does not run through transformers")
    if not door.has_experts:
        pytest.skip("it has no experts that follow the interface")
    reference = tiny_model(model_type)
    expected = scores_of_transformers(reference)
    try:
        model = through_the_door(reference, tmp_path)
    except UnsupportedArchitectureError:
        pytest.skip("it does not run through transformers")
    assert forms(model)
    assert close(scores_of(model), expected)
    assert_near_in_8_bits(reference, tmp_path)


@pytest.mark.parametrize("isq", [None, IsqType.Q8_0, IsqType.NF4])
def test_bytes_are_those_of_a_native_family(isq: IsqType | None, tmp_path: Path) -> None:
    reference = tiny.build_model("qwen3_moe")
    native = ours(reference, policy=WeightPolicy(workspace=workspace(), isq=isq))
    model = through_the_door(reference, tmp_path, isq=isq)
    own = [layer.mlp.experts for layer in native.layers if isinstance(layer.mlp, MoeMlp)]
    assert len(own) == len(forms(model)) == 2
    for ours_, theirs in zip(own, forms(model), strict=True):
        assert isinstance(ours_, NativeBlockExperts)
        assert isinstance(theirs, NativeBlockExperts)
        for name in ("gate", "up", "down"):
            packed = [getattr(each.native_weights, name) for each in (ours_, theirs)]
            assert torch.equal(packed[0].data, packed[1].data)
    assert close(scores_of(model), scores_of(native))


@pytest.mark.parametrize(
    ("expression", "matches"),
    [(r"layers\.2\.mlp\.experts", True), (r"layers\.2\..*experts\.\d\.(gate|up|down)_proj", True), ("gate_up", False)],
)
def test_topologies_select_names_of_the_checkpoint(expression: str, matches: bool, tmp_path: Path) -> None:
    rules = [(re.compile(expression), IsqType.Q8_0)]
    model = through_the_door(tiny.build_model("qwen3_moe"), tmp_path, isq_by_name=rules)
    formats = [form.native_weights.gate.format for form in forms(model)]
    assert formats == ["float32", "Q8_0" if matches else "float32"]


@pytest.mark.parametrize(
    ("expression", "linears", "experts"),
    [
        (r"^language_model\.model\.layers\.1\.self_attn\.q_proj", ["model.layers.1.self_attn.q_proj"], []),
        (r"^language_model\.model\.layers\.1\.feed_forward\.experts", [], [1]),
        (r"^model\.", [], []),
    ],
)
def test_topologies_select_names_that_the_class_does_not_have(
    expression: str, linears: list[str], experts: list[int]
) -> None:
    """Checkpoints that take images have other names than the class of their decoder alone."""
    reference = tiny_model("llama4_text")
    source = DictSource({f"language_model.{name}": values for name, values in reference.state_dict().items()})
    model = load(door_of(reference), source, isq_by_name=[(re.compile(expression), IsqType.Q8_0)])
    quantized = {name: each.linear.native_weights for name, each in model.parts.linears.items()}
    assert [name for name, each in quantized.items() if each is not None and each.few[0].format == "Q8_0"] == linears
    assert [layer for layer, each in enumerate(forms(model)) if each.native_weights.gate.format == "Q8_0"] == experts


# As in native families: integers stay as they are, and floats of 8 bits become Q8_0.
@pytest.mark.parametrize(("name", "form"), [("gptq", "grouped"), ("fp8", "Q8_0")])
def test_packed_experts_stay_packed(name: str, form: str, tmp_path: Path) -> None:
    write, settings = WRITERS[name]
    reference = tiny_model("dots1")
    reference.save_pretrained(tmp_path / "dense")
    values = pack_checkpoint(tmp_path / "dense", tmp_path / "packed", write, settings)
    checkpoint = open_checkpoint(tmp_path / "packed")
    door = open_door(checkpoint.config, torch.float32)
    model = load(door, checkpoint.source, keep_blocks=True)
    checkpoint.source.close()
    assert [experts.native_weights.gate.format for experts in forms(model)] == [form] * 3
    decoded = load(door_of(reference), DictSource(values))
    hidden, indices, weights = torch.randn(5, 64), torch.tensor([[0, 3]] * 5), torch.rand(5, 2)
    for own, other in zip(model.seam.experts.values(), decoded.seam.experts.values(), strict=True):
        expected = other.mix(hidden, indices, weights)
        assert float((own.mix(hidden, indices, weights) - expected).norm()) < 0.02 * float(expected.norm())


def test_what_the_class_keeps_in_float32_is_not_rounded(tmp_path: Path) -> None:
    """Biases of near experts differ by less than bfloat16 resolves."""
    reference = tiny_model("solar_open")
    biases = {name: each for name, each in reference.named_buffers() if name.endswith("e_score_correction_bias")}
    for bias in biases.values():
        bias.copy_(1 + torch.rand_like(bias) * 1e-3)
    reference.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    door = open_door(checkpoint.config, torch.bfloat16)
    placement = Placement.on(CPU, door.config.num_layers)
    model: Any = door.load(checkpoint.source, dtype=torch.bfloat16, placement=placement)
    checkpoint.source.close()
    own = [each for name, each in model.transformers_model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert own
    assert all(torch.equal(each, bias) for each, bias in zip(own, biases.values(), strict=True))


def door_of(reference: PreTrainedModel) -> TransformersDoor:
    return open_door(reference.config.to_dict(), torch.float32)


class _WithoutTensors(DictSource):
    """Refuses to decode matrices of experts; their rows may be read."""

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert ".experts." not in name
        return super().tensor(name, dtype, device)

    def matrix(self, name: str) -> StoredMatrix:
        return DenseMatrix(super().tensor(name, torch.float32, CPU).flatten(0, -2))


def test_experts_of_their_own_tensors_are_read_matrix_by_matrix(tmp_path: Path) -> None:
    """A layer's experts in float32 would be the largest thing in memory."""
    reference = tiny_model("dots1")
    reference.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    tensors = {name: checkpoint.source.tensor(name, torch.float32, CPU) for name in checkpoint.source.names()}
    checkpoint.source.close()
    assert any(".experts.3.up_proj" in name for name in tensors)
    model = load(door_of(reference), _WithoutTensors(tensors))
    assert close(scores_of(model), scores_of_transformers(reference))


@pytest.mark.parametrize(
    ("left_out", "changed"), [("experts.2.up_proj.weight", None), ("experts.1.down_proj.weight", (64, 16))]
)
def test_experts_that_do_not_fit_are_refused(left_out: str, changed: tuple[int, int] | None, tmp_path: Path) -> None:
    reference = tiny_model("dots1")
    reference.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    tensors = {name: checkpoint.source.tensor(name, torch.float32, CPU) for name in checkpoint.source.names()}
    checkpoint.source.close()
    (name,) = (each for each in tensors if each.endswith(f"layers.2.mlp.{left_out}"))
    del tensors[name]
    if changed is not None:
        tensors[name] = torch.zeros(changed)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts"):
        load(door_of(reference), DictSource(tensors))


def test_without_native_kernels(tmp_path: Path) -> None:
    reference = tiny_model("solar_open")
    reference.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    door = open_door(checkpoint.config, torch.float32)
    model = door.load(checkpoint.source, dtype=torch.float32, placement=Placement.on(CPU, door.config.num_layers))
    checkpoint.source.close()
    assert {type(form) for form in forms(model)} == {DenseExperts}
    assert close(scores_of(model), scores_of_transformers(reference))


def test_two_models_have_experts_of_their_own(tmp_path: Path) -> None:
    reference, other = tiny_model("solar_open"), tiny_model("solar_open", n_routed_experts=6)
    models = [through_the_door(each, tmp_path / str(number)) for number, each in enumerate((reference, other))]
    for model, each in zip(models, (reference, other), strict=True):
        assert close(scores_of(model), scores_of_transformers(each))


def test_a_gate_is_known_by_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that changes the gate a little is not computed as a SwiGLU."""
    module: Any = next(m for m in tiny_model("dots1").modules() if hasattr(m, "_apply_gate"))
    assert door_experts._has_swiglu(module, 32)
    plain = type(module)._apply_gate
    for changed in (
        lambda self, x: plain(self, x) * 1.001,
        lambda self, x: plain(self, x.clamp(max=30)),
        lambda self, x: plain(self, x.roll(32, -1)),
        lambda self, x: plain(self, x)[:, :-1],
    ):
        monkeypatch.setattr(type(module), "_apply_gate", changed)
        assert not door_experts._has_swiglu(module, 32)


def test_experts_of_another_form_are_left_to_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paged_sdk"):
        model = through_the_door(tiny_model("jetmoe"), tmp_path, isq=IsqType.Q8_0)
    assert not forms(model)
    lines = [record.message for record in caplog.records if "multiplied by torch" in record.message]
    assert len(lines) == 1
    assert "JetMoeParallelExperts" in lines[0]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    tiny_model("solar_open", vocab_size=tiny.VOCAB_SIZE, max_position_embeddings=512).save_pretrained(path)
    tiny.tokenizer().save(str(path / "tokenizer.json"))
    return path


def answers(builder: TextModelBuilder) -> list[tuple[str, int]]:
    """Return three texts generated side by side, and how many tokens of their prompts were cached."""
    sampling = SamplingParams(temperature=0, max_len=12, ignore_eos=True)
    prompts = ["Once upon a time there was a small engine that could", "Once upon a time there was a dog", "Why?"]
    with BlockingModel(builder.build()) as model:
        for _ in range(2):
            made = [model.send_completion_request(prompt, sampling=sampling) for prompt in prompts]
    details = [each.usage.prompt_tokens_details for each in made]
    return [
        (each.choices[0].text, 0 if detail is None else detail.cached_tokens)
        for each, detail in zip(made, details, strict=True)
    ]


def test_settings_of_the_engine(directory: Path) -> None:
    """Whatever holds keys and values, experts say the same, chunk by chunk and with cached prefixes."""
    builder = TextModelBuilder(directory).with_dtype("float32").with_force_cpu().with_num_threads(1)
    expected = answers(builder.with_paged_attn(PagedAttentionMeta(block_size=16)))
    assert expected[0][1] > 0
    small = builder.with_paged_attn(PagedAttentionMeta(block_size=8)).with_max_num_batched_tokens(16)
    for other in (builder.without_paged_attn(), small.with_max_num_seqs(2)):
        assert [text for text, _ in answers(other)] == [text for text, _ in expected]


def test_topology_that_selects_no_expert_is_refused(directory: Path) -> None:
    builder = TextModelBuilder(directory).with_dtype("float32").with_force_cpu().with_num_threads(1)
    for expression, fits in ((r"experts\.3\.down_proj", True), (r"experts\.9\.down_proj", False)):
        topology = Topology.empty().with_regex(expression, LayerTopology(isq=IsqType.Q8_0))
        if fits:
            BlockingModel(builder.with_topology(topology).build()).close()
            continue
        with pytest.raises(ConfigError, match="name of a tensor"):
            BlockingModel(builder.with_topology(topology).build())
