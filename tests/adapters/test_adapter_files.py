"""Files of adapters: what is read, what is refused, and with which words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from adapter_files import write_adapter, write_gguf_adapter
from paged_sdk.adapters.bank import AdapterBank
from paged_sdk.adapters.gguf import read_gguf
from paged_sdk.adapters.peft import read_peft
from paged_sdk.adapters.peft_config import PeftConfig, is_plain_pattern
from paged_sdk.errors import AdapterError
from paged_sdk.kernels.lora import Lora
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import native_projections
from paged_sdk.models.loading import load_model
from paged_sdk.quant.adapted import AdaptableLinear
from paged_sdk.types.adapter import AdapterUse
from paged_sdk.types.step import StepRow
from paged_sdk.weights.safetensors.source import SafetensorsSource
from tiny import build_model

PREFIX = "base_model.model.model.layers"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    build_model("llama").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(base: Path) -> DecoderModel:
    config = json.loads((base / "config.json").read_text())
    return load_model(config, SafetensorsSource(base), dtype=torch.float32, placement=torch.device("cpu"))


@pytest.fixture
def bank(model: DecoderModel) -> AdapterBank:
    return make_bank(model)


def make_bank(model: DecoderModel, **options: Any) -> AdapterBank:
    device = torch.device("cpu")
    return AdapterBank(
        model.adaptable,
        device=device,
        linear_of=model.adaptable_linear,
        head=model.head_name,
        embedding=model.embedding_name,
        **{"dtype": torch.float32, **options},
    )


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", build_model("llama"), targets=("q_proj", "v_proj", "up_proj"))


def change_config(adapter: Path, **values: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(adapter: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of the first layer's q_proj, or leave them out."""
    path = adapter / "adapter_model.safetensors"
    changed = load_file(path) | {f"{PREFIX}.{name.replace('__', '.')}": value for name, value in tensors.items()}
    save_file({name: value for name, value in changed.items() if value is not None}, path)


def test_every_linear_layer_can_be_adapted(model: DecoderModel) -> None:
    assert sorted(module for shape in model.adaptable for module in shape.modules) == sorted(
        [
            f"model.layers.{layer}.{name}"
            for layer in range(2)
            for name in (
                *(f"self_attn.{each}_proj" for each in "qkvo"),
                *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
            )
        ]
        + ["lm_head", "model.embed_tokens"]
    )
    names = native_projections(model)
    shapes = [shape for shape in model.adaptable if shape.name not in ("lm_head", "model.embed_tokens")]
    assert {name for of_layer in names for name in of_layer.values()} == {shape.name for shape in shapes}
    assert all(model.adaptable_linear(shape.name).in_features == shape.in_features for shape in shapes)
    assert model.adaptable_linear("lm_head") is model.head
    assert not any(isinstance(linear, AdaptableLinear) for linear in model.layers[0].linears)


def test_forms_there_and_back(model: DecoderModel, adapter: Path) -> None:
    """After weights were quantized anew, what computes the steps may be another."""
    bank = make_bank(model, layers=native_projections(model))
    write_adapter(adapter, build_model("llama"), targets=("q_proj", "v_proj", "up_proj"), use_dora=True)
    change_config(adapter, rank_pattern={"q_proj": 3}, r=4)
    sides = {"A": torch.randn(3, 64), "B": torch.randn(64, 3)}
    for layer in range(2):
        change_tensors(adapter, **{f"{layer}__self_attn__q_proj__lora_{s}__weight": v for s, v in sides.items()})
    number = bank.add(bank.read(str(adapter)).lora)
    row = StepRow(0, 0, [1, 2], [0], 2, adapter=number)

    def held() -> Lora:
        rows = bank.rows([row])
        assert rows is not None
        return rows.loras[0]

    before = held()
    bank.hold((range(2),))
    assert len(held().native) == 1
    assert not held().by_layer
    bank.hold(())
    assert held().by_layer.keys() == before.by_layer.keys()
    for name, weights in before.by_layer.items():
        again = held().by_layer[name]
        assert torch.equal(again.down, weights.down)
        for part, other in zip(again.parts, weights.parts, strict=True):
            assert (part.rows, part.ranks) == (other.rows, other.ranks)
            assert torch.equal(part.up, other.up)
            assert part.gains is not None
            assert other.gains is not None
            assert torch.equal(part.gains, other.gains)


