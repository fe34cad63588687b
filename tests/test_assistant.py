"""Assistants draft what transformers' would over the same keys, and change no text."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_files import write_adapter
from arrivals import wait_for_requests
from assistant_checkpoints import CLUSTERS, TARGETS, AssistantReference, make_assistant, make_target
from layer_draft_cases import (
    GAMMA,
    GREEDY,
    KINDS,
    NUM_TOKENS,
    SETTINGS,
    builder_of,
    expect_drafts,
    expect_the_same_answers,
    expect_the_same_texts,
    pool,
)
from llamacpp import LlamaCpp
from native_weights import needs_library
from paged_sdk import (
    CheckpointError,
    ConfigError,
    GgufModelBuilder,
    IsqType,
    RequestBuilder,
    SamplingParams,
    SpeculativeConfig,
    TextMessageRole,
    TextModelBuilder,
    TextSpeculativeBuilder,
    UnsupportedArchitectureError,
    VisionModelBuilder,
    plan_memory,
    write_gguf,
    write_safetensors,
)
from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.build import draft as draft_module
from paged_sdk.runner.assistant_drafts import AssistantDrafts
from tiny import make_checkpoint
from tiny_vision import make_vision_checkpoint, picture
from watched_drafts import texts_of, verified, watching

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def make_pair(kind: str, directory: Path) -> tuple[Path, Path]:
    """Write a model and its assistant, whose tokens are clustered if the model shares keys, as with E2B."""
    target = make_target(kind, directory / "target")
    return target, make_assistant(target, directory / "assistant", **(CLUSTERS if kind == "shared keys" else {}))


@pytest.fixture(scope="module", params=list(TARGETS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(request.param, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair("shared keys", tmp_path_factory.mktemp("shared"))


def with_assistant(builder: Any, assistant: Path) -> Any:
    return TextSpeculativeBuilder(builder, TextModelBuilder(assistant), SpeculativeConfig(gamma=GAMMA))


@pytest.mark.parametrize("name", SETTINGS)
async def test_drafts_are_those_of_transformers(pair: tuple[Path, Path], name: str) -> None:
    plain, reference = SETTINGS[name](builder_of(pair[0])), AssistantReference(*pair)
    drafting = with_assistant(plain, pair[1])
    await expect_drafts(plain, drafting, reference.likeliest, is_preempted=name == "preempted")


@needs_library
@pytest.mark.parametrize("kind", KINDS)
async def test_texts_do_not_change(shared: tuple[Path, Path], kind: str) -> None:
    plain = KINDS[kind](builder_of(shared[0]))
    await expect_the_same_texts(plain, with_assistant(plain, shared[1]))


async def test_choices_constraints_predictions_and_adapters(shared: tuple[Path, Path], tmp_path: Path) -> None:
    target = AssistantReference(*shared).target
    write_adapter(tmp_path / "adapter", target, targets=("q_proj", "down_proj"))
    plain = builder_of(shared[0]).with_adapter(tmp_path / "adapter")
    await expect_the_same_answers(plain, with_assistant(plain, shared[1]))


async def test_prefixes_are_those_of_the_model(shared: tuple[Path, Path], tmp_path: Path) -> None:
    """An assistant keeps no KV, so prefixes are found with it and without, in the pool and in a directory."""
    reference, prompt, found = AssistantReference(*shared), [*range(60, 124)], []
    plain = builder_of(shared[0]).with_paged_attn(pool(2000)).with_prefix_cache_dir(tmp_path / "cache")
    for builder in (with_assistant(plain, shared[1]), plain, with_assistant(plain, shared[1])):
        with watching({}) as watched:
            async with builder.build() as model:
                await model.send_completion_request([*prompt, 7], GREEDY)
                again = await model.send_completion_request([*prompt, 8], GREEDY)
                assert again.usage.prompt_tokens_details.cached_tokens == 64
                found.append(model.stats().prefix_restored)
        for before, drafts, token in watched.found[:30]:
            assert token == reference.likeliest(before, drafts)
    assert found == [0, 64, 64]


async def test_the_target_may_be_quantized_again(shared: tuple[Path, Path]) -> None:
    """Then the assistant reads the new weights' keys, and the old ones are freed."""
    plain = builder_of(shared[0])
    async with plain.with_isq(IsqType.Q8_0).build() as model:
        expected = await texts_of(model, GREEDY)
    with watching({}) as watched:
        async with with_assistant(plain, shared[1]).build() as model:
            await texts_of(model, GREEDY)
            worker: Any = model._worker
            backend = weakref.ref(worker._engine._runner._step_runner.backend)
            watched.found.clear()
            await model.re_isq_model(IsqType.Q8_0)
            gc.collect()
            assert backend() is None
            assert await texts_of(model, GREEDY) == expected
            assert len(watched.found) > 50


