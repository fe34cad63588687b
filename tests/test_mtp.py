"""Layers for multi-token prediction draft what transformers' layers would, and change no text."""

from __future__ import annotations

import gc
import os
import random
import shutil
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from adapter_files import write_adapter
from layer_draft_cases import (
    GAMMA,
    GREEDY,
    KINDS,
    SETTINGS,
    builder_of,
    expect_drafts,
    expect_the_same_answers,
    expect_the_same_texts,
    pool,
)
from llamacpp import LlamaCpp
from mtp_checkpoints import MTP_CONFIGS, MtpReference, add_mtp_layer, make_mtp_checkpoint
from native_weights import needs_library
from paged_sdk import (
    CheckpointError,
    ConfigError,
    Constraint,
    GgufModelBuilder,
    IsqType,
    LayerTopology,
    Model,
    RequestBuilder,
    SamplingParams,
    SpeculativeConfig,
    TextSpeculativeBuilder,
    Topology,
    VisionModelBuilder,
    write_gguf,
)
from paged_sdk.build.assembly import load_parts
from paged_sdk.config.env import read_environment
from paged_sdk.runner.beside_layers import MOST_DRAFTS
from paged_sdk.runner.mtp_drafts import MOST_KEPT, MtpDrafts
from paged_sdk.runner.mtp_layer import MtpLayer
from paged_sdk.weights.gguf.source import GgufSource
from tiny import make_checkpoint
from tiny_vision import encoder_inputs, make_vision_checkpoint, picture
from watched_drafts import PROMPTS, Watched, texts_of, verified, watching, without_drafts

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=list(MTP_CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_checkpoint("qwen3_5_text", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_checkpoint("glm4_moe", tmp_path_factory.mktemp("glm"), head_dim=32)


def drafting(builder: Any) -> Any:
    return builder.with_speculation(SpeculativeConfig(gamma=GAMMA, mtp=True))


def mtp_of(model: Model) -> MtpDrafts:
    worker: Any = model._worker
    found = worker._engine._runner._step_runner.drafts
    assert isinstance(found, MtpDrafts)
    return found


def layer_of(model: Model) -> MtpLayer:
    return mtp_of(model).layers


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("small chunks", "preempted") else pytest.param(name, marks=pytest.mark.long)
        for name in SETTINGS
    ],
)
async def test_drafts_are_those_of_transformers_layers(checkpoint: Path, name: str) -> None:
    plain, reference = SETTINGS[name](builder_of(checkpoint)), MtpReference(checkpoint)
    await expect_drafts(plain, drafting(plain), reference.likeliest, is_preempted=name == "preempted")


@needs_library
@pytest.mark.parametrize("kind", KINDS)
async def test_texts_do_not_change(glm: Path, kind: str) -> None:
    plain = KINDS[kind](builder_of(glm))
    await expect_the_same_texts(plain, drafting(plain))