def test_what_is_read(adapter: Path, bank: AdapterBank) -> None:
    read = read_peft(adapter)
    assert read.base == "tiny"
    assert len(read.modules) == 6
    fitted = bank.read(str(adapter))
    assert fitted.digest == read.digest
    assert sorted(fitted.lora.by_layer) == [
        f"model.layers.{layer}.{name}" for layer in range(2) for name in ("mlp.gate_proj", "self_attn.q_proj")
    ]
    weights = fitted.lora.by_layer["model.layers.0.self_attn.q_proj"]
    query, value = weights.parts
    assert (query.rows, value.rows) == (slice(0, 64), slice(96, 128))
    stored = load_file(adapter / "adapter_model.safetensors")
    assert torch.equal(weights.down[value.ranks], stored[f"{PREFIX}.0.self_attn.v_proj.lora_A.weight"])
    assert torch.equal(value.up, 2 * stored[f"{PREFIX}.0.self_attn.v_proj.lora_B.weight"].T)


def test_the_digest_is_of_all_that_counts(adapter: Path) -> None:
    digests = [read_peft(adapter).digest]
    change_config(adapter, base_model_name_or_path="another", lora_dropout=0.1, inference_mode=True)
    assert read_peft(adapter).digest == digests[0]
    change_config(adapter, lora_alpha=9)
    digests.append(read_peft(adapter).digest)
    change_config(adapter, lora_alpha=18, r=4, use_rslora=True)
    digests.append(read_peft(adapter).digest)
    name = "0__self_attn__q_proj__lora_A__weight"
    change_tensors(adapter, **{name: torch.ones(4, 64)})
    digests.append(read_peft(adapter).digest)
    change_tensors(adapter, **{name: torch.ones(4, 64, dtype=torch.bfloat16)})
    digests.append(read_peft(adapter).digest)
    write_adapter(adapter, build_model("llama"), targets=("q_proj",), use_dora=True)
    digests.append(read_peft(adapter).digest)
    change_tensors(adapter, **{"0__self_attn__q_proj__lora_magnitude_vector": torch.ones(64)})
    digests.append(read_peft(adapter).digest)
    assert len(set(digests)) == len(digests)
    update = next(iter(read_peft(adapter).modules.values()))
    assert evolve(update, scale=3.0).scale == 3.0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is not allowed: expected LORA"),
        ({"peft_type": "XLORA"}, "'XLORA' is not allowed: expected LORA: X-LoRA, whose adapters a second pass weighs"),
        ({"r": 0}, "r = 0 is not allowed: expected an int >= 1"),
        ({"r": True}, "r = True"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\.q_proj = 0"),
        ({"lora_alpha": "big"}, "lora_alpha = 'big'"),
        ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern\.q_proj = None"),
        ({"alpha_pattern": {"(a+)+$": 1}}, "names of modules"),
        ({"rank_pattern": ["q_proj"]}, "an object"),
        ({"modules_to_save": "lm_head"}, "modules_to_save = 'lm_head' is not allowed: expected names of modules"),
        ({"trainable_token_indices": [1]}, "trained embeddings"),
        ({"alora_invocation_tokens": ["a"]}, "token ids"),
        ({"layer_replication": [[0, 1]]}, "repeated"),
        ({"bias": "all"}, "trained biases"),
        ({"init_lora_weights": "pissa_niter_4"}, "have PEFT convert it"),
        ({"target_modules": [3]}, "names of modules"),
        ({"use_some_news": True}, "use_some_news = True is not allowed: expected no value"),
        ({"news_config": {"on": True}}, "news_config"),
        ({"layers_to_transform": "0"}, "numbers of layers"),
        ({"use_rslora": 1}, "true or false"),
        ({"use_dora": 1}, "true or false"),
        ({"base_model_name_or_path": 3}, "a text"),
    ],
)
def test_settings_that_are_refused(adapter: Path, bank: AdapterBank, values: dict[str, Any], words: str) -> None:
    change_config(adapter, **values)
    with pytest.raises(AdapterError, match=words) as caught:
        bank.read(str(adapter))
    assert str(caught.value.path) == str(adapter / "adapter_config.json")