async def test_images(tmp_path: Path) -> None:
    """The target sees them; the assistant reads what it has made of them."""
    make_vision_checkpoint("gemma4", tmp_path / "target")
    assistant = make_assistant(tmp_path / "target", tmp_path / "assistant")
    plain = VisionModelBuilder(tmp_path / "target").with_dtype("float32").with_force_cpu().with_num_threads(1)
    requests = [
        RequestBuilder()
        .add_image_message(TextMessageRole.USER, text, picture(40, 60, seed=seed))
        .with_sampling(SamplingParams(temperature=0.0, max_len=NUM_TOKENS, ignore_eos=True))
        for seed, text in enumerate(("What is it?", "And this?"))
    ]
    answers = []
    for builder in (plain, with_assistant(plain, assistant)):
        with watching({}) as watched:
            async with builder.build() as model:
                wait_for_requests(model, len(requests))
                got = await asyncio.gather(*map(model.send_chat_request, requests))
                answers.append([each.choices[0].message.content for each in got])
    assert answers[0] == answers[1]
    assert len(watched.found) > 50


async def test_a_failure_ends_drafting_alone(shared: tuple[Path, Path]) -> None:
    async with builder_of(shared[0]).build() as model:
        texts = await texts_of(model, GREEDY)
    with watching({}), patch.object(AssistantDrafts, "_draft", side_effect=RuntimeError("no drafts")):
        async with with_assistant(builder_of(shared[0]), shared[1]).build() as model:
            for _ in range(2):
                assert await texts_of(model, GREEDY) == texts
            worker: Any = model._worker
            assert worker._engine._runner._step_runner.drafts.num_followed == 0


