"""Models that take images say what transformers' say."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from arrivals import wait_for_requests
from paged_sdk import (
    ChatCompletionResponse,
    CheckpointError,
    Constraint,
    ContextLengthError,
    Image,
    ImageLimits,
    InvalidRequestError,
    IsqType,
    LayerTopology,
    MemoryGpuConfig,
    Model,
    PagedAttentionMeta,
    PagedCacheType,
    RequestBuilder,
    SamplingParams,
    SpeculativeConfig,
    TextMessages,
    TextModelBuilder,
    Topology,
    UnsupportedArchitectureError,
    VisionMessages,
    VisionModelBuilder,
)
from paged_sdk.kernels.native.library import load
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.types.messages import Message
from paged_sdk.vision.family import vision_families
from tiny import make_checkpoint
from tiny_vision import VISION_FAMILIES, encoder_inputs, make_vision_checkpoint, picture, reference_answer

pytestmark = pytest.mark.anyio

LENGTH = 16
GREEDY = SamplingParams(temperature=0.0, max_len=LENGTH, ignore_eos=True)
PICTURES = (picture(40, 60), picture(70, 30, seed=1))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, Any]]:
    made = {}
    for name in VISION_FAMILIES:
        directory = tmp_path_factory.mktemp(name)
        made[name] = directory, make_vision_checkpoint(name, directory)
    return made


@pytest.fixture(scope="module")
def llava(checkpoints: Mapping[str, tuple[Path, Any]]) -> Path:
    return checkpoints["llava"][0]


def exact(directory: Path) -> VisionModelBuilder:
    meta = PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(2048))
    return VisionModelBuilder(directory).with_dtype("float32").with_paged_attn(meta)


def asked(messages: TextMessages) -> RequestBuilder:
    return RequestBuilder.from_messages(messages).with_sampling(GREEDY)


CHAT = (
    VisionMessages()
    .add_image_message("user", "What is this?", PICTURES[0])
    .add_message("assistant", "A square.")
    .add_message(
        "user",
        [{"type": "text", "text": "And"}, {"type": "image", "image": PICTURES[1]}, {"type": "text", "text": "?"}],
    )
)


def prompt_of(model: Model, messages: TextMessages) -> Sequence[int]:
    images = model._preparer.images
    assert images is not None
    ids = model._preparer.text.encode_chat(messages.messages)
    return images.insert(ids, [image for message in messages.messages for image in message.images])[0]


def text_of(response: ChatCompletionResponse) -> str:
    return response.choices[0].message.content or ""


def reference_text(model: Model, reference: Any, directory: Path, pictures: Sequence[Any], ids: Sequence[int]) -> str:
    """Let transformers answer: it refuses prompts whose tokens are not as many as its encoder's vectors."""
    inputs = encoder_inputs(reference.config.to_dict(), directory, pictures)
    tokens = reference_answer(reference, ids, inputs, LENGTH)
    return model._preparer.text.tokenizer.decode(tokens, skip_special_tokens=True)


def test_every_family_is_tested() -> None:
    assert set(VISION_FAMILIES) == set(vision_families())


