"""Models with recurrent layers take images: probabilities are those of transformers, wherever chunks, kept states,
batches, preemption, choices, adapters and cancellation cut a prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from adapter_files import merge, write_adapter
from arrivals import wait_for_requests
from paged_sdk import (
    ChatCompletionResponse,
    ConfigError,
    InvalidRequestError,
    IsqType,
    MemoryGpuConfig,
    Model,
    PagedAttentionMeta,
    RequestBuilder,
    SamplingParams,
    TextModelBuilder,
    VisionModelBuilder,
)
from paged_sdk.build import vision
from paged_sdk.vision.encoder import _shrink_text, load_encoder
from test_recurrent_models import REFUSED
from tiny_vision import VISION_FAMILIES, encoder_inputs, make_vision_checkpoint, picture, reference_answer

pytestmark = pytest.mark.anyio

FAMILIES: Final = tuple(name for name, family in VISION_FAMILIES.items() if family.is_recurrent)
BLOCK: Final = 8
LENGTH: Final = 16
GREEDY: Final = SamplingParams(temperature=0.0, max_len=LENGTH, ignore_eos=True)
SMALL, TALL, LARGE = picture(40, 60), picture(70, 30, seed=1), picture(84, 84, seed=2)
Picture = npt.NDArray[np.uint8]
CHATS: Final[Mapping[str, Sequence[str | Picture]]] = {
    "no image": ("What is this?",),
    "one image": ("Before it", LARGE, "what was there?"),
    "two images": (SMALL, "or", TALL, "?"),
    "one after another": (SMALL, LARGE),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, Any]]:
    made = {}
    for name in FAMILIES:
        directory = tmp_path_factory.mktemp(name)
        made[name] = directory, make_vision_checkpoint(name, directory)
    return made


@pytest.fixture
def dense(checkpoints: Mapping[str, tuple[Path, Any]]) -> Path:
    return checkpoints["qwen3_5"][0]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def builder_of(directory: Path, *, tokens: int = 2048, budget: int = 16) -> VisionModelBuilder:
    """Return the builder of a model whose prompts are computed in chunks, of which images have several."""
    meta = PagedAttentionMeta(block_size=BLOCK, gpu_memory=MemoryGpuConfig.ContextSize(tokens))
    builder = VisionModelBuilder(directory).with_dtype("float32").with_force_cpu().with_num_threads(1)
    return builder.with_paged_attn(meta).with_max_num_batched_tokens(budget)


def content(*parts: str | Picture) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]


def asked(*parts: str | Picture, sampling: SamplingParams = GREEDY) -> RequestBuilder:
    return RequestBuilder().add_message("user", content(*parts)).with_sampling(sampling)


def pictures_of(request: RequestBuilder) -> list[Any]:
    return [image for message in request.messages for image in message.images]


def prompt_of(model: Model, request: RequestBuilder) -> list[int]:
    images = model._preparer.images
    assert images is not None
    return list(images.insert(model._preparer.text.encode_chat(request.messages), pictures_of(request))[0])


def text_of(response: ChatCompletionResponse) -> str:
    return response.choices[0].message.content or ""


def cached(response: ChatCompletionResponse) -> int:
    details = response.usage.prompt_tokens_details
    assert details is not None
    return details.cached_tokens


class Judge:
    """Answers as transformers does.

    :param reference: transformers' model
    """

    def __init__(self, model: Model, reference: Any, directory: Path) -> None:
        self._model, self._reference, self._directory = model, reference, directory

    def text(self, request: RequestBuilder, pictures: Sequence[Picture]) -> str:
        inputs = self._inputs(pictures)
        tokens = reference_answer(self._reference, prompt_of(self._model, request), inputs, LENGTH)
        return self._model._preparer.text.tokenizer.decode(tokens, skip_special_tokens=True)

    def logprobs(self, request: RequestBuilder, pictures: Sequence[Picture]) -> torch.Tensor:
        """Return the log probability of each token of a prompt but the first."""
        ids = torch.tensor([prompt_of(self._model, request)])
        inputs = self._inputs(pictures)
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids == self._reference.config.image_token_id).int()
        with torch.inference_mode():
            logits = self._reference(input_ids=ids, **inputs).logits[0, :-1]
        return torch.gather(logits.log_softmax(-1), 1, ids[0, 1:, None])[:, 0]

    def _inputs(self, pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
        self._reference.model.rope_deltas = None  # of the prompt before
        return encoder_inputs(self._reference.config.to_dict(), self._directory, pictures) if pictures else {}


@pytest.mark.parametrize(
    ("family", "chat"),
    [
        *((family, chat) for family in ("qwen3_5", "lfm2_vl") for chat in CHATS),
        *(pytest.param("qwen3_5_moe", chat, marks=() if chat == "two images" else pytest.mark.long) for chat in CHATS),
    ],
)
async def test_probabilities_are_those_of_transformers(
    family: str, chat: str, checkpoints: Mapping[str, tuple[Path, Any]]
) -> None:
    directory, reference = checkpoints[family]
    pictures = [part for part in CHATS[chat] if not isinstance(part, str)]
    sampling = SamplingParams(temperature=0.0, max_len=LENGTH, ignore_eos=True, prompt_logprobs=0)
    async with builder_of(directory).build() as model:
        judge, request = Judge(model, reference, directory), asked(*CHATS[chat], sampling=sampling)
        response = await model.send_chat_request(request)
        assert text_of(response) == judge.text(request, pictures)
        assert response.prompt_logprobs is not None
        found = torch.tensor([each.logprob for each in response.prompt_logprobs.content])
        torch.testing.assert_close(found, judge.logprobs(request, pictures), rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2_vl"])
async def test_a_conversation_computes_its_new_tokens_alone(
    family: str, checkpoints: Mapping[str, tuple[Path, Any]]
) -> None:
    """States are kept where its prompts and answers end, behind images."""
    directory, reference = checkpoints[family]
    async with builder_of(directory).build() as model:
        judge, request, pictures, length = Judge(model, reference, directory), asked("Look:", SMALL, "?"), [SMALL], 0
        (the,) = await model.tokenize(" the", add_special_tokens=False)
        for each in (LARGE, TALL, None):
            # So that the answer's tokens are those of its text.
            response = await model.send_chat_request(
                request.with_sampling(SamplingParams(temperature=0.0, max_len=LENGTH, logits_bias={the: 1000.0}))
            )
            assert text_of(response) == " the" * LENGTH
            assert cached(response) == max(length - 1, 0) // BLOCK * BLOCK
            length = len(prompt_of(model, request)) + LENGTH
            request = request.add_message("assistant", text_of(response))
            request = request.add_message("user", content("And this?", *(() if each is None else (each,))))
            pictures += [] if each is None else [each]
        response = await model.send_chat_request(request)
        assert cached(response) == (length - 1) // BLOCK * BLOCK
        assert text_of(response) == judge.text(request, pictures)
        await model.reset_prefix_cache()
        response = await model.send_chat_request(request)
        assert cached(response) == 0
        assert text_of(response) == judge.text(request, pictures)


async def test_prefixes_that_end_within_images(checkpoints: Mapping[str, tuple[Path, Any]]) -> None:
    """A state that is kept where a chunk ended in the middle of an image serves this image alone."""
    directory, reference = checkpoints["qwen3_5"]
    other = picture(84, 84, seed=3)  # of as many tokens
    async with builder_of(directory, budget=2 * BLOCK).build() as model:
        judge, found = Judge(model, reference, directory), []
        for shown in ([LARGE], [LARGE, SMALL], [other], [LARGE, TALL], [other, SMALL]):
            request = asked("Look:", *shown, "Which is it?")
            response = await model.send_chat_request(request)
            assert text_of(response) == judge.text(request, shown)
            found.append(cached(response))
        ids = prompt_of(model, request)
        assert found == [0, 32, 0, 40, 40]
        assert ids.index(reference.config.image_token_id) == 10  # and the last one's place is 45


async def test_choices_are_the_same_under_pressure(dense: Path) -> None:
    sampling = SamplingParams(temperature=0.9, seed=3, n_choices=3, max_len=LENGTH, ignore_eos=True)
    requests = [asked("Look:", LARGE, sampling=sampling), asked(TALL, "?", sampling=sampling)]
    texts = []
    for tokens in (2048, 120):
        async with builder_of(dense, tokens=tokens).build() as model:
            await model.send_chat_requests(requests)  # so that no request waits for its images
            await model.reset_prefix_cache()
            wait_for_requests(model, len(requests))
            both = await model.send_chat_requests(requests)
            texts.append([choice.message.content for response in both for choice in response.choices])
            assert (model.stats().preemptions > 0) == (tokens == 120)
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 3


async def test_cancelled_prompts_give_their_slots_back(checkpoints: Mapping[str, tuple[Path, Any]]) -> None:
    directory, reference = checkpoints["qwen3_5"]
    endless = SamplingParams(temperature=0.0, max_len=400, ignore_eos=True, n_choices=2)
    async with builder_of(directory).with_max_num_seqs(3).build() as model:
        for seed in range(4):
            shown = picture(84, 84, seed=10 + seed)
            task = asyncio.ensure_future(model.send_chat_request(asked(shown, sampling=endless)))
            async with model.stream_chat_request(asked(shown, "?")) as stream:
                await anext(stream)
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        request = asked(SMALL, "or", TALL)
        assert text_of(await model.send_chat_request(request)) == Judge(model, reference, directory).text(
            request, [SMALL, TALL]
        )
        stats = model.stats()
        assert stats.running == stats.waiting == stats.awaiting_images == stats.blocks_used == 0


async def test_quantized_weights_mean_nearly_the_same(checkpoints: Mapping[str, tuple[Path, Any]]) -> None:
    directory, reference = checkpoints["qwen3_5"]
    sampling = SamplingParams(temperature=0.0, max_len=1, prompt_logprobs=0)
    request = asked(SMALL, "or", LARGE, "?", sampling=sampling)
    async with builder_of(directory).with_isq(IsqType.Q8_0).build() as model:
        judge = Judge(model, reference, directory)
        response = await model.send_chat_request(request)
        assert response.prompt_logprobs is not None
        found = torch.tensor([each.logprob for each in response.prompt_logprobs.content])
        same, other = (
            float((found - judge.logprobs(request, shown)).abs().mean())
            for shown in ([SMALL, LARGE], [SMALL, picture(84, 84, seed=3)])
        )
        assert same < 0.4 < other  # 0.1 and 1.5


async def test_adapters_are_merged_weights(tmp_path: Path) -> None:
    reference = make_vision_checkpoint("qwen3_5", tmp_path / "base")
    write_adapter(tmp_path / "adapter", reference, targets=("in_proj_qkv", "out_proj", "q_proj", "o_proj", "down_proj"))
    request = asked("Look:", LARGE, "or", SMALL)
    async with builder_of(tmp_path / "base").with_adapter(tmp_path / "adapter").build() as model:
        judge = Judge(model, reference, tmp_path / "base")
        requests = [request, request.with_adapter("adapter")]
        expected = [judge.text(request, [LARGE, SMALL])]
        merge(reference, tmp_path / "adapter")
        expected.append(judge.text(request, [LARGE, SMALL]))
        assert expected[0] != expected[1]
        assert [text_of(each) for each in await model.send_chat_requests(requests)] == expected


@pytest.mark.parametrize(("change", "setting"), REFUSED)
async def test_what_is_refused(dense: Path, change: Any, setting: str) -> None:
    with pytest.raises(ConfigError, match="recurrent layers") as refused:
        await change(builder_of(dense)).build()
    assert refused.value.setting == setting


async def test_prefixes_with_images_are_not_pinned(dense: Path) -> None:
    async with builder_of(dense).build() as model:
        with pytest.raises(InvalidRequestError, match=r"pinned: .* a model without recurrent layers"):
            await model.pin(asked("Look:", LARGE))
        stats = model.stats()
        assert stats.blocks_used == stats.blocks_pinned == stats.awaiting_images == 0


async def test_older_names_of_tensors(checkpoints: Mapping[str, tuple[Path, Any]], tmp_path: Path) -> None:
    make_vision_checkpoint("lfm2_vl", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    older = {name.replace(".vision_tower.", ".vision_tower.vision_model."): each for name, each in tensors.items()}
    assert older.keys() != tensors.keys()
    save_file(older, tmp_path / "model.safetensors", {"format": "pt"})
    request = asked("Look:", LARGE)
    texts = []
    for directory in (checkpoints["lfm2_vl"][0], tmp_path):
        async with builder_of(directory).build() as model:
            texts.append(text_of(await model.send_chat_request(request)))
    assert texts[0] == texts[1]


async def test_layers_that_predict_further_tokens_are_left_alone(
    checkpoints: Mapping[str, tuple[Path, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The released checkpoints have such layers, which may be a tenth of their weights."""
    make_vision_checkpoint("qwen3_5", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"mtp.fc.weight": torch.zeros(64, 128)}, tmp_path / "model.safetensors", {"format": "pt"})
    seen: list[str] = []

    def note(path: Path, config: Any, tensors: dict[str, Any], **others: Any) -> Any:
        seen.extend(tensors)
        return load_encoder(path, config, tensors, **others)

    monkeypatch.setattr(vision, "load_encoder", note)
    request = asked("Look:", LARGE)
    texts = []
    for directory in (checkpoints["qwen3_5"][0], tmp_path):
        async with builder_of(directory).build() as model:
            texts.append(text_of(await model.send_chat_request(request)))
    assert texts[0] == texts[1]
    assert seen
    assert all(name.startswith("model.visual.") for name in seen)
    async with TextModelBuilder(tmp_path).with_dtype("float32").build() as model:
        with pytest.raises(InvalidRequestError, match="takes no images"):
            await model.send_chat_request(request)


def test_the_decoder_that_is_built_beside_an_encoder_is_small() -> None:
    """It is thrown away; a layer of the released model's experts alone has 805 million weights."""
    maker: Any = transformers.AutoModelForImageTextToText
    config = transformers.AutoConfig.for_model("qwen3_5_moe")
    _shrink_text(config.get_text_config())
    with torch.device("meta"):
        model = maker.from_config(config)
    assert sum(parameter.numel() for parameter in model.model.language_model.parameters()) < 50_000_000  # 37 million
