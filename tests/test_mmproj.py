"""GGUF models with an image encoder in a file of its own (mmproj) say what their checkpoints do."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from attrs import frozen
from safetensors.torch import load_file

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
)
from paged_sdk.weights.gguf_source import GgufSource
from paged_sdk.weights.mmproj import Mmproj
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
    make_vision_checkpoint(name, directory, vision_config=vision)
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
    "no model": (lambda made, path: (made("llava").mmproj, made("llava").mmproj), CheckpointError, "model itself"),
    "another family's": (
        lambda made, path: (made("llava").model, made("gemma3").mmproj),
        CheckpointError,
        r"for gemma3_text, and .* is 'llama'",
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
    assert builder.source.filenames == ("model.gguf",)
    assert builder.source.mmproj == "mmproj-F16.gguf"
    assert builder.with_mmproj("other.gguf").source.mmproj == "other.gguf"