@pytest.mark.thinned("name", "paged", of=1)
@pytest.mark.parametrize("name", VISION_FAMILIES)
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_texts_are_those_of_transformers(
    name: str, paged: bool, checkpoints: Mapping[str, tuple[Path, Any]], anyio_backend: str
) -> None:
    directory, reference = checkpoints[name]
    builder = exact(directory).with_max_num_batched_tokens(24)  # of which images have more
    async with (builder if paged else builder.without_paged_attn()).build() as model:
        ids = prompt_of(model, CHAT)
        want = reference_text(model, reference, directory, PICTURES, ids)
        first = await model.send_chat_request(asked(CHAT))
        assert text_of(first) == want
        assert first.usage.prompt_tokens == len(ids)
        again = await model.send_chat_request(asked(CHAT))
        assert text_of(again) == want
        details = again.usage.prompt_tokens_details
        assert details is not None
        keeps = paged or not VISION_FAMILIES[name].is_recurrent  # states are kept for paged KV only
        assert (details.cached_tokens > len(ids) // 2) == keeps


GROWING: Mapping[str, dict[str, Any]] = {
    "ministral3": {"head_dim": 16},
    "mistral4": {
        "head_dim": 48,
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 48,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
    },
}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("family", GROWING)
async def test_queries_that_grow_with_their_position(tmp_path: Path, family: str, anyio_backend: str) -> None:
    """Ministral 3's and Mistral Small 4's, beyond the context of its training, of which images take a part."""
    text = VISION_FAMILIES["mistral3"].config["text_config"] | {"model_type": family} | GROWING[family]
    text["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.5,
    }
    reference = make_vision_checkpoint("mistral3", tmp_path, text_config=text)
    async with exact(tmp_path).with_max_num_batched_tokens(24).build() as model:
        ids = prompt_of(model, CHAT)
        want = reference_text(model, reference, tmp_path, PICTURES, ids)
        assert text_of(await model.send_chat_request(asked(CHAT))) == want


COMPOSED: Mapping[str, Any] = {
    "bfloat16": lambda builder: builder.with_dtype("bfloat16"),
    "FP8": lambda builder: builder.with_paged_attn(
        PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(1024), cache_type=PagedCacheType.F8E4M3)
    ),
    "ISQ": lambda builder: builder.with_isq(IsqType.Q8_0),
    "suffix drafts": lambda builder: builder.with_speculation(SpeculativeConfig(gamma=4)),
    "batch invariance": lambda builder: builder.with_batch_invariance(),
    "preemption": lambda builder: builder.with_paged_attn(
        PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(128))
    ),
}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *(("qwen2_vl", setting) for setting in COMPOSED),
        *(("qwen3_vl", setting) for setting in ("ISQ", "batch invariance")),
        ("qwen3_5", "FP8"),
        ("qwen3_5", "preemption"),
        pytest.param("qwen3_5", "bfloat16", marks=pytest.mark.long),
        pytest.param("lfm2_vl", "preemption", marks=pytest.mark.long),
        pytest.param("lfm2_vl", "FP8", marks=pytest.mark.long),
        *(("gemma3", setting) for setting in ("preemption", "suffix drafts", "ISQ", "FP8", "batch invariance")),
    ],
)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_texts_do_not_depend_on_the_batch(
    name: str, setting: str, checkpoints: Mapping[str, tuple[Path, Any]], anyio_backend: str
) -> None:
    """A model answers the same alone, without a prefix cache, and beside others that have the same and other images."""
    directory = checkpoints[name][0]
    builder = COMPOSED[setting](exact(directory))
    others = [
        VisionMessages().add_image_message("user", "What is this?", picture(40, 60, seed=seed)) for seed in range(3)
    ]
    requests = [asked(each) for each in (CHAT, *others, TextMessages().add_message("user", "What is this?"))]
    async with builder.with_prefix_cache_n(0).with_max_num_seqs(1).build() as model:
        alone = [text_of(await model.send_chat_request(request)) for request in requests]
    assert len(set(alone)) == len(alone)
    async with builder.with_max_num_batched_tokens(12).build() as model:  # fewer than an image of Gemma's has
        if setting == "preemption":  # none waits for its images, so that all want memory at a time
            await model.send_chat_requests(requests)
            await model.reset_prefix_cache()
            wait_for_requests(model, 2 * len(requests))
        together = await model.send_chat_requests([*requests, *requests])
        if setting == "batch invariance" or setting == "preemption":  # float32 sums, or exact ones
            assert list(map(text_of, together)) == alone + alone
        again = [text_of(await model.send_chat_request(request)) for request in requests]
        if setting != "bfloat16":
            assert again == alone
        if setting == "preemption":
            assert model.stats().preemptions > 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_line_breaks_around_images_join_the_text(
    checkpoints: Mapping[str, tuple[Path, Any]], anyio_backend: str
) -> None:
    async with exact(checkpoints["gemma3"][0]).build() as model:
        tokenizer = model._preparer.text.tokenizer
        ids = list(prompt_of(model, CHAT))
        image = "\n\n<start_of_image>" + "<image>" * 16 + "<end_of_image>\n\n"
        text = (
            f"<|im_start|>user\n{image}What is this?<|im_end|>\n<|im_start|>assistant\nA square.<|im_end|>\n"
            f"<|im_start|>user\nAnd{image}?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert ids == tokenizer.encode(text, add_special_tokens=False)


async def test_constraints_choices_and_penalties(llava: Path) -> None:
    messages = VisionMessages().add_image_message("user", "What is this?", PICTURES[0])
    async with exact(llava).build() as model:
        request = RequestBuilder.from_messages(messages)
        constrained = await model.send_chat_request(
            request.with_constraint(Constraint.regex("(a|the) (fox|dog)")).with_sampling(SamplingParams(max_len=20))
        )
        assert text_of(constrained) in {"a fox", "a dog", "the fox", "the dog"}
        several = SamplingParams(temperature=1.0, seed=1, n_choices=3, max_len=8, repetition_penalty=1.1)
        assert len((await model.send_chat_request(request.with_sampling(several))).choices) == 3
        predicted = asked(messages)
        plain = text_of(await model.send_chat_request(predicted))
        assert text_of(await model.send_chat_request(predicted.with_prediction(plain or "a"))) == plain


async def test_every_form_of_an_image_is_the_same_image(llava: Path, tmp_path: Path) -> None:
    pixels = PICTURES[0]
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    (tmp_path / "square.png").write_bytes(file.getvalue())
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    forms: list[Any] = [
        pixels,
        PIL.Image.fromarray(pixels),
        file.getvalue(),
        tmp_path / "square.png",
        str(tmp_path / "square.png"),
        url,
        Image.parse(pixels),
    ]
    wire: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}],
        }
    ]
    async with exact(llava).build() as model:
        texts = {
            text_of(await model.send_chat_request(asked(VisionMessages().add_image_message("user", "What?", form))))
            for form in forms
        }
        texts.add(text_of(await model.send_chat_request(RequestBuilder.from_messages(wire).with_sampling(GREEDY))))
        assert len(texts) == 1


