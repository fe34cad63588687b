"""Models that take images and have no decoder here run through transformers' classes, or are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.image_table import PICTURES, answers, answers_of_transformers
from benchmarks.tiny_image_classes import make_image_checkpoint, tiny_image_config
from transformers import PreTrainedModel
from transformers.models.aya_vision import modeling_aya_vision

from paged_sdk import (
    BlockingModel,
    CheckpointError,
    InvalidRequestError,
    IsqType,
    MemoryGpuConfig,
    PagedAttentionMeta,
    PagedCacheType,
    RequestBuilder,
    SamplingParams,
    SpeculativeConfig,
    TextMessages,
    TextModelBuilder,
    VisionMessages,
    VisionModelBuilder,
)
from paged_sdk.errors import UnsupportedArchitectureError
from paged_sdk.models import any_model
from paged_sdk.models.any_model import plan_model
from paged_sdk.models.family import has_family
from paged_sdk.vision.whole_processor import WholeProcessor

# Vectors alone; positions in time, height and width, and experts, too.
THROUGH = ("aya_vision", "glm4v", "glm4v_moe")
# Those with a decoder here, whose images transformers' whole processor puts into prompts.
OWN = ("llava_onevision", "lighton_ocr", "video_llama_3", "vipllava")
NAMES = (*THROUGH, *OWN)
FAMILIES = ("llava", "idefics3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, PreTrainedModel]]:
    made = {}
    for name in NAMES:
        directory = tmp_path_factory.mktemp(name)
        made[name] = directory, make_image_checkpoint(name, directory)
    return made


@pytest.fixture
def aya(checkpoints: Mapping[str, tuple[Path, PreTrainedModel]]) -> Path:
    return checkpoints["aya_vision"][0]


@pytest.mark.parametrize("name", [*NAMES[:5], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[5:])])
def test_class_says_what_transformers_says(name: str, checkpoints: Mapping[str, tuple[Path, PreTrainedModel]]) -> None:
    directory, reference = checkpoints[name]
    assert answers(directory) == answers_of_transformers(reference, directory)
    content = json.loads((directory / "config.json").read_text())
    assert has_family(content) == (name in OWN)


@pytest.mark.parametrize("name", ["gemma3", *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES)])
def test_families_through_their_classes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has a decoder here can be compared through its class too: Gemma's images attend in both directions."""
    monkeypatch.setattr(any_model, "has_family", lambda config: False)
    reference = make_image_checkpoint(name, tmp_path)
    assert answers(tmp_path) == answers_of_transformers(reference, tmp_path)


def exact(directory: Path) -> VisionModelBuilder:
    meta = PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(2048))
    builder = VisionModelBuilder(directory).with_dtype("float32").with_force_cpu().with_num_threads(1)
    return builder.with_paged_attn(meta).with_max_num_batched_tokens(16)


def asked(*images: Any, text: str = "What is this?") -> RequestBuilder:
    messages = VisionMessages().add_image_message("user", text, list(images))
    return RequestBuilder.from_messages(messages).with_sampling(SamplingParams(temperature=0, max_len=8))


COMPOSED: Mapping[str, Any] = {
    "contiguous": lambda builder: builder.without_paged_attn(),
    "FP8": lambda builder: builder.with_paged_attn(
        PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(1024), cache_type=PagedCacheType.F8E4M3)
    ),
    "ISQ": lambda builder: builder.with_isq(IsqType.Q8_0),
    "drafts": lambda builder: builder.with_speculation(SpeculativeConfig(gamma=4)),
    "preemption": lambda builder: builder.with_paged_attn(
        PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(128))
    ),
    "bfloat16": lambda builder: builder.with_dtype("bfloat16"),
}


SHORT = ("ISQ", "preemption")