@pytest.mark.parametrize(
    "values",
    [
        {"loftq_config": {}, "megatron_config": None, "init_lora_weights": True, "qalora_group_size": 16},
        {"target_modules": "all-linear", "layers_to_transform": None},
        {"target_modules": r".*(?:q|v|up)_proj", "exclude_modules": "x"},
        {"target_modules": ["self_attn.q_proj", "v_proj", "up_proj", "down_proj"], "exclude_modules": ["down_proj"]},
        {"rank_pattern": {r"^model\.layers\.0\..*q_proj": 4}, "alpha_pattern": {"layers.\\d+.mlp.up_proj": 8}},
    ],
)
def test_settings_that_are_taken(adapter: Path, bank: AdapterBank, values: dict[str, Any]) -> None:
    change_config(adapter, **values)
    bank.read(str(adapter))


def test_what_is_repeated_of_the_base_is_passed_over(adapter: Path, bank: AdapterBank) -> None:
    digest = read_peft(adapter).digest
    change_tensors(adapter, **{"0__self_attn__q_proj__base_layer__weight": torch.ones(64, 64)})
    assert bank.read(str(adapter)).digest == digest


def test_some_layers_only(tmp_path: Path, bank: AdapterBank, adapter: Path) -> None:
    change_config(adapter, layers_to_transform=[1])
    change_tensors(adapter, **{f"0__self_attn__q_proj__lora_{side}__weight": None for side in "AB"})
    bank.read(str(adapter))
    change_config(adapter, layers_to_transform=0)
    with pytest.raises(AdapterError, match="lacks tensor"):
        bank.read(str(adapter))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"0__self_attn__q_proj__lora_A__weight": None}, r"lacks tensor '.*q_proj\.lora_A\.weight'"),
        (
            dict.fromkeys(("0__self_attn__q_proj__lora_A__weight", "0__self_attn__q_proj__lora_B__weight")),
            r"lacks tensor '.*layers\.0\.self_attn\.q_proj\.lora_A\.weight', of a module that its settings name",
        ),
        ({"0__self_attn__q_proj__lora_A__weight": torch.ones(5, 64)}, r"has rank 5, adapter_config\.json says 4"),
        ({"0__self_attn__q_proj__lora_A__weight": torch.ones(4, 48)}, r"shape \[64, 48\], the model's has \[64, 64\]"),
        ({"0__self_attn__q_proj__lora_B__weight": torch.ones(80, 4)}, r"\[80, 64\].*made for 'tiny'"),
        ({"0__self_attn__q_proj__lora_A__weight": torch.ones(4, 64).int()}, "a matrix of numbers"),
        ({"0__self_attn__q_proj__lora_A__weight": torch.ones(4)}, "a matrix of numbers"),
        ({"0__embed_tokens__lora_embedding_A": torch.ones(4, 4)}, "lacks tensor '.*lora_embedding_B'"),
        (
            {f"0__self_attn__k_proj__lora_embedding_{side}": torch.ones(4, 4) for side in "AB"},
            "a module that the model does not have",
        ),
        ({"0__self_attn__q_proj__lora_embedding_A": torch.ones(4, 64)}, "lacks tensor '.*lora_embedding_B'"),
        ({"0__self_attn__q_proj__bias": torch.ones(4)}, "no update of a linear layer"),
        ({"0__self_attn__q_proj__base_layer__weight": torch.ones(80, 64)}, "repeats a matrix of another base"),
        ({"0__self_attn__k_proj__base_layer__weight": torch.ones(32, 64)}, "repeats a matrix of another base"),
        ({"0__self_attn__q_proj__lora_magnitude_vector": torch.ones(64)}, "of an adapter with use_dora, which"),
    ],
)
def test_tensors_that_are_refused(
    adapter: Path, bank: AdapterBank, tensors: dict[str, torch.Tensor | None], words: str
) -> None:
    change_tensors(adapter, **tensors)
    with pytest.raises(AdapterError, match=words) as caught:
        bank.read(str(adapter))
    assert caught.value.tensor in str(caught.value)
    assert f"base_model.model.{caught.value.tensor.removeprefix('base_model.model.')}".startswith(PREFIX)