async def test_a_repeated_image_is_not_encoded_again(llava: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []
    async with exact(llava).build() as model:
        images = model._preparer.images
        assert images is not None
        process = images._process

        def count(image: Image) -> Any:
            encoded.append(image.digest)
            return process(image)

        monkeypatch.setattr(images, "_process", count)
        one, two = ("What is this?", "Which animal is it, and what does it do?")
        for text in (one, two, one):
            messages = VisionMessages().add_image_message("user", text, PICTURES[0])
            details = (await model.send_chat_request(asked(messages))).usage.prompt_tokens_details
    assert len(encoded) == 1
    assert details is not None
    assert details.cached_tokens >= 16


def jpeg(height: int, width: int) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(np.zeros((height, width, 3), np.uint8)).save(file, "JPEG")
    return file.getvalue()


def animation() -> bytes:
    file = io.BytesIO()
    frames = [PIL.Image.fromarray(picture(20, 20, seed=seed)) for seed in range(3)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


BAD: Mapping[str, tuple[Any, str]] = {
    "nothing": (b"", "bytes"),
    "text": (b"no image at all", "none of them"),
    "cut off": (jpeg(64, 64)[:300], "cannot be read"),
    "animation": (animation(), "frames"),
    "many pixels": (jpeg(300, 400), "max_pixels"),
    "many bytes": (np.random.default_rng(0).bytes(60_000), "max_bytes"),
    "an address": ("https://example.org/cat.png", "not fetched"),
    "another file's address": ("file:///etc/passwd", "not fetched"),
    "no file": ("/there/is/none.png", "cannot be opened"),
    "half a data URL": ("data:image/png;base64,AAA", "base64"),
    "floats": (np.zeros((4, 4, 3), np.float32), "uint8"),
    "five channels": (np.zeros((4, 4, 5), np.uint8), "uint8"),
    "no pixels": (np.zeros((0, 4, 3), np.uint8), "at least one pixel"),
    "a number": (7, "a PIL image"),
}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_bad_images_are_refused_by_name_and_hurt_nobody(llava: Path, anyio_backend: str) -> None:
    limits = ImageLimits(max_images=2, max_pixels=100_000, max_bytes=50_000)
    async with exact(llava).with_image_limits(limits).build() as model:
        for name, (value, text) in BAD.items():
            with pytest.raises(InvalidRequestError, match=text) as raised:
                await model.send_chat_request(VisionMessages().add_image_message("user", "What?", value))
            assert raised.value.field in ("image", "images"), name
        with pytest.raises(InvalidRequestError, match="max_images = 2"):
            await model.send_chat_request(VisionMessages().add_image_message("user", "What?", [PICTURES[0]] * 3))
        with pytest.raises(InvalidRequestError, match="shows it 1 of the 0 images"):
            await model.send_chat_request(
                RequestBuilder().add_message("user", "What is <image>?").with_special_tokens_in_content()
            )
        # Without that, what is written is text.
        written = await model.send_chat_request(asked(TextMessages().add_message("user", "What is <image>?")))
        assert written.usage.completion_tokens == LENGTH
        with pytest.raises(InvalidRequestError, match="path"):
            Message.parse({"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]})
        stats = model.stats()
        assert stats.running == stats.waiting == stats.blocks_used == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_truncation_is_no_advice_for_a_prompt_with_images(llava: Path, anyio_backend: str) -> None:
    async with exact(llava).with_max_model_len(16).build() as model:
        with pytest.raises(ContextLengthError, match=r"the context is 16\): shorten it$"):
            await model.send_chat_request(asked(CHAT))
        with pytest.raises(InvalidRequestError, match="a prompt with images is not cut"):
            await model.send_chat_request(asked(CHAT).with_truncation())


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_encoder_that_fails_ends_one_request(
    llava: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paged_sdk import RequestFailedError
    from paged_sdk.vision.encoder import EncodedImage, ImageEncoder

    encode = ImageEncoder.encode
    good, bad = (VisionMessages().add_image_message("user", "What is this?", each) for each in PICTURES)

    def fails(self: ImageEncoder, inputs: Any, before_layer: Any) -> EncodedImage:
        calls.append(1)
        vectors = encode(self, inputs, before_layer)
        if len(calls) == 1:
            raise RuntimeError("the encoder is broken")
        return EncodedImage(vectors.vectors[1:]) if len(calls) == 2 else vectors

    calls: list[int] = []
    monkeypatch.setattr(ImageEncoder, "encode", fails)
    async with exact(llava).build() as model:
        with pytest.raises(RequestFailedError, match="broken"):
            await model.send_chat_request(asked(bad))
        with pytest.raises(RequestFailedError, match="vectors for an image of"):
            await model.send_chat_request(asked(bad))
        answers = [text_of(await model.send_chat_request(asked(each))) for each in (good, bad)]
        assert answers[0] != answers[1]
    async with exact(llava).build() as model:  # nothing of the failed ones was found again
        assert [text_of(await model.send_chat_request(asked(each))) for each in (good, bad)] == answers


async def test_models_and_checkpoints_without_images(llava: Path, tmp_path: Path) -> None:
    messages = VisionMessages().add_image_message("user", "What is this?", PICTURES[0])
    async with TextModelBuilder(llava).with_dtype("float32").build() as model:
        with pytest.raises(InvalidRequestError, match="takes no images"):
            await model.send_chat_request(messages)
        assert (await model.send_chat_request(asked(TextMessages().add_message("user", "Hi")))).usage.total_tokens
    text = make_checkpoint("llama", tmp_path / "text")
    with pytest.raises(UnsupportedArchitectureError, match="takes no images"):
        await VisionModelBuilder(text).build()
    bare = tmp_path / "bare"
    shutil.copytree(llava, bare, ignore=shutil.ignore_patterns("preprocessor_config.json"))
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
        await VisionModelBuilder(bare).build()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_encoders_section_that_leaves_out_what_is_usual(tmp_path: Path, anyio_backend: str) -> None:
    """As transformers writes it: of Qwen2-VL's, a section that was saved again has hardly anything."""
    make_vision_checkpoint("qwen2_vl", tmp_path)
    messages = asked(VisionMessages().add_image_message("user", "What is this?", PICTURES[0]))
    async with exact(tmp_path).build() as model:
        want = text_of(await model.send_chat_request(messages))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vision_config"].pop("spatial_merge_size") == 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    async with exact(tmp_path).build() as model:
        assert text_of(await model.send_chat_request(messages)) == want


@pytest.mark.parametrize(
    ("section", "name", "value", "told"),
    [
        # transformers would build layers for minutes, and only then miss their tensors.
        ("vision_config", "num_hidden_layers", 2**31, r"num_hidden_layers = 2147483648: expected at most the number"),
        (None, "image_token_index", 2**40, "image_token_index = 1099511627776: expected a token id"),
        (None, "image_token_index", 10**29, "image_token_index = 1[0]{29}: expected a token id"),
    ],
)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_numbers_that_no_model_has(
    section: str | None, name: str, value: int, told: str, llava: Path, tmp_path: Path, anyio_backend: str
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(llava, checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (config if section is None else config[section])[name] = value
    config.pop("image_token_id", None)
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=told):
        await exact(checkpoint).build()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_images_and_re_isq(llava: Path, anyio_backend: str) -> None:
    messages = asked(VisionMessages().add_image_message("user", "What is this?", PICTURES[0]))
    async with exact(llava).with_isq(IsqType.Q8_0).build() as model:
        want = text_of(await model.send_chat_request(messages))
    async with exact(llava).with_isq(IsqType.Q4_0).build() as model:
        await model.send_chat_request(messages)
        await model.re_isq_model(IsqType.Q8_0)
        assert text_of(await model.send_chat_request(messages)) == want


@pytest.mark.skipif(load() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_encoder_is_quantized_where_it_is_named(
    llava: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, str] = {}
    linear = WeightPolicy.linear

    def note(self: WeightPolicy, matrices: Any, *args: Any, **options: Any) -> Any:
        made = linear(self, matrices, *args, **options)
        seen.update({each.name: type(made).__name__ for each in matrices if "vision_tower" in each.name})
        return made

    monkeypatch.setattr(WeightPolicy, "linear", note)
    q8 = LayerTopology(isq=IsqType.Q8_0)
    topology = Topology.empty().with_range(range(2), q8).with_regex(r"vision_tower\..*\.1\.mlp\.fc1", q8)
    async with exact(llava).with_isq(IsqType.Q4_0).with_topology(topology).build():
        pass
    kinds = {name: kind for name, kind in seen.items() if kind != "NativeDenseLinear"}
    assert len(seen) == 1 + 3 * 6  # patches; attention and MLP of each layer
    assert list(kinds) == ["vision_tower.encoder.layers.1.mlp.fc1.weight"]