async def test_choices_constraints_predictions_and_adapters(qwen: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", MtpReference(qwen).target, targets=("q_proj", "in_proj_qkv", "down_proj"))
    plain = builder_of(qwen).with_adapter(tmp_path / "adapter")
    await expect_the_same_answers(plain, drafting(plain))


async def test_a_conversation_goes_on_from_the_prefix_cache(glm: Path) -> None:
    reference, tokens = MtpReference(glm), list(range(60, 91))
    with watching({}) as watched:
        async with drafting(builder_of(glm).with_paged_attn(pool(2000))).build() as model:
            first = await model.send_completion_request(tokens, GREEDY)
            watched.found.clear()
            # The layer's KV of the prompt comes from the prefix cache, too.
            again = await model.send_completion_request([*tokens[:24], *tokens[24:], 7], GREEDY)
            assert again.usage.prompt_tokens_details.cached_tokens == 24
    assert first.choices[0].text != again.choices[0].text
    for before, drafts, token in random.Random(0).sample(watched.found, 20):
        assert token == reference.likeliest(before, drafts)


async def test_stored_prefixes_have_the_layers_keys(glm: Path, tmp_path: Path) -> None:
    """And are no prefixes of the same model without the layer."""
    reference, prompt, found = MtpReference(glm), [*range(60, 124)], []
    plain = builder_of(glm).with_paged_attn(pool(2000)).with_prefix_cache_dir(tmp_path / "cache")
    for builder in (drafting(plain), drafting(plain), plain):
        with watching({}) if builder.settings.mtp else nullcontext(Watched()) as watched:
            async with builder.build() as model:
                await model.send_completion_request([*prompt, 7], GREEDY)
                found.append(model.stats().prefix_restored)
        for before, drafts, token in watched.found[:20]:
            assert token == reference.likeliest(before, drafts)
    assert found == [0, 64, 0]


@pytest.mark.parametrize("length", [1, 2, 65])
async def test_the_layer_may_hold_less_than_the_model(glm: Path, length: int) -> None:
    """Of a prompt's last token it has no KV yet where the model's is copied for another text."""
    one, prompt = SamplingParams(temperature=0.0, max_len=1), list(range(7, 7 + length))
    texts = []
    for builder in (builder_of(glm), drafting(builder_of(glm))):
        with watching({}) if builder.settings.mtp else nullcontext():
            async with builder.without_paged_attn().build() as model:
                await model.send_completion_request(prompt, one)
                again = await model.send_completion_request([*prompt, 400], GREEDY)
                texts.append(again.choices[0].text)
                assert again.usage.prompt_tokens_details.cached_tokens == length
    assert texts[0] == texts[1]


async def test_states_of_a_text_without_drafts_do_not_pile_up(qwen: Path) -> None:
    """Where drafts do not pay, the layer follows many tokens at a time."""
    long = SamplingParams(temperature=0.0, max_len=4 * MOST_KEPT, ignore_eos=True)
    kept: list[int] = []
    take = MtpDrafts.take

    def noting(self: MtpDrafts, *args: Any) -> None:
        take(self, *args)
        kept.extend(len(state.kept) for state in self._states.values())

    with (
        patch.object(MtpDrafts, "take", noting),
        patch.object(MtpDrafts, "propose", lambda self, each: [[]] * len(each)),
    ):
        async with drafting(builder_of(qwen)).build() as model:
            await model.send_completion_request(PROMPTS[0], long)
            mtp = mtp_of(model)
            await model.send_completion_request(PROMPTS[1], SamplingParams(max_len=1))
            assert mtp.num_followed <= 1
    assert MOST_KEPT - 2 < max(kept) <= MOST_KEPT


async def test_cancelled_texts_are_forgotten(qwen: Path) -> None:
    with watching({}):
        async with drafting(builder_of(qwen)).build() as model:
            endless = SamplingParams(temperature=0.0, max_len=400, ignore_eos=True, n_choices=2)
            async with model.stream_completion_request(PROMPTS[0], endless) as stream:
                await anext(stream)
            for prompt in PROMPTS[1:3]:
                await model.send_completion_request(prompt, GREEDY)
            assert mtp_of(model).num_followed <= 1
            assert model.stats().blocks_used == 0


async def test_a_failed_step_is_repeated(qwen: Path) -> None:
    with watching({}):
        async with drafting(builder_of(qwen)).build() as model:
            expected = await texts_of(model, GREEDY)
            await model.reset_prefix_cache()
            worker: Any = model._worker
            target, calls = worker._engine._runner._step_runner.model, 0
            forward = type(target).forward

            def failing(self: Any, *args: Any) -> Any:
                nonlocal calls
                calls += self is target
                if calls == 9 and self is target:
                    raise MemoryError("no memory")
                return forward(self, *args)

            with patch.object(type(target), "forward", failing):
                assert await texts_of(model, GREEDY) == expected
            assert calls > 9


@pytest.mark.parametrize("family", MTP_CONFIGS)
async def test_files_have_the_layer(family: str, tmp_path: Path) -> None:
    """A GGUF file that is written from a checkpoint drafts the same."""
    path = make_mtp_checkpoint(family, tmp_path / "model")
    file = write_gguf(path, tmp_path / "model.gguf", type="F32")
    found = []
    for builder in (builder_of(path), GgufModelBuilder(file).with_dtype("float32").with_force_cpu()):
        with watching({}) as watched:
            async with drafting(builder.with_num_threads(1)).build() as model:
                texts = await texts_of(model, GREEDY, PROMPTS[:1])
        found.append((texts, watched.found))
    assert found[0] == found[1]
    assert found[0][1]


# Of Qwen3-Next, llama.cpp drafts in half of the steps.
JUDGED: Final = ("qwen3_5_text", "qwen3_5_moe_text", "glm4_moe", "deepseek_v3", "glm4_moe_lite")


@pytest.mark.parametrize(
    "family", [each if each == JUDGED[0] else pytest.param(each, marks=pytest.mark.long) for each in JUDGED]
)
def test_llama_cpp_accepts_as_many_drafts(family: str, tmp_path: Path) -> None:
    """Of a written file. Eight tokens are drawn, so that one in eight drafts of random weights is right."""
    path = make_mtp_checkpoint(family, tmp_path / "model")
    tensors, banned = load_file(path / "model.safetensors"), [*range(3), *range(11, 512)]
    tensors["lm_head.weight"][banned] *= 0.1
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    judge = LlamaCpp(write_gguf(path, tmp_path / "model.gguf", type="F32"), drafts=1)
    reference, seen = MtpReference(path), 0
    for prompt in ([5, 6, 7, 8] * 3, list(range(100, 133))):
        answer = judge.complete(prompt, 40, banned=banned, temperature=8.0)
        drafted, accepted = verified(reference.likeliest, prompt, answer.tokens, most=1, max_tokens=40)
        # Its sums are not the same: one draft in a hundred is another token.
        assert abs(answer.num_accepted - accepted) <= 1
        assert abs(answer.num_drafted - drafted) <= 1
        seen += accepted
    assert seen > 3


async def test_what_it_does_not_go_together_with(qwen: Path, glm: Path, tmp_path: Path) -> None:
    llama = make_checkpoint("llama", tmp_path / "llama")
    refused: list[tuple[Any, str]] = [
        (builder_of(llama), "a checkpoint with a layer for multi-token prediction: llama has none"),
        (builder_of(glm).with_tensor_parallel(2), "a model in one process: ranks do not draft"),
    ]
    for builder, needed in refused:
        with pytest.raises(ConfigError, match=needed):
            await drafting(builder).build()
    with pytest.raises(ConfigError, match="mtp = True is not allowed: expected False beside a draft model"):
        TextSpeculativeBuilder(builder_of(qwen), builder_of(qwen), SpeculativeConfig(mtp=True))


@needs_library
async def test_requantized_models_draft_on(qwen: Path, tmp_path: Path) -> None:
    """Also after a type that cannot be had: then the old weights are in use."""
    path = tmp_path / "model"
    shutil.copytree(qwen, path)
    async with builder_of(path).with_isq(IsqType.Q8_0).build() as model:
        expected = await texts_of(model, GREEDY)
    with watching({}) as watched:
        async with drafting(builder_of(path)).build() as model:
            await texts_of(model, GREEDY)
            head = weakref.ref(layer_of(model).module.embedding)
            await model.re_isq_model(IsqType.Q8_0)
            gc.collect()
            assert head() is None
            watched.found.clear()
            assert await texts_of(model, GREEDY) == expected
            assert watched.found
            os.utime(path / "config.json")
            with pytest.raises(CheckpointError, match="is not what it was"):
                await model.re_isq_model(IsqType.Q4_0)
            watched.found.clear()
            assert await texts_of(model, GREEDY) == expected
            assert watched.found


async def test_the_environment_asks_for_it(qwen: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Models without such a layer do without."""
    llama, environment = (
        make_checkpoint("llama", tmp_path / "llama"),
        read_environment({"MISTRALRS_SPECULATIVE_MTP": "on"}),
    )
    drafts = {}
    for path in (qwen, llama):
        builder = builder_of(path)
        with caplog.at_level("INFO"):
            parts = load_parts(builder.source, builder.settings, environment)
        async with Model(parts) as model:
            await texts_of(model, GREEDY)
            worker: Any = model._worker
            drafts[path] = worker._engine._runner._step_runner.drafts is not None
            assert parts.config.gamma == (SpeculativeConfig().gamma if path == qwen else 0)
    assert drafts == {qwen: True, llama: False}
    assert "MISTRALRS_SPECULATIVE_MTP has no effect here: it needs a checkpoint" in caplog.text
    off = builder_of(qwen).with_speculation(SpeculativeConfig(gamma=2))
    async with Model(load_parts(off.source, off.settings, environment)) as model:
        worker = model._worker
        assert worker._engine._runner._step_runner.drafts is None


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_the_reference_is_transformers_own(family: str, tmp_path: Path) -> None:
    path = make_mtp_checkpoint(family, tmp_path)
    reference, tokens = MtpReference(path), [5, 6, 7, 8, 9, 11, 200, 3, 4]
    judge, own = MtpModel(reference.target, 1), {}
    tensors = load_file(path / "model.safetensors")
    for name, tensor in reference.layer_tensors.items():
        own[f"mtp_block.{name}"] = tensor
    glue = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "post_norm"}
    own |= {f"{judged}.weight": tensors[f"model.layers.3.{name}.weight"] for name, judged in glue.items()}
    judge.layers[0].load_state_dict(own)
    with torch.inference_mode():
        states = reference.target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1]
        positions = torch.arange(1, len(tokens))[None]
        found, _, _ = judge(torch.tensor([tokens[1:]]), states, None, positions, None)
    assert found.tolist() == [[reference.likeliest(tokens, [])]]


async def test_images_are_seen_by_the_layer(tmp_path: Path) -> None:
    """Of a token before an image's, the next embedding is the image's vector, also where a chunk ends between them."""
    target = make_vision_checkpoint("qwen3_5", tmp_path)
    add_mtp_layer(tmp_path)
    pool_of_blocks = pool(2048)
    plain = VisionModelBuilder(tmp_path).with_dtype("float32").with_force_cpu().with_num_threads(1)
    plain = plain.with_paged_attn(pool_of_blocks).with_max_num_batched_tokens(16)
    parts = ("Before it", picture(84, 84, seed=2), "what was there?", picture(40, 60))
    content = [
        {"type": "text", "text": each} if isinstance(each, str) else {"type": "image", "image": each} for each in parts
    ]
    request = RequestBuilder().add_message("user", content).with_sampling(GREEDY)
    async with plain.build() as model:
        expected = (await model.send_chat_request(request)).choices[0].message.content
    with watching({}) as watched:
        async with drafting(plain).build() as model:
            assert (await model.send_chat_request(request)).choices[0].message.content == expected
    inputs = encoder_inputs(target.config.to_dict(), tmp_path, [each for each in parts if not isinstance(each, str)])
    reference = MtpReference(tmp_path, target)
    firsts = [(before, token) for before, drafts, token in watched.found if not drafts]
    assert len(firsts) > 10
    for before, token in firsts[:6]:
        assert token == reference.likeliest_beside_images(before, inputs)


async def test_choices_that_begin_with_many_forced_tokens(glm: Path) -> None:
    """The first row of a choice may have more drafts than are kept, none of whose next tokens is known."""
    long = "the quick brown fox jumps over the lazy dog and goes on to the next one"
    constraint = Constraint.regex(f"(x|y|z|{long} {long} {long})")
    texts = []
    for builder in (builder_of(glm), drafting(builder_of(glm))):
        async with builder.build() as model:
            found = []
            for seed in range(8, 12):
                sampling = SamplingParams(temperature=1.5, seed=seed, n_choices=3, max_len=100)
                answer = await model.send_completion_request(PROMPTS[0], sampling, constraint=constraint)
                found.append([choice.text for choice in answer.choices])
            texts.append(found)
    assert texts[0] == texts[1]


async def test_very_many_drafts(glm: Path) -> None:
    plain, sampling = builder_of(glm).with_paged_attn(pool(2000)), SamplingParams(max_len=90, temperature=0.0)
    texts, tokens = await without_drafts(plain, sampling)
    with watching(tokens) as watched, patch.object(watched.chance, "random", lambda: 0.0):
        async with plain.with_speculation(SpeculativeConfig(gamma=64, mtp=True)).build() as model:
            assert await texts_of(model, sampling) == texts
            assert max(len(drafts) for _, drafts, _ in watched.found) == MOST_DRAFTS - 1


@pytest.mark.parametrize("drafts", [True, False])
async def test_texts_leave_the_layers_keys_to_those_that_go_on(glm: Path, *, drafts: bool) -> None:
    """Whether they had drafts or not: blocks that other texts have used are not taken for theirs."""
    reference, prompt = MtpReference(glm), [*range(60, 91)]
    long, propose = SamplingParams(temperature=0.0, max_len=28, ignore_eos=True), MtpDrafts.propose
    seen: list[Any] = []

    def noting(self: MtpDrafts, sequences: Any) -> list[list[int]]:
        seen.extend(sequences)
        return propose(self, sequences) if drafts else [[] for _ in sequences]

    with watching({}) as watched:
        async with drafting(builder_of(glm).with_paged_attn(pool(160))).build() as model:
            for first in range(7):
                await model.send_completion_request([first, *range(200, 240)], GREEDY)
            with patch.object(MtpDrafts, "propose", noting):
                await model.send_completion_request(prompt, long)
            tokens = seen[-1].token_ids
            watched.found.clear()
            # Without drafts, the last key before the last end of a block has been waiting for the next end.
            again = await model.send_completion_request([*tokens[:50], 11, 12, 13], GREEDY)
            assert again.usage.prompt_tokens_details.cached_tokens == 48
    assert watched.found
    for before, own, token in watched.found[:20]:
        assert token == reference.likeliest(before, own)


async def test_embedded_texts_leave_the_layers_keys(glm: Path) -> None:
    reference, prompt = MtpReference(glm), [*range(60, 125)]
    with watching({}) as watched:
        async with drafting(builder_of(glm).with_paged_attn(pool(400))).build() as model:
            await model.embed([prompt])
            again = await model.send_completion_request(prompt, GREEDY)
            assert again.usage.prompt_tokens_details.cached_tokens == 64
            assert mtp_of(model).num_followed <= 1
    for before, drafts, token in watched.found[:20]:
        assert token == reference.likeliest(before, drafts)


async def test_choices_have_the_keys_of_their_prompt(glm: Path) -> None:
    reference, choices = MtpReference(glm), SamplingParams(temperature=0.9, seed=3, n_choices=3, max_len=16)
    with watching({}) as watched:
        async with drafting(builder_of(glm).with_paged_attn(pool(400))).build() as model:
            await model.send_completion_request(list(range(60, 89)), choices)
    assert len(watched.found) > 50
    for before, drafts, token in random.Random(0).sample(watched.found, 30):
        assert token == reference.likeliest(before, drafts)


async def test_a_layer_that_fails_is_left_alone(glm: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with builder_of(glm).build() as model:
        texts = await texts_of(model, GREEDY)
    with watching({}), patch.object(MtpDrafts, "_draft", side_effect=RuntimeError("no drafts")):
        async with drafting(builder_of(glm)).build() as model:
            for _ in range(2):
                assert await texts_of(model, GREEDY) == texts
            assert mtp_of(model).num_followed == 0
    assert "generation continues without drafts" in caplog.text


@pytest.mark.parametrize("family", ["qwen3_5_text", "glm4_moe"])
async def test_parts_of_a_layer_are_no_layer(family: str, tmp_path: Path) -> None:
    path = make_mtp_checkpoint(family, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    gone = {
        "qwen3_5_text": "mtp.layers.0.self_attn.o_proj.weight",
        "glm4_moe": "model.layers.3.self_attn.o_proj.weight",
    }
    del tensors[gone[family]]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="model has none that is known here"):
        await drafting(builder_of(path)).build()
    file = GgufSource(write_gguf(path, tmp_path / "model.gguf", type="F32"))
    name = file.metadata["general.architecture"]
    assert f"{name}.nextn_predict_layers" not in file.metadata
    assert file.metadata[f"{name}.block_count"] == 3
    assert not any(each.startswith("mtp.") for each in file.names())
    file.close()


async def test_embeddings_of_its_own_are_not_known(tmp_path: Path) -> None:
    path = make_mtp_checkpoint("qwen3_5_text", tmp_path)
    tensors = load_file(path / "model.safetensors")
    own = {"mtp.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | own, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="has none that is known here"):
        await drafting(builder_of(path)).build()


def times_of(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.iterdir()}


@needs_library
async def test_what_is_quantized_is_kept_with_the_layer_or_without(glm: Path, tmp_path: Path) -> None:
    plain, known = builder_of(glm).with_isq(IsqType.Q8_0).with_isq_cache(tmp_path), dict[Path, int]()
    for builder, count in ((plain, 1), (drafting(plain), 2), (plain, 2), (drafting(plain), 2)):
        async with builder.build() as model:
            await texts_of(model, GREEDY)
        files = times_of(tmp_path)
        assert len(files) == count
        assert known.items() <= files.items()  # none is made anew
        known = files


@needs_library
async def test_ranges_of_layers_leave_it_alone(qwen: Path) -> None:
    """It is not the model's first layer, though it is numbered 0; expressions find its names."""
    sizes, quantized = [], LayerTopology(isq=IsqType.Q8_0)
    whole = Topology.empty()
    for topology in (whole.with_range(range(1), quantized), whole.with_regex(r"^mtp\.layers\.0\.self_attn", quantized)):
        async with drafting(builder_of(qwen).with_topology(topology)).build() as model:
            sizes.append(layer_of(model).module.weights.layer.attention.output.num_bytes)
    assert sizes[0] > 3 * sizes[1]