def test_embeddings(adapter: Path, bank: AdapterBank) -> None:
    path = adapter / "adapter_model.safetensors"
    name = "base_model.model.model.embed_tokens"
    sides = {f"{name}.lora_embedding_A": torch.ones(4, 512), f"{name}.lora_embedding_B": torch.ones(64, 4)}
    copy = {f"{name}.base_layer.weight": torch.ones(512, 64)}
    save_file(load_file(path) | sides | copy, path)
    lora = bank.read(str(adapter)).lora
    assert lora.embedding is not None
    assert lora.embedding.down.shape == (4, 512)
    save_file(load_file(path) | {f"{name}.base_layer.weight": torch.ones(520, 64)}, path)
    with pytest.raises(AdapterError, match="repeats a matrix of another base"):
        bank.read(str(adapter))
    save_file(load_file(path) | sides | copy, path)
    change_config(adapter, ensure_weight_tying=True)
    with pytest.raises(AdapterError, match="ensure_weight_tying"):
        bank.read(str(adapter))
    write_adapter(adapter, build_model("llama"), targets=("q_proj",), use_dora=True)
    save_file(load_file(path) | sides | {f"{name}.lora_magnitude_vector": torch.ones(64)}, path)
    with pytest.raises(AdapterError, match="cannot be decomposed"):
        bank.read(str(adapter))


@pytest.mark.parametrize(
    ("dtype", "of_layers", "of_ends"),
    [
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float64),
    ],
)
def test_updates_are_of_the_models_dtype_and_of_float32_at_least_for_embeddings_and_logits(
    model: DecoderModel, tmp_path: Path, dtype: torch.dtype, of_layers: torch.dtype, of_ends: torch.dtype
) -> None:
    adapter = write_adapter(tmp_path / "ends", build_model("llama"), targets=("q_proj", "lm_head"))
    path, name = adapter / "adapter_model.safetensors", "base_model.model.model.embed_tokens"
    sides = {f"{name}.lora_embedding_A": torch.ones(4, 512), f"{name}.lora_embedding_B": torch.ones(64, 4)}
    save_file(load_file(path) | sides, path)
    lora = make_bank(model, dtype=dtype).read(str(adapter)).lora
    assert lora.embedding is not None
    assert lora.head is not None
    assert {each.down.dtype for each in lora.by_layer.values()} == {of_layers}
    assert {each.dtype for end in (lora.embedding, lora.head) for each in (end.down, end.parts[0].up)} == {of_ends}


@pytest.mark.parametrize(
    ("magnitude", "words"),
    [(None, "lacks tensor"), (torch.ones(32), "expected 64 numbers"), (torch.ones(64).int(), "expected 64 numbers")],
)
def test_magnitudes_that_are_refused(
    adapter: Path, bank: AdapterBank, magnitude: torch.Tensor | None, words: str
) -> None:
    write_adapter(adapter, build_model("llama"), targets=("q_proj",), use_dora=True)
    bank.read(str(adapter))
    change_tensors(adapter, **{"1__self_attn__q_proj__lora_magnitude_vector": magnitude})
    with pytest.raises(AdapterError, match=words) as caught:
        bank.read(str(adapter))
    assert caught.value.tensor == f"{PREFIX}.1.self_attn.q_proj.lora_magnitude_vector"


@pytest.mark.parametrize(
    "name", ["model.layers.2.self_attn.q_proj", "model.layers.0.mlp.experts.0.up_proj", "model.layers.0.fc1"]
)
def test_modules_that_the_model_has_not(adapter: Path, bank: AdapterBank, name: str) -> None:
    path = adapter / "adapter_model.safetensors"
    sides = {f"base_model.model.{name}.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    save_file(load_file(path) | sides, path)
    with pytest.raises(
        AdapterError, match=r"a module that the model does not have.*down_proj, embed_tokens, gate_proj"
    ) as caught:
        bank.read(str(adapter))
    assert caught.value.value == name


def test_names_around_the_decoder_are_passed_over(adapter: Path, bank: AdapterBank) -> None:
    path = adapter / "adapter_model.safetensors"
    expected = bank.read(str(adapter)).lora.by_layer
    changed = {
        name.replace("model.model.layers", "model.model.language_model.layers"): value
        for name, value in load_file(path).items()
    }
    save_file(changed, path)
    assert bank.read(str(adapter)).lora.by_layer.keys() == expected.keys()


def test_files_that_are_refused(adapter: Path, bank: AdapterBank) -> None:
    weights = adapter / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    with pytest.raises(AdapterError, match="cannot be read"):
        bank.read(str(adapter))
    save_file({}, weights)
    with pytest.raises(AdapterError, match="holds no tensors"):
        bank.read(str(adapter))
    weights.unlink()
    with pytest.raises(AdapterError, match="holds no adapter_model"):
        bank.read(str(adapter))
    (adapter / "adapter_model.bin").write_bytes(content)
    with pytest.raises(AdapterError, match="is a pickle"):
        bank.read(str(adapter))
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError):
        bank.read(str(adapter))
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match="holds no adapter_config"):
        bank.read(str(adapter))