async def test_files(shared: tuple[Path, Path], tmp_path: Path) -> None:
    """GGUF files of both, one of them quantized, draft like the checkpoints that they were made of."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shared[0] / name, shared[1])
    reference = AssistantReference(*shared)
    target = write_gguf(shared[0], tmp_path / "target.gguf", type="F32")
    own = write_gguf(shared[1], tmp_path / "assistant.gguf", type="F32")
    small = write_gguf(shared[1], tmp_path / "small.gguf", type="Q8_0")
    assert own.stat().st_size > 2 * small.stat().st_size
    for assistant in (own, small):
        plain = GgufModelBuilder(target).with_dtype("float32").with_force_cpu().with_num_threads(1)
        builder = TextSpeculativeBuilder(plain, GgufModelBuilder(assistant), SpeculativeConfig(gamma=GAMMA))
        with watching({}) as watched:
            async with builder.build() as model:
                await texts_of(model, GREEDY)
        checked = random.Random(0).sample(watched.found, 40)
        # A file has no clusters: of all tokens, the likeliest may be outside of those that score best.
        right = [token == reference.likeliest_of_all(before, drafts) for before, drafts, token in checked]
        assert sum(right) >= (len(right) if assistant is own else 0.8 * len(right))


@pytest.mark.parametrize("kind", TARGETS)
def test_llama_cpp_accepts_as_many_drafts(tmp_path: Path, kind: str) -> None:
    """Of written files. Eight tokens are drawn, so that one in eight drafts of random weights is right."""
    wide = {"sliding_window": 128}  # at a window's edge, llama.cpp's assistant sees a key less
    target = make_target(kind, tmp_path / "target", **wide)
    assistant = make_assistant(target, tmp_path / "assistant")
    tensors = load_file(assistant / "model.safetensors")
    banned = [*range(3), *range(11, 512)]  # the end of the text among them
    tensors["model.embed_tokens.weight"][banned] *= 0.1
    save_file(tensors, assistant / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(target / name, assistant)
    files = [write_gguf(path, tmp_path / f"{path.name}.gguf", type="F32") for path in (target, assistant)]
    judge, reference, seen = LlamaCpp(files[0], drafts=3, assistant=files[1]), AssistantReference(target, assistant), 0
    for prompt in ([5, 6, 7, 8] * 3, list(range(100, 120))):
        answer = judge.complete(prompt, 40, banned=banned, temperature=8.0)
        drafted, accepted = verified(reference.likeliest, prompt, answer.tokens, most=3, max_tokens=40)
        assert (answer.num_drafted, answer.num_accepted) == (drafted, accepted)
        seen += accepted
    assert seen > 3


REFUSED: Final[Mapping[str, tuple[Any, str]]] = {
    "another size": (
        lambda path: make_checkpoint("llama", path, hidden_size=128),
        "it is made for a hidden size of 64, and this one's is 128",
    ),
    "another vocabulary": (
        lambda path: make_target("shared keys", path, vocab_size=640, vocab_size_per_layer_input=640),
        "512 tokens, and this one 640",
    ),
    "other heads": (
        lambda path: make_target("shared keys", path, global_head_dim=96),
        "its layer 3 reads 2 KV heads of 64 elements, and layer 3 here has 2 KV heads of 96",
    ),
    "no windows": (
        lambda path: make_checkpoint("llama", path),
        "its layer 0 needs a layer with a sliding window here",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_an_assistant_of_another_model(shared: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    make, reason = REFUSED[kind]
    make(tmp_path / "other")
    with pytest.raises(ConfigError, match=f"assistant cannot guess for this model: .*{reason}") as raised:
        await with_assistant(builder_of(tmp_path / "other"), shared[1]).build()
    assert (raised.value.setting, raised.value.allowed) == ("draft", "the assistant of this model")


async def test_an_assistant_does_nothing_else(shared: tuple[Path, Path], tmp_path: Path) -> None:
    refused, text = "only drafts for a model of hidden size 64", tmp_path / "text"
    text.write_text("the quick brown fox " * 40)
    with pytest.raises(UnsupportedArchitectureError, match=refused):
        await builder_of(shared[1]).build()
    with pytest.raises(UnsupportedArchitectureError, match=refused):
        plan_memory(builder_of(shared[1]))
    with pytest.raises(UnsupportedArchitectureError, match=refused):
        write_gguf(shared[1], tmp_path / "calibrated.gguf", calibrate=text)


async def test_it_may_be_written_in_another_dtype(shared: tuple[Path, Path], tmp_path: Path) -> None:
    """With the order of its tokens, whose ids bfloat16 has no room for."""
    write_safetensors(shared[1], tmp_path / "assistant", type="BF16")
    first, second = (
        load_file(path / "model.safetensors")["masked_embedding.token_ordering"]
        for path in (shared[1], tmp_path / "assistant")
    )
    assert torch.equal(first, second)
    with watching({}) as watched:
        async with with_assistant(builder_of(shared[0]), tmp_path / "assistant").build() as model:
            await texts_of(model, GREEDY)
    assert len(watched.found) > 50


async def test_a_target_whose_keys_are_not_to_be_read(shared: tuple[Path, Path]) -> None:
    with (
        patch.object(PagedBackend, "view", AttentionBackend.view),
        patch.object(NativePagedBackend, "view", AttentionBackend.view),
        pytest.raises(ConfigError, match=r"no assistant beside a .*Backend, which another model cannot read"),
    ):
        await with_assistant(builder_of(shared[0]), shared[1]).build()


async def test_batch_invariance_is_the_targets(shared: tuple[Path, Path]) -> None:
    assistant = TextModelBuilder(shared[1]).with_batch_invariance()
    async with TextSpeculativeBuilder(builder_of(shared[0]), assistant).build() as model:
        assert await texts_of(model, GREEDY)


async def test_a_draft_model_leaves_nothing_but_its_weights(shared: tuple[Path, Path]) -> None:
    """An ordinary one: its tokenizer is freed."""
    found: list[weakref.ref[Any]] = []
    load: Any = vars(draft_module)["load_weights"]

    def load_weights(*arguments: Any, **named: Any) -> Any:
        made = load(*arguments, **named)
        found.append(weakref.ref(made))
        return made

    with patch.object(draft_module, "load_weights", load_weights):
        async with TextSpeculativeBuilder(builder_of(shared[0]), builder_of(shared[0])).build():
            gc.collect()
            assert [each() for each in found] == [None]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_centroids": 33}, r"num_centroids.*expected a divisor of vocab_size = 512"),
        ({"centroid_intermediate_top_k": 40}, r"centroid_intermediate_top_k.*expected at most num_centroids = 32"),
        ({"backbone_hidden_size": None}, r"backbone_hidden_size"),
        ({"text_config": None}, r"text_config = None: expected the settings of the assistant's decoder"),
        ({"text_config": {"model_type": "llama"}}, r"text_config.model_type = 'llama': expected gemma4_text or"),
    ],
)
async def test_a_config_that_cannot_be(
    shared: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    shutil.copytree(shared[1], tmp_path / "assistant")
    path = tmp_path / "assistant" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=match):
        await with_assistant(builder_of(shared[0]), path.parent).build()


async def test_an_order_without_a_token(shared: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(shared[1], tmp_path / "assistant")
    path, name = tmp_path / "assistant" / "model.safetensors", "masked_embedding.token_ordering"
    tensors = load_file(path)
    tensors[name][0] = tensors[name][1]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} is no order of the 512 tokens"):
        await with_assistant(builder_of(shared[0]), path.parent).build()
