"""GGUF models with an image encoder in a file of its own (mmproj) say what their checkpoints do."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from attrs import frozen
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import paged_sdk
from mmproj_files import MMPROJ_FAMILIES, write_mmproj, write_vision_gguf
from paged_sdk import (
    CheckpointError,
    ConfigError,
    GgufModelBuilder,
    ImageLimits,
    InvalidRequestError,
    IsqType,
    LayerTopology,
    MemoryGpuConfig,
    Model,
    ModelLoadError,
    PagedAttentionMeta,
    PagedCacheType,
    RequestBuilder,
    SamplingParams,
    TextMessages,
    Topology,
    UnsupportedArchitectureError,
    VisionMessages,
    VisionModelBuilder,
    plan_memory,
    write_gguf,
)
from paged_sdk.cli.app import app
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.vision.encoder import load_encoder
from paged_sdk.vision.processor import make_image_processor
from paged_sdk.weights.gguf.source import GgufSource
from paged_sdk.weights.mmproj.source import Mmproj
from paged_sdk.weights.safetensors.source import SafetensorsSource
from tiny_vision import VISION_FAMILIES, make_vision_checkpoint, picture, tokenizer

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0.0, max_len=16, ignore_eos=True)
PICTURES = picture(126, 140), picture(70, 30, seed=1)
CHAT = (
    VisionMessages()
    .add_image_message("user", "What is this?", PICTURES[0])
    .add_message("assistant", "A square.")
    .add_image_message("user", "And this?", PICTURES[1])
)


ALONE = VisionMessages().add_image_message("user", "What is this?", PICTURES[1])


@frozen
class Made:
    """Names a checkpoint, and the two files that were made of it."""

    checkpoint: Path
    model: Path
    mmproj: Path


def make(name: str, directory: Path) -> None:
    """Save a tiny checkpoint, whose numbers are such as a file can say."""
    vision = dict(VISION_FAMILIES[name].config["vision_config"])
    if name == "qwen2_5_vl":
        vision["window_size"] = 112
    text = dict(VISION_FAMILIES[name].config["text_config"])
    if name == "qwen3_vl_moe":  # all layers have experts
        text["mlp_only_layers"] = []
    make_vision_checkpoint(name, directory, text_config=text, vision_config=vision)
    if name == "qwen2_5_vl":  # an image has several windows
        path = directory / "preprocessor_config.json"
        settings = json.loads(path.read_text())
        settings["size"]["longest_edge"] = 160 * 160
        path.write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    kept: dict[str, Made] = {}

    def made_of(name: str) -> Made:
        if name not in kept:
            directory = tmp_path_factory.mktemp(name)
            make(name, directory / "checkpoint")
            model, mmproj = write_vision_gguf(name, directory / "checkpoint", directory / "gguf")
            kept[name] = Made(directory / "checkpoint", model, mmproj)
        return kept[name]

    return made_of


def exact(builder: Any) -> Any:
    meta = PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(1024))
    return builder.with_dtype("float32").with_paged_attn(meta).with_max_num_batched_tokens(24)


async def answer(model: Model, messages: TextMessages = CHAT) -> tuple[str, int]:
    """Return a text, and how many tokens of the prompt were cached."""
    response = await model.send_chat_request(RequestBuilder.from_messages(messages).with_sampling(GREEDY))
    details = response.usage.prompt_tokens_details
    return response.choices[0].message.content or "", 0 if details is None else details.cached_tokens


@pytest.mark.parametrize("name", MMPROJ_FAMILIES)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_texts_are_those_of_the_checkpoint(name: str, made: Callable[[str], Made], anyio_backend: str) -> None:
    files = made(name)
    async with exact(VisionModelBuilder(files.checkpoint)).build() as model:
        want, _ = await answer(model)
    async with exact(GgufModelBuilder(files.model).with_mmproj(files.mmproj)).build() as model:
        assert await answer(model) == (want, 0)
        again, cached = await answer(model)
        assert again == want
        assert cached > 40


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_ministral_3(tmp_path: Path, anyio_backend: str) -> None:
    """Its decoder's queries grow with their position, beside the encoder of Mistral Small 3."""
    text = VISION_FAMILIES["mistral3"].config["text_config"] | {"model_type": "ministral3", "head_dim": 16}
    text["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    }
    make_vision_checkpoint("mistral3", tmp_path / "checkpoint", text_config=text)
    model, mmproj = write_vision_gguf("mistral3", tmp_path / "checkpoint", tmp_path / "gguf")
    texts = []
    for builder in (VisionModelBuilder(tmp_path / "checkpoint"), GgufModelBuilder(model).with_mmproj(mmproj)):
        async with exact(builder).build() as loaded:
            texts.append(await answer(loaded))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["siglip_vision_model", "pixtral"])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_other_encoders_of_llava(kind: str, tmp_path: Path, anyio_backend: str) -> None:
    vision = {**VISION_FAMILIES["llava"].config["vision_config"], "model_type": kind}
    del vision["projection_dim"]
    layers: dict[str, Any] = {"vision_feature_layer": -1} if kind == "pixtral" else {}
    vision |= {"head_dim": 8, "image_size": 56} if kind == "pixtral" else {"vision_use_head": False}
    make_vision_checkpoint(
        "llava", tmp_path / "model", vision_config=vision, vision_feature_select_strategy="full", **layers
    )
    name = "llava" if kind != "pixtral" else "pixtral"
    if name == "pixtral":
        shutil.copy(preprocessor_of("mistral3", tmp_path), tmp_path / "model")
    mmproj = write_mmproj(name, tmp_path / "model", tmp_path / "mmproj.gguf")
    model_file = write_gguf(tmp_path / "model", tmp_path / "model.gguf", type="F32")
    async with exact(VisionModelBuilder(tmp_path / "model")).build() as model:
        want = await answer(model)
    async with exact(GgufModelBuilder(model_file).with_mmproj(mmproj)).build() as model:
        assert await answer(model) == want