@pytest.mark.parametrize("pattern", ["q_proj", "layers.1.mlp", r"^model\.layers\.\d+\..*proj$", "(q|v)_proj"])
def test_plain_patterns(pattern: str) -> None:
    assert is_plain_pattern(pattern)


@pytest.mark.parametrize("pattern", ["(a+)+", "(a|a)*", ".*.*.*.*.*x", "a{1,9}", "[ab]", "(?=x)", r"\1", "x?"])
def test_patterns_that_may_take_long(pattern: str) -> None:
    assert not is_plain_pattern(pattern)


def test_a_row_needs_an_adapter_that_is_there(bank: AdapterBank, adapter: Path) -> None:
    numbers = [bank.add(bank.read(str(adapter)).lora) for _ in range(2)]
    assert numbers == [0, 1]
    bank.remove(0)
    assert bank.add(bank.read(str(adapter)).lora) == 2


def test_scales() -> None:
    values: dict[str, Any] = {"peft_type": "LORA", "r": 16, "lora_alpha": 8}
    values |= {"alpha_pattern": {"q_proj": 32}, "rank_pattern": {"x.q_proj": 4}}
    config = PeftConfig.read(Path("x"), values)
    assert [config.scale_of(name) for name in ("a.v_proj", "a.q_proj", "x.q_proj", "aq_proj")] == [0.5, 2.0, 8.0, 0.5]
    rooted = PeftConfig.read(Path("x"), values | {"use_rslora": True})
    assert [rooted.scale_of(name) for name in ("a.v_proj", "x.q_proj")] == [2.0, 16.0]


@pytest.fixture
def file(adapter: Path, tmp_path: Path) -> Path:
    return write_gguf_adapter(tmp_path / "adapter.gguf", adapter, build_model("llama"), gguf.MODEL_ARCH.LLAMA)


def test_a_gguf_file_says_the_same(adapter: Path, file: Path, model: DecoderModel) -> None:
    """llama's query and key rows lie in another order there."""
    bank = make_bank(model, head_dim=16)
    expected, found = bank.read(str(adapter)), bank.read(str(file))
    assert found.lora.by_layer.keys() == expected.lora.by_layer.keys()
    for name, weights in expected.lora.by_layer.items():
        assert torch.equal(found.lora.by_layer[name].down, weights.down)
        for part, other in zip(found.lora.by_layer[name].parts, weights.parts, strict=True):
            assert torch.equal(part.up, other.up)
    assert read_gguf(file).invocation == ()


def test_heads_have_to_be_known(file: Path, bank: AdapterBank) -> None:
    with pytest.raises(AdapterError, match="is of a llama, which the model is not"):
        bank.read(str(file))


