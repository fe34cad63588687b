"""Test classes of transformers that take images, for benchmarks.support_table.

A class passes if a tiny checkpoint of it with random weights gives, for two images at once, the greedy tokens in
float32 that transformers' ``generate`` gives for each.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedModel

from benchmarks.tiny_image_classes import (
    CannotBeMadeError,
    image_class_of,
    make_image_checkpoint,
    picture,
    tiny_image_config,
)
from benchmarks.verdicts import Outcome, Verdict
from paged_sdk import (
    BlockingModel,
    MemoryGpuConfig,
    PagedAttentionMeta,
    RequestBuilder,
    SamplingParams,
    VisionMessages,
    VisionModelBuilder,
)
from paged_sdk.errors import UnsupportedArchitectureError
from paged_sdk.models.any_model import plan_model
from paged_sdk.vision.family import vision_families
from paged_sdk.vision.whole_processor import WholeProcessor

__all__ = ["PICTURES", "answers", "answers_of_transformers", "judge_images"]

_NEW_TOKENS: Final = 12
_QUESTION: Final = "What is this?"
PICTURES: Final = (picture(40, 60), picture(70, 30, seed=1))


def judge_images(model_type: str) -> Outcome:
    """Test one class that takes images."""
    if model_type in vision_families():  # which tests/test_vision.py compares with transformers
        return Outcome(model_type, Verdict.RUNS)
    try:
        if not hasattr(image_class_of(model_type), "get_image_features"):
            plan_model({"model_type": model_type}, torch.float32, images=True)
        # The text model may be refused for a reason that has nothing to do with images.
        plan_model(tiny_image_config(model_type).to_dict(), torch.float32, images=True)
        with tempfile.TemporaryDirectory() as directory:
            reference = make_image_checkpoint(model_type, Path(directory))
            found = answers(Path(directory))
            expected = answers_of_transformers(reference, Path(directory))
    except CannotBeMadeError as error:
        return Outcome(model_type, Verdict.UNTRIED, str(error))
    except UnsupportedArchitectureError as error:
        return Outcome(model_type, Verdict.REFUSED, str(error).rpartition("transformers' classes: ")[2])
    if found != expected:
        return Outcome(model_type, Verdict.WRONG, f"{found} {expected}")
    return Outcome(model_type, Verdict.RUNS)


def answers(directory: Path) -> list[str]:
    """Return a checkpoint's answers about some images: all at once, in chunks, and about the first image again."""
    meta = PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(4096))
    builder = VisionModelBuilder(directory).with_dtype("float32").with_force_cpu().with_num_threads(1)
    builder = builder.with_paged_attn(meta).with_max_num_batched_tokens(24)
    sampling = SamplingParams(temperature=0, max_len=_NEW_TOKENS, ignore_eos=True)
    requests = [
        RequestBuilder.from_messages(VisionMessages().add_image_message("user", _QUESTION, image)).with_sampling(
            sampling
        )
        for image in PICTURES
    ]
    with BlockingModel(builder.build()) as model:
        responses = [*model.send_chat_requests(requests), model.send_chat_request(requests[0])]
    return [response.choices[0].message.content or "" for response in responses]


def answers_of_transformers(model: PreTrainedModel, directory: Path) -> list[str]:
    """Return transformers' answers to the same prompts."""
    processor = WholeProcessor(directory, model.config.model_type)
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    model.generation_config.eos_token_id = None  # otherwise it replaces the None above
    generate: Any = model.generate
    said: list[str] = []
    for image in PICTURES:
        given = processor.prompt(processor.placeholder + _QUESTION, [image], model)
        with torch.inference_mode():
            out = generate(**given, generation_config=settings)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        said.append(tokenizer.decode(out[0, given["input_ids"].shape[1] :].tolist()))
    return [*said, said[0]]