def preprocessor_of(name: str, directory: Path) -> Path:
    family: Any = VISION_FAMILIES[name]
    getattr(transformers, family.processor)(**family.settings).save_pretrained(directory / name)
    return directory / name / "preprocessor_config.json"


def tensors_of(files: Made, mmproj: Path | None = None, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    source = GgufSource(files.model)
    source.close()
    encoder = Mmproj(mmproj or files.mmproj, source.config, files.model)
    try:
        return encoder.tensors(dtype)
    finally:
        encoder.close()


@pytest.mark.parametrize("name", MMPROJ_FAMILIES)
def test_tensors_are_the_checkpoints(name: str, made: Callable[[str], Made]) -> None:
    files = made(name)
    stored = load_file(files.checkpoint / "model.safetensors")
    found = tensors_of(files)
    if name.startswith("llava"):  # of which the file has a layer less; the norm after that is not used
        found = {name: tensor for name, tensor in found.items() if "post_layernorm" not in name}
    assert len(found) > 20
    for own, tensor in found.items():
        torch.testing.assert_close(tensor, stored[own], rtol=0, atol=2e-7 if "soft_emb" in own else 0)


@pytest.mark.parametrize("name", MMPROJ_FAMILIES)
def test_written_files_are_the_converters(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    files, written = made(name), tmp_path / "mmproj.gguf"
    assert paged_sdk.write_mmproj(files.checkpoint, written, type="F32") == written
    ours, theirs = encoder_of(files, written), encoder_of(files, files.mmproj)
    for each in (ours, theirs):  # which one says where the other leaves it out
        each.config.pop("vision_feature_layer", None)
    assert ours.config == theirs.config
    assert ours.processor == theirs.processor
    tensors, same = tensors_of(files, written), tensors_of(files)
    assert tensors.keys() == same.keys()
    assert all(bool((tensors[own] == same[own]).all()) for own in same)
    if not name.startswith("llava"):  # whose older converter exchanges names, which is undone
        shapes = [{each.name: tuple(each.shape) for each in read_tensors(path)} for path in (written, files.mmproj)]
        assert shapes[0] == shapes[1]


def test_the_row_after_patches_where_tied_embeddings_have_the_output_projections_name(tmp_path: Path) -> None:
    """As safetensors' save_model keeps them: a Ministral 3B that was trained further, say."""
    checkpoint = tmp_path / "checkpoint"
    make_vision_checkpoint("mistral3", checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    (head,) = (name for name in tensors if name.endswith("lm_head.weight"))
    tensors[head] = tensors.pop(next(name for name in tensors if name.endswith("embed_tokens.weight")))
    save_file(tensors, checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text()) | {"tie_word_embeddings": True}
    (checkpoint / "config.json").write_text(json.dumps(config))
    written = paged_sdk.write_mmproj(checkpoint, tmp_path / "mmproj.gguf", type="F32")
    row = next(each for each in read_tensors(written) if each.name == "v.token_embd.img_break")
    token = tokenizer().token_to_id("[IMG_BREAK]")
    assert np.array_equal(row.data, tensors[head][token].float().numpy())


def test_each_tensor_is_read_once(made: Callable[[str], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[str] = Counter()
    read = SafetensorsSource.tensor

    def counted(self: SafetensorsSource, name: str, *settings: Any) -> torch.Tensor:
        reads[name] += 1
        return read(self, name, *settings)

    monkeypatch.setattr(SafetensorsSource, "tensor", counted)
    paged_sdk.write_mmproj(made("qwen2_vl").checkpoint, tmp_path / "mmproj.gguf", type="F32")
    assert len(reads) > 20
    assert set(reads.values()) == {1}


@pytest.mark.parametrize("type", ["F16", "BF16", "Q8_0"])
def test_types_of_written_tensors(type: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    files, written = made("gemma3"), tmp_path / "mmproj.gguf"
    paged_sdk.write_mmproj(files.checkpoint, written, type=type)
    types = {tensor.name: tensor.tensor_type.name for tensor in read_tensors(written)}
    assert types["v.blk.0.attn_q.weight"] == types["v.blk.2.ffn_up.weight"] == type
    assert types["v.patch_embd.weight"] == types["mm.input_projection.weight"] == "F16"
    assert types["v.position_embd.weight"] == types["v.blk.0.ln1.weight"] == types["v.blk.0.attn_q.bias"] == "F32"
    stored = load_file(files.checkpoint / "model.safetensors")
    for own, tensor in tensors_of(files, written).items():
        torch.testing.assert_close(tensor, stored[own], rtol=0, atol=8e-3 * float(stored[own].abs().max()))


def test_the_command_line_writes_both(made: Callable[[str], Made], tmp_path: Path) -> None:
    model, mmproj = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    arguments = ["quantize", str(made("qwen2_vl").checkpoint), str(model), "--type", "Q8_0", "--mmproj", str(mmproj)]
    result = CliRunner().invoke(app, [*arguments, "--mmproj-type", "Q8_0"])
    assert result.exit_code == 0, result.output
    assert read_tensors(model)
    assert {tensor.tensor_type.name for tensor in read_tensors(mmproj)} == {"F32", "F16", "Q8_0"}


def test_what_cannot_be_written(made: Callable[[str], Made], tmp_path: Path) -> None:
    source, target = made("llava").checkpoint, tmp_path / "mmproj.gguf"
    with pytest.raises(ConfigError, match="F32, F16, BF16, Q8_0"):
        paged_sdk.write_mmproj(source, target, type="Q4_K_M")
    with pytest.raises(ConfigError, match="target"):
        paged_sdk.write_mmproj(source, made("llava").mmproj)
    with pytest.raises(CheckpointError, match="no directory"):
        paged_sdk.write_mmproj(made("llava").model, target)
    changes: Mapping[str, tuple[str, Any]] = {
        "vision_feature_select_strategy": ("config.json", {"vision_feature_select_strategy": "full"}),
        "projector_hidden_act": ("config.json", {"projector_hidden_act": "relu"}),
        "do_center_crop": ("preprocessor_config.json", {"do_center_crop": False}),
    }
    for what, (file, values) in changes.items():
        shutil.copytree(source, tmp_path / what)
        content = json.loads((tmp_path / what / file).read_text()) | values
        (tmp_path / what / file).write_text(json.dumps(content))
        with pytest.raises(UnsupportedArchitectureError, match=what):
            paged_sdk.write_mmproj(tmp_path / what, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(changes)


def test_frames_that_gguf_does_not_have(tmp_path: Path) -> None:
    vision = {**VISION_FAMILIES["qwen2_vl"].config["vision_config"], "temporal_patch_size": 1}
    make_vision_checkpoint("qwen2_vl", tmp_path / "model", vision_config=vision)
    path = tmp_path / "model" / "model.safetensors"
    with pytest.raises(CheckpointError, match=f"^{path}: tensor '.*': patches of 1 frames .* expected 2$") as caught:
        paged_sdk.write_mmproj(tmp_path / "model", tmp_path / "mmproj.gguf")
    assert caught.value.path == path


def encoder_of(files: Made, mmproj: Path) -> Mmproj:
    source = GgufSource(files.model)
    source.close()
    encoder = Mmproj(mmproj, source.config, files.model)
    encoder.close()
    return encoder


def read_tensors(path: Path) -> Sequence[Any]:
    return gguf.GGUFReader(path).tensors


@pytest.mark.parametrize(("type", "error"), [("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 8e-3)])
def test_types_of_tensors(type: str, error: float, made: Callable[[str], Made], tmp_path: Path) -> None:
    files = made("gemma3")
    stored = load_file(files.checkpoint / "model.safetensors")
    path = write_mmproj("gemma3", files.checkpoint, tmp_path / "mmproj.gguf", type=type)
    kinds = {tensor.tensor_type.name for tensor in read_tensors(path)}
    assert kinds == {"F32", type}
    for dtype in (torch.float32, torch.bfloat16):
        for own, tensor in tensors_of(files, path, dtype).items():
            assert tensor.dtype is dtype
            largest = float(stored[own].abs().max())
            bound = (error + (dtype is torch.bfloat16) * 8e-3) * largest
            torch.testing.assert_close(tensor.float(), stored[own], rtol=0, atol=bound)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_how_the_file_is_found(
    made: Callable[[str], Made], tmp_path: Path, anyio_backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = made("gemma3")
    shutil.copy(files.model, tmp_path / "model.gguf")
    shutil.copy(files.mmproj, tmp_path / "mmproj-F32.gguf")
    builders = [
        GgufModelBuilder(tmp_path),  # the only one there
        GgufModelBuilder(tmp_path, ["model.gguf", "mmproj-F32.gguf"]),
        GgufModelBuilder(tmp_path, "mmproj-F32.gguf"),
        GgufModelBuilder(tmp_path).with_mmproj("mmproj-F32.gguf"),
        GgufModelBuilder(tmp_path / "model.gguf").with_mmproj("mmproj-F32.gguf"),
    ]
    texts = set()
    for builder in builders:
        async with exact(builder).build() as model:
            texts.add(await answer(model))
    assert len(texts) == 1
    alone, both = (plan_memory(exact(each)) for each in (GgufModelBuilder(tmp_path / "model.gguf"), builders[0]))
    assert both.weight_bytes - alone.weight_bytes == sum(4 * tensor.n_elements for tensor in read_tensors(files.mmproj))
    with pytest.raises(ModelLoadError, match="nowhere"):
        await exact(GgufModelBuilder(tmp_path).with_mmproj("nowhere.gguf")).build()
    # A file that is named alone has none beside it, and of two it is not known which is meant.
    shutil.copy(files.mmproj, tmp_path / "mmproj-F16.gguf")
    for builder in (GgufModelBuilder(tmp_path / "model.gguf"), GgufModelBuilder(tmp_path)):
        async with exact(builder).build() as model:
            with pytest.raises(InvalidRequestError, match="takes no images"):
                await answer(model)
    with pytest.raises(CheckpointError, match="with_mmproj"):
        await exact(GgufModelBuilder(tmp_path).with_image_limits(ImageLimits())).build()
    async with exact(GgufModelBuilder(tmp_path, "mmproj-F16.gguf")).build() as model:
        assert await answer(model) in texts


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_lies_beside_a_model_and_does_not_fit_is_left_out(
    made: Callable[[str], Made], tmp_path: Path, anyio_backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(made("gemma3").model, tmp_path / "model.gguf")
    shutil.copy(made("llava").mmproj, tmp_path / "mmproj.gguf")
    write_mmproj("gemma3", made("gemma3").checkpoint, tmp_path / "mmproj.gguf", **{"clip.projector_type": "brand_new"})
    with caplog.at_level(logging.WARNING):
        async with exact(GgufModelBuilder(tmp_path)).build() as model:
            assert (await answer(model, TextMessages().add_message("user", "Hello")))[0]
    assert "takes no images" in caplog.text
    assert "'brand_new'" in caplog.text
    with pytest.raises(UnsupportedArchitectureError, match="brand_new") as caught:  # images are wanted
        await exact(GgufModelBuilder(tmp_path).with_image_limits(ImageLimits())).build()
    assert caught.value.architecture == "brand_new"
    assert "gemma3" in caught.value.supported


def other_size(made: Callable[[str], Made], path: Path) -> tuple[Path, Path]:
    text = {**VISION_FAMILIES["llava"].config["text_config"], "hidden_size": 32, "head_dim": 8}
    make_vision_checkpoint("llava", path / "checkpoint", text_config=text)
    write_mmproj("llava", path / "checkpoint", path / "mmproj.gguf")
    return made("llava").model, path / "mmproj.gguf"


COMPOSED: Mapping[str, Callable[[Any], Any]] = {
    "FP8": lambda builder: builder.with_paged_attn(
        PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(1024), cache_type=PagedCacheType.F8E4M3)
    ),
    "quantized": lambda builder: builder.with_isq(IsqType.Q8_0).with_topology(
        Topology.empty().with_regex(r"^visual\.", LayerTopology(isq=IsqType.Q8_0))
    ),
    "contiguous KV": lambda builder: builder.without_paged_attn(),
    "preemption": lambda builder: builder.with_paged_attn(
        PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(256))
    ),
}


@pytest.mark.parametrize("setting", COMPOSED)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_goes_together(setting: str, made: Callable[[str], Made], anyio_backend: str) -> None:
    files, texts = made("qwen2_vl"), []
    for builder in (VisionModelBuilder(files.checkpoint), GgufModelBuilder(files.model).with_mmproj(files.mmproj)):
        async with COMPOSED[setting](exact(builder)).build() as model:
            asked = [RequestBuilder.from_messages(each).with_sampling(GREEDY) for each in (CHAT, CHAT, ALONE, ALONE)]
            responses = await model.send_chat_requests(asked)
            texts.append([response.choices[0].message.content for response in responses])
    assert texts[0] == texts[1]


OF_TEXTS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\\n' }}"
)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_templates_that_take_texts_alone(made: Callable[[str], Made], tmp_path: Path, anyio_backend: str) -> None:
    files = made("gemma3")
    builder = exact(GgufModelBuilder(files.model).with_mmproj(files.mmproj))
    async with builder.build() as model:
        want = await answer(model)
    async with builder.with_chat_template(OF_TEXTS).build() as model:
        assert await answer(model) == want
        # What is written is text.
        written = VisionMessages().add_image_message("user", "Is it <start_of_image> or <image>?", PICTURES[0])
        assert (await answer(model, written))[0]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_vocabulary_without_a_token_for_images(
    made: Callable[[str], Made], tmp_path: Path, anyio_backend: str
) -> None:
    files = made("llava")
    vocabulary = tokenizer().to_str()
    (tmp_path / "unknown.json").write_text(vocabulary.replace('"<image>"', '"<unk>"'))
    (tmp_path / "none.json").write_text(vocabulary.replace('"<image>"', '"<picture>"'))
    builder = exact(GgufModelBuilder(files.model).with_mmproj(files.mmproj)).with_chat_template(OF_TEXTS)
    async with builder.build() as model:
        want = await answer(model)
    async with builder.with_tokenizer_json(tmp_path / "unknown.json").build() as model:
        assert await answer(model) == want
    with pytest.raises(CheckpointError, match="no token <image> or <unk>"):
        await builder.with_tokenizer_json(tmp_path / "none.json").build()


def other_layers(made: Callable[[str], Made], path: Path) -> tuple[Path, Path]:
    vision = {**VISION_FAMILIES["qwen3_vl"].config["vision_config"], "deepstack_visual_indexes": [1]}
    make_vision_checkpoint("qwen3_vl", path / "checkpoint", vision_config=vision)
    return made("qwen3_vl").model, write_mmproj("qwen3_vl", path / "checkpoint", path / "mmproj.gguf")


def sounds(made: Callable[[str], Made], path: Path) -> tuple[Path, Path]:
    writer = gguf.GGUFWriter(path / "mmproj.gguf", "clip")
    writer.add_type("mmproj")
    writer.add_bool("clip.has_audio_encoder", True)
    writer.add_bool("clip.has_vision_encoder", False)
    writer.add_string("clip.projector_type", "ultravox")
    writer.add_tensor("a.conv1d.0.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made("llava").model, path / "mmproj.gguf"


def changed(**values: Any) -> Callable[[Callable[[str], Made], Path], tuple[Path, Path]]:
    def make(made: Callable[[str], Made], path: Path) -> tuple[Path, Path]:
        changes = {f"clip.vision.{name}": value for name, value in values.items()}
        files = made("gemma3")
        return files.model, write_mmproj("gemma3", files.checkpoint, path / "mmproj.gguf", **changes)

    return make


WRONG: Mapping[str, tuple[Callable[[Callable[[str], Made], Path], tuple[Path, Path]], type[ModelLoadError], str]] = {
    "a model": (lambda made, path: (made("llava").model, made("llava").model), CheckpointError, "a 'llama' model"),
    "no model": (
        lambda made, path: (made("llava").mmproj, made("llava").mmproj),
        CheckpointError,
        "the GGUF file of the model",
    ),
    "another family's": (
        lambda made, path: (made("llava").model, made("gemma3").mmproj),
        CheckpointError,
        r"for gemma3_text, and .* is 'llama'",
    ),
    "positions in two dimensions": (
        lambda made, path: (made("qwen2_vl").model, made("llava").mmproj),
        CheckpointError,
        r"for decoders without M-RoPE, and .* is 'qwen2_vl_text'",
    ),
    "another size": (other_size, CheckpointError, "have 32 numbers, and those of .* 64"),
    "other layers": (other_layers, CheckpointError, "1 layers more, and .* 2 such"),
    "sounds": (sounds, UnsupportedArchitectureError, "'ultravox'"),
    "no such layer": (changed(block_count=4), CheckpointError, r"no tensor 'v\.blk\.3\."),
    "other numbers of patches": (changed(image_size=56), CheckpointError, "patches"),
    "too wide": (changed(embedding_length=64), CheckpointError, "embedding_length"),
    "no heads": (changed(**{"attention.head_count": 0}), CheckpointError, "head_count"),
    "other patches": (changed(patch_size=14, image_size=56), CheckpointError, "patch_size"),
    "two colors": (changed(image_mean=[0.5, 0.5]), CheckpointError, "image_mean"),
    "a name": (changed(patch_size="seven"), CheckpointError, "patch_size"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_files_that_do_not_go_together(
    kind: str, made: Callable[[str], Made], tmp_path: Path, anyio_backend: str
) -> None:
    make, error, text = WRONG[kind]
    model, mmproj = make(made, tmp_path)
    with pytest.raises(error, match=text) as caught:
        await exact(GgufModelBuilder(model).with_mmproj(mmproj)).build()
    assert str(caught.value.path) == str(mmproj)


def test_the_encoder_of_qwen35_is_qwen3_vls(made: Callable[[str], Made], tmp_path: Path) -> None:
    """But for the vectors for later layers, which its decoder does not take."""
    reference: Any = make_vision_checkpoint("qwen3_5", tmp_path / "checkpoint")
    file = write_mmproj("qwen3_5", tmp_path / "checkpoint", tmp_path / "mmproj.gguf")
    text = {"model_type": "qwen3_5_text", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 32, "rms_norm_eps": 1e-6, "rope_scaling": {"mrope_section": [4, 2, 2]}}
    encoder = Mmproj(file, text, tmp_path / "model.gguf")
    settings: Any = {"policy": WeightPolicy(), "dtype": torch.float32, "device": torch.device("cpu")}
    loaded = load_encoder(file, encoder.config, encoder.tensors(torch.float32), **settings)
    encoder.close()
    prepared = make_image_processor(*encoder.processor)(images=[picture(40, 60)], return_tensors="np")
    inputs = {name: prepared[name] for name in ("pixel_values", "image_grid_thw")}
    found = loaded.encode(inputs, lambda: None)
    given = {name: torch.from_numpy(array) for name, array in inputs.items()}
    with torch.inference_mode():
        (expected,) = reference.model.get_image_features(**given).pooler_output
    torch.testing.assert_close(found.vectors, expected, rtol=0, atol=1e-4)
    assert not found.later
    with pytest.raises(CheckpointError, match="vectors for 2 layers more"):
        Mmproj(made("qwen3_vl").mmproj, text, tmp_path / "model.gguf")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_decoders_alone(made: Callable[[str], Made], tmp_path: Path, anyio_backend: str) -> None:
    """Decoders whose tokens have positions in height and width are read without an encoder, too."""
    messages = TextMessages().add_message("user", "What is this?")
    for name in ("qwen2_vl", "qwen3_vl"):
        files = made(name)
        async with exact(VisionModelBuilder(files.checkpoint)).build() as model:
            want, _ = await answer(model, messages)
        async with exact(GgufModelBuilder(files.model)).build() as model:
            assert (await answer(model, messages))[0] == want
    sections = gguf.GGUFReader(files.model).get_field("qwen3vl.rope.dimension_sections")
    assert sections is not None
    assert sections.contents() == [4, 2, 2, 0]


async def test_settings() -> None:
    with pytest.raises(ConfigError, match="with_mmproj"):
        GgufModelBuilder("model.gguf").with_mmproj("")
    builder = GgufModelBuilder("some/directory", ["model.gguf", "mmproj-F16.gguf"])
    assert builder.source.filename == "model.gguf"
    assert builder.source.mmproj == "mmproj-F16.gguf"
    assert builder.with_mmproj("other.gguf").source.mmproj == "other.gguf"
    parts = ["m-00002-of-00002.gguf", "m-00001-of-00002.gguf"]
    assert GgufModelBuilder("some/directory", [*parts, "mmproj.gguf"]).source.filename == parts[0]
    for names in (["a.gguf", "b.gguf"], [parts[0], "b.gguf"], ["a.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"]):
        with pytest.raises(ConfigError, match=r"filenames = .* expected one model .* and one image encoder"):
            GgufModelBuilder("some/directory", names)