def gguf_file(path: Path, *, tensors: dict[str, tuple[int, ...]], **values: Any) -> Path:
    """Write a file with tensors of ones."""
    metadata: dict[str, Any] = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0} | values
    architecture = metadata.pop("architecture", "llama")
    writer = gguf.GGUFWriter(path, architecture)
    adds: dict[type, Any] = {str: writer.add_string, float: writer.add_float32, list: writer.add_array}
    for key, value in metadata.items():
        adds[type(value)](key, value)
    for name, shape in tensors.items():
        writer.add_tensor(name, torch.ones(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GOOD: dict[str, tuple[int, ...]] = {"blk.0.ffn_up.weight.lora_a": (4, 64), "blk.0.ffn_up.weight.lora_b": (128, 4)}


@pytest.mark.parametrize(
    ("architecture", "matrix", "model_type"),
    [
        ("bloom", "attn_qkv", "bloom"),
        ("qwen35", "attn_gate", "qwen3_5_text"),
        ("qwen35moe", "ssm_out", "qwen3_5_moe_text"),
        ("qwen3next", "attn_qkv", "qwen3_next"),
    ],
)
def test_values_in_another_order_are_refused(architecture: str, matrix: str, model_type: str, tmp_path: Path) -> None:
    tensors: dict[str, tuple[int, ...]] = {
        f"blk.0.{matrix}.weight.lora_a": (4, 64),
        f"blk.0.{matrix}.weight.lora_b": (192, 4),
    }
    path = gguf_file(tmp_path / "adapter.gguf", tensors=tensors, architecture=architecture)
    with pytest.raises(AdapterError, match=f"values {model_type} has in another order"):
        read_gguf(path)


def test_matrices_of_recurrent_layers_have_their_names(tmp_path: Path) -> None:
    tensors: dict[str, tuple[int, ...]] = {
        "blk.2.ssm_out.weight.lora_a": (4, 64),
        "blk.2.ssm_out.weight.lora_b": (8, 4),
    }
    path = gguf_file(tmp_path / "adapter.gguf", tensors=tensors, architecture="qwen3next")
    assert list(read_gguf(path).modules) == ["model.layers.2.linear_attn.out_proj"]


def test_scales_of_gguf_files(tmp_path: Path) -> None:
    for alpha, scale in ((8.0, 2.0), (0.0, 1.0)):
        path = gguf_file(tmp_path / f"{alpha}.gguf", tensors=GOOD, **{"adapter.lora.alpha": alpha})
        (update,) = read_gguf(path).modules.values()
        assert update.scale == scale
        assert not update.in_pairs


@pytest.mark.parametrize(
    ("values", "tensors", "words"),
    [
        ({"general.type": "model"}, GOOD, "general.type = 'model' is not allowed: expected 'adapter'"),
        ({"adapter.type": "control_vector"}, GOOD, "adapter.type = 'control_vector'"),
        ({"architecture": "mamba"}, GOOD, "general.architecture = 'mamba'"),
        ({"adapter.lora.alpha": "much"}, GOOD, "a number"),
        ({"adapter.alora.invocation_tokens": ["a"]}, GOOD, "token ids"),
        ({}, {"blk.0.ffn_up.weight.lora_a": (4, 64)}, "lacks tensor 'blk.0.ffn_up.weight.lora_b'"),
        ({}, {"blk.0.ffn_up.weight": (4, 64)}, "no update of a matrix"),
        ({}, {"blk.0.news.weight.lora_a": (4, 64), "blk.0.news.weight.lora_b": (64, 4)}, "a matrix that llama has not"),
        ({}, {"blk.0.ffn_up.weight.lora_a": (4, 64), "blk.0.ffn_up.weight.lora_b": (128, 3)}, "have ranks 4 and 3"),
        ({}, {"output.weight.lora_a": (4, 64), "output.weight.lora_b": (80, 4)}, "updates a matrix of shape [80, 64]"),
        ({}, {"blk.0.ffn_up.weight.lora_a": (4, 48), "blk.0.ffn_up.weight.lora_b": (128, 4)}, "the model's has"),
    ],
)
def test_gguf_files_that_are_refused(
    bank: AdapterBank, tmp_path: Path, values: dict[str, Any], tensors: dict[str, tuple[int, ...]], words: str
) -> None:
    path = gguf_file(tmp_path / "bad.gguf", tensors=tensors, **values)
    with pytest.raises(AdapterError, match=re.escape(words)):
        bank.read(str(path))


def test_a_gguf_file_that_is_cut_off(bank: AdapterBank, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(AdapterError):
        bank.read(str(file))


def test_where_an_activated_adapter_begins() -> None:
    use = AdapterUse(0, "a", b"", (5, 6))
    assert use.first_token([5, 6, 1, 5, 6, 2]) == 3
    assert use.first_token([5, 6]) == 0
    assert use.first_token([5, 1, 6]) is None
    assert use.first_token([6]) is None
    assert AdapterUse(0, "a", b"").first_token([1]) == 0


def test_tokens_before_an_activated_adapter_go_through_the_base(bank: AdapterBank, adapter: Path) -> None:
    number = bank.add(bank.read(str(adapter)).lora)
    rows = [
        StepRow(0, 10, [1, 2, 3, 4], [0], 20, adapter=number, adapter_start=12),
        StepRow(1, 0, [1, 2], [0], 20, adapter=number, adapter_start=12),
        StepRow(2, 30, [1], [0], 20, adapter=number, adapter_start=12),
        StepRow(3, 30, [1], [0], 20),
    ]
    adapted = bank.rows(rows)
    assert adapted is not None
    assert adapted.numbers.tolist() == [-1, -1, 0, 0, -1, -1, 0, -1]
    assert [each.tolist() for each in adapted.tokens] == [[2, 3, 6]]