@pytest.mark.parametrize(
    "setting", [setting if setting in SHORT else pytest.param(setting, marks=pytest.mark.long) for setting in COMPOSED]
)
def test_texts_do_not_depend_on_the_batch(
    setting: str, checkpoints: Mapping[str, tuple[Path, PreTrainedModel]]
) -> None:
    """A model answers the same alone, without a prefix cache, and beside others that have the same and other images."""
    builder = COMPOSED[setting](exact(checkpoints["glm4v"][0]))
    text = RequestBuilder.from_messages(TextMessages().add_message("user", "What is this?"))
    greedy = SamplingParams(temperature=0, max_len=8)
    requests = [asked(*PICTURES), asked(PICTURES[1]), text.with_sampling(greedy)]
    with BlockingModel(builder.with_prefix_cache_n(0).with_max_num_seqs(1).build()) as model:
        alone = [model.send_chat_request(request).choices[0].message.content for request in requests]
    assert len(set(alone)) == len(alone)
    with BlockingModel(builder.build()) as model:
        together = model.send_chat_requests([*requests, *requests])
        if setting != "bfloat16":  # whose sums depend on how many rows there are
            assert [each.choices[0].message.content for each in together] == alone + alone
        again = model.send_chat_request(requests[0])
        details = again.usage.prompt_tokens_details
        if setting not in ("contiguous", "preemption"):
            assert details is not None
            assert details.cached_tokens > again.usage.prompt_tokens // 2


def test_processor_that_prepares_several_images_otherwise(aya: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = WholeProcessor.prompt

    def other(self: WholeProcessor, text: str, images: Sequence[Any], model: Any = None) -> Any:
        return plain(self, text * len(images), [image for image in images for _ in images], model)

    monkeypatch.setattr(WholeProcessor, "prompt", other)
    with BlockingModel(exact(aya).build()) as model:
        assert model.send_chat_request(asked(PICTURES[0])).usage.completion_tokens
        with pytest.raises(InvalidRequestError, match="max_images = 1"):
            model.send_chat_request(asked(*PICTURES))


def copied(source: Path, target: Path, **config: Any) -> Path:
    shutil.copytree(source, target)
    content = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(content))
    return target


def test_missing_files_are_named(aya: Path, tmp_path: Path) -> None:
    bare = copied(aya, tmp_path / "bare")
    (bare / "processor_config.json").unlink()
    (bare / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json"):
        BlockingModel(exact(bare).build())


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mllama", r"no call that makes vectors of images \(get_image_features\)"),
        ("gpt_neox", "no class of this name that takes images"),
        ("lfm3_vl", "keeps other states .* conv"),
    ],
)
def test_what_cannot_run_is_refused(model_type: str, reason: str) -> None:
    content: dict[str, Any] = {"model_type": model_type}
    if model_type == "lfm3_vl":
        content = tiny_image_config(model_type, vocab_size=300, image_token=7).to_dict()
    with pytest.raises(UnsupportedArchitectureError, match=reason):
        plan_model(content, torch.float32, images=True)


def test_texts_have_a_builder_of_their_own(aya: Path) -> None:
    with pytest.raises(UnsupportedArchitectureError, match="VisionModelBuilder"):
        BlockingModel(TextModelBuilder(aya).with_force_cpu().build())


@pytest.mark.parametrize("what", ["vectors", "hidden"])
def test_class_that_does_more_with_images_is_refused(aya: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = modeling_aya_vision.AyaVisionModel.forward

    def more(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        if kwargs.get("pixel_values") is not None:
            output.last_hidden_state *= 1.01
        return output

    def fewer(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = features(self, *args, **kwargs)
        made.pooler_output = [each[1:] for each in made.pooler_output]
        return made

    features: Any = modeling_aya_vision.AyaVisionModel.get_image_features
    if what == "vectors":
        monkeypatch.setattr(modeling_aya_vision.AyaVisionModel, "get_image_features", fewer)
    else:
        monkeypatch.setattr(modeling_aya_vision.AyaVisionModel, "forward", more)
    with pytest.raises(UnsupportedArchitectureError, match=r"vectors for an image of|does more with an image"):
        BlockingModel(exact(aya).build())
