"""Models with recurrent layers behind the public names: batches, preemption, choices, cancellation, prefix cache,
adapters and requantization change no text, and what they do not go together with is refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch
from attrs import evolve
from transformers import AutoModelForCausalLM

from adapter_files import merge, write_adapter
from arrivals import wait_for_requests
from drafting import drafting_model
from native_weights import needs_library
from paged_sdk import (
    ConfigError,
    Constraint,
    GgufModelBuilder,
    InvalidRequestError,
    IsqType,
    LayerTopology,
    MemoryGpuConfig,
    Model,
    OutOfMemoryError,
    PagedAttentionMeta,
    PagedCacheType,
    SamplingParams,
    SpeculativeConfig,
    TextModelBuilder,
    TextSpeculativeBuilder,
    Topology,
    write_gguf,
)
from paged_sdk.build.assembly import load_parts
from paged_sdk.build.memory_plan import plan_memory
from paged_sdk.build.stateful import fit_kept_states
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import read_environment
from paged_sdk.kv.pool_size import DeviceMemory
from paged_sdk.kv.states import StatefulKvManager
from paged_sdk.models.family import read_config
from paged_sdk.scheduler.sequence import Sequence as TokenSequence
from tiny import make_checkpoint, make_other_checkpoint

pytestmark = pytest.mark.anyio

_MAMBA: Final = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
CONFIGS: Final[Mapping[str, dict[str, Any]]] = {
    "lfm2": {
        "block_multiple_of": 16,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    "qwen3_5_text": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "granitemoehybrid": {
        **_MAMBA,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 128,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128, "num_hidden_layers": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "time_step_min": 1e-30,  # transformers' least step, of prompts alone
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "num_hidden_layers": 3},
}
PROMPTS: Final = ([5, 6, 7, 8] * 6, [40, 41, 42] * 5, [9] * 70, list(range(100, 133)))
NUM_TOKENS: Final = 24
TARGETS: Final = (
    *("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "in_proj_qkvz", "in_proj_ba", "out_proj"),
    *("q_proj", "k_proj", "o_proj", "w1", "w2", "up_proj", "down_proj"),
)
"""The last parts of the names of layers that adapters change: of all kinds of layers."""
GREEDY: Final = SamplingParams(temperature=0.0, max_len=NUM_TOKENS, ignore_eos=True)
REFUSED: Final[tuple[tuple[Any, str], ...]] = (
    (lambda builder: builder.without_paged_attn().with_prefix_cache_n(4), "with_prefix_cache_n"),
    (lambda builder: builder.with_prefix_cache_dir("never_made"), "with_prefix_cache_dir"),
    (lambda builder: builder.with_tensor_parallel(2), "with_tensor_parallel"),
)
"""Settings that do not go together with recurrent layers, and how errors name them."""


_LONG: Final = ("qwen3_5_text", "granitemoehybrid", "falcon_h1", "nemotron_h")


@pytest.fixture(scope="module", params=["lfm2", *(pytest.param(name, marks=pytest.mark.long) for name in _LONG)])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: str = request.param
    return make_other_checkpoint(family, tmp_path_factory.mktemp(family), **CONFIGS[family])


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_other_checkpoint("lfm2", tmp_path_factory.mktemp("lfm2"), **CONFIGS["lfm2"])


@pytest.fixture(scope="module")
def mamba2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_other_checkpoint("mamba2", tmp_path_factory.mktemp("mamba2"), **CONFIGS["mamba2"])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def builder_of(path: Path) -> TextModelBuilder:
    return TextModelBuilder(path).with_dtype("float32").with_force_cpu().with_num_threads(1)


def pool(tokens: int, cache_type: PagedCacheType = PagedCacheType.AUTO) -> PagedAttentionMeta:
    return PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(tokens), cache_type=cache_type)


def reference_of(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def continued(reference: Any, prompt: list[int]) -> list[int]:
    tokens: list[int] = reference.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None
    )[0, len(prompt) :].tolist()
    return tokens


def shape_of(path: Path) -> DecoderConfig:
    return read_config(json.loads((path / "config.json").read_text()))


def manager_of(model: Model) -> StatefulKvManager:
    worker: Any = model._worker
    manager = worker._engine._kv
    assert isinstance(manager, StatefulKvManager)
    return manager


SETTINGS: Final[Mapping[str, Any]] = {
    "default": lambda builder: builder,
    "small chunks": lambda builder: builder.with_max_num_batched_tokens(16).with_paged_attn(pool(2000)),
    "preempted": lambda builder: builder.with_max_num_batched_tokens(32).with_paged_attn(pool(160)),
    "preempted, no prefix cache": lambda builder: builder.with_paged_attn(pool(160)).with_prefix_cache_n(None),
    "contiguous": lambda builder: builder.without_paged_attn(),
    "few seats": lambda builder: builder.with_max_num_seqs(2).with_prefix_cache_n(1).with_paged_attn(pool(2000)),
}


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        *(("lfm2", name) for name in SETTINGS),
        *(
            pytest.param("mamba2", name, marks=() if name in ("preempted", "contiguous") else pytest.mark.long)
            for name in SETTINGS
        ),
        *(
            pytest.param(family, name, marks=() if name == "preempted" else pytest.mark.long)
            for family in _LONG
            for name in SETTINGS
        ),
    ],
    indirect=["checkpoint"],
)
async def test_texts_are_those_of_transformers(checkpoint: Path, name: str) -> None:
    reference = reference_of(checkpoint)
    expected = [continued(reference, prompt) for prompt in PROMPTS]
    async with SETTINGS[name](builder_of(checkpoint)).build() as model:
        wait_for_requests(model, len(PROMPTS))
        got = await asyncio.gather(*(model.send_completion_request(prompt, GREEDY) for prompt in PROMPTS))
        for response, tokens in zip(got, expected, strict=True):
            assert response.choices[0].text == await model.detokenize(tokens)
        stats = model.stats()
        assert stats.blocks_used == 0
        assert (stats.preemptions > 0) == name.startswith("preempted")


async def test_choices_are_the_same_under_pressure(checkpoint: Path) -> None:
    sampling = SamplingParams(temperature=0.9, seed=3, n_choices=3, max_len=NUM_TOKENS, ignore_eos=True)
    texts = []
    for tokens in (2000, 112):
        async with builder_of(checkpoint).with_paged_attn(pool(tokens)).build() as model:
            wait_for_requests(model, 2)
            both = await asyncio.gather(*(model.send_completion_request(prompt, sampling) for prompt in PROMPTS[:2]))
            texts.append([choice.text for response in both for choice in response.choices])
            assert (model.stats().preemptions > 0) == (tokens == 112)
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 3


@needs_library
async def test_quantized_texts_are_the_same_under_pressure(checkpoint: Path) -> None:
    """Prompts and generated tokens are multiplied by different forms of the weights, in two calls: a preempted sequence
    that begins anew has both in one step, and takes its state from one call to the other.
    """
    texts = []
    for tokens in (2000, 160):
        builder = builder_of(checkpoint).with_isq(IsqType.Q4_0).with_max_num_batched_tokens(64)
        async with builder.with_paged_attn(pool(tokens)).build() as model:
            wait_for_requests(model, len(PROMPTS))
            got = await asyncio.gather(*(model.send_completion_request(prompt, GREEDY) for prompt in PROMPTS))
            texts.append([response.choices[0].text for response in got])
            assert (model.stats().preemptions > 0) == (tokens == 160)
    assert texts[0] == texts[1]


async def test_a_conversation_computes_its_new_tokens_alone(checkpoint: Path) -> None:
    reference = reference_of(checkpoint)
    async with builder_of(checkpoint).with_paged_attn(pool(4000)).build() as model:
        tokens, length = list(range(60, 91)), 0
        for _ in range(3):
            response = await model.send_completion_request(tokens, GREEDY)
            answer = continued(reference, tokens)
            assert response.choices[0].text == await model.detokenize(answer)
            # All of the answer before had KV but its last token; whole blocks of it count.
            expected = (length - 1) // 8 * 8 if length else 0
            assert response.usage.prompt_tokens_details.cached_tokens == expected
            length = len(tokens) + len(answer)
            tokens += [*answer, 33, 34, 35]
        again = await model.send_completion_request(tokens, GREEDY)
        assert again.usage.prompt_tokens_details.cached_tokens == (length - 1) // 8 * 8
        twice = await model.send_completion_request(tokens, GREEDY)
        assert twice.usage.prompt_tokens_details.cached_tokens == (len(tokens) - 1) // 8 * 8
        assert twice.choices[0].text == again.choices[0].text == await model.detokenize(continued(reference, tokens))
        await model.reset_prefix_cache()
        anew = await model.send_completion_request(tokens, GREEDY)
        assert anew.usage.prompt_tokens_details.cached_tokens == 0
        assert anew.choices[0].text == again.choices[0].text


async def test_texts_that_begin_alike(checkpoint: Path) -> None:
    """The second one leaves the state where they part, and further ones start there."""
    reference, found = reference_of(checkpoint), []
    async with builder_of(checkpoint).with_paged_attn(pool(4000)).build() as model:
        for last in (1, 2, 3):
            prompt = [*range(50, 93), *[last] * 20]
            response = await model.send_completion_request(prompt, GREEDY)
            found.append(response.usage.prompt_tokens_details.cached_tokens)
            assert response.choices[0].text == await model.detokenize(continued(reference, prompt))
    assert found == [0, 0, 40]


async def test_few_states_are_kept(lfm2: Path) -> None:
    """The states of texts that were least recently used go first."""
    async with builder_of(lfm2).with_prefix_cache_n(2).with_paged_attn(pool(4000)).build() as model:
        one = SamplingParams(temperature=0.0, max_len=1)
        found = []
        for first in (1, 2, 1, 3, 1, 2, 3):
            response = await model.send_completion_request([first] * 20, one)
            found.append(response.usage.prompt_tokens_details.cached_tokens)
    assert found == [0, 0, 16, 0, 16, 0, 0]


async def test_cancelled_texts_give_their_slots_back(lfm2: Path) -> None:
    async with builder_of(lfm2).with_max_num_seqs(3).build() as model:
        endless = SamplingParams(temperature=0.0, max_len=400, ignore_eos=True, n_choices=2)
        for _ in range(3):
            task = asyncio.ensure_future(model.send_completion_request(PROMPTS[0], endless))
            async with model.stream_completion_request(PROMPTS[1], GREEDY) as stream:
                await anext(stream)
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        response = await model.send_completion_request(PROMPTS[2], GREEDY)
        assert response.choices[0].text == await model.detokenize(continued(reference_of(lfm2), PROMPTS[2]))
        assert sorted(manager_of(model)._free) == [0, 1, 2]


async def test_constraints_and_predictions_have_drafts(lfm2: Path) -> None:
    async with builder_of(lfm2).build() as model:
        plain = await model.send_completion_request(PROMPTS[0], GREEDY)
        text = plain.choices[0].text
        guessed = await model.send_completion_request(PROMPTS[0], GREEDY, prediction=text)
        assert guessed.choices[0].text == text
        before = model.stats()
        held = await model.send_completion_request(
            PROMPTS[0], GREEDY, constraint=Constraint.regex("the (first|last) of them")
        )
        assert held.choices[0].text in ("the first of them", "the last of them")
        assert held.usage.completion_tokens_details.forced_tokens > 6
        assert model.stats().steps - before.steps < held.usage.completion_tokens


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "qwen3_next", "falcon_h1"])
async def test_adapters_of_recurrent_layers_are_merged_weights(family: str, tmp_path: Path) -> None:
    own = CONFIGS.get(family, CONFIGS["qwen3_5_text"] | {"mlp_only_layers": [0, 1, 2]})
    path = make_other_checkpoint(family, tmp_path / "base", **own)
    reference = reference_of(path)
    write_adapter(tmp_path / "adapter", reference, targets=TARGETS)
    expected = continued(reference, PROMPTS[0]), continued(merge(reference, tmp_path / "adapter"), PROMPTS[0])
    assert expected[0] != expected[1]
    async with builder_of(path).with_adapter(tmp_path / "adapter").build() as model:
        got = await asyncio.gather(
            model.send_completion_request(PROMPTS[0], GREEDY),
            model.send_completion_request(PROMPTS[0], GREEDY, adapter="adapter"),
        )
        for response, tokens in zip(got, expected, strict=True):
            assert response.choices[0].text == await model.detokenize(tokens)


async def test_a_gguf_file_says_what_its_directory_says(checkpoint: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", reference_of(checkpoint), targets=TARGETS)
    file = write_gguf(checkpoint, tmp_path / "model.gguf", type="F32")
    texts = []
    for builder in (builder_of(checkpoint), GgufModelBuilder(file).with_dtype("float32").with_force_cpu()):
        async with builder.with_num_threads(1).with_adapter(tmp_path / "adapter").build() as model:
            got = [await model.send_completion_request(PROMPTS[0], GREEDY, adapter=each) for each in (None, "adapter")]
            texts.append([each.choices[0].text for each in got])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


async def test_requantized_and_quantized_weights(checkpoint: Path) -> None:
    async with builder_of(checkpoint).build() as model, builder_of(checkpoint).with_isq(IsqType.Q8_0).build() as other:
        before = await model.send_completion_request(PROMPTS[0], GREEDY)
        await model.re_isq_model(IsqType.Q8_0)
        after = await model.send_completion_request(PROMPTS[0], GREEDY)
        assert after.choices[0].text == (await other.send_completion_request(PROMPTS[0], GREEDY)).choices[0].text
        assert after.usage.prompt_tokens_details.cached_tokens == 0
        assert before.usage.completion_tokens == NUM_TOKENS


async def test_embeddings_and_scores(checkpoint: Path) -> None:
    reference = reference_of(checkpoint)
    async with builder_of(checkpoint).with_max_num_batched_tokens(32).build() as model:
        embedded = await model.embed([PROMPTS[2], PROMPTS[3]], pooling="last", normalize=False)
        for vector, prompt in zip(embedded.embeddings, PROMPTS[2:], strict=True):
            with torch.inference_mode():
                hidden = reference.model(torch.tensor([prompt])).last_hidden_state[0, -1]
            torch.testing.assert_close(torch.tensor(vector), hidden, rtol=0, atol=1e-3)
        prefix, texts = list(range(60, 140)), [[5, 6, 7], [9] * 40, [11, 12]]
        scored = await model.score(texts, prefix=prefix)
        for score, text in zip(scored.scores, texts, strict=True):
            with torch.inference_mode():
                logits = reference(torch.tensor([prefix + text])).logits[0, len(prefix) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(text)[:, None]).sum()
            assert score.logprob == pytest.approx(float(expected), abs=1e-2)


@pytest.mark.parametrize(("change", "setting"), REFUSED)
async def test_what_is_refused(lfm2: Path, change: Any, setting: str) -> None:
    with pytest.raises(ConfigError, match="recurrent layers") as refused:
        await change(builder_of(lfm2)).build()
    assert refused.value.setting == setting


def test_what_the_environment_may_not_ask_for(lfm2: Path) -> None:
    builder = builder_of(lfm2).without_paged_attn()
    with pytest.raises(ConfigError, match="recurrent layers") as refused:
        load_parts(builder.source, builder.settings, read_environment({"MISTRALRS_PREFIX_CACHE_N": "4"}))
    assert refused.value.setting == "MISTRALRS_PREFIX_CACHE_N"


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("llama", "lfm2"),
        *((target, drafter) for target in ("lfm2", "mamba2") for drafter in ("llama", "lfm2", "mamba2")),
    ],
)
async def test_a_draft_model_changes_no_text(
    target: str, drafter: str, lfm2: Path, mamba2: Path, tiny_checkpoint: Path
) -> None:
    paths = {"llama": tiny_checkpoint, "lfm2": lfm2, "mamba2": mamba2}
    builder, reference = builder_of(paths[target]), reference_of(paths[target])
    proposer = drafting_model(builder, paths[drafter], gamma=4, settings=builder_of(paths[drafter]).settings)
    parts = load_parts(builder.source, builder.settings, read_environment({}), proposer=proposer)
    async with Model(parts) as model:
        wait_for_requests(model, len(PROMPTS))
        got = await asyncio.gather(*(model.send_completion_request(prompt, GREEDY) for prompt in PROMPTS))
        for response, prompt in zip(got, PROMPTS, strict=True):
            assert response.choices[0].text == await model.detokenize(continued(reference, prompt))
        stats = model.stats()
        assert stats.drafted_tokens > NUM_TOKENS
        assert target != drafter or stats.accepted_tokens == stats.drafted_tokens
        again = await model.send_completion_request(PROMPTS[2], GREEDY)
        assert again.choices[0].text == got[2].choices[0].text


async def test_states_of_a_draft_model_are_counted(lfm2: Path, mamba2: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paged_sdk")
    target, drafter = builder_of(lfm2).with_max_num_seqs(2).with_prefix_cache_n(3), builder_of(mamba2)
    async with TextSpeculativeBuilder(target, drafter, SpeculativeConfig(gamma=2)).build() as model:
        response = await model.send_completion_request(PROMPTS[0], GREEDY)
        assert response.choices[0].text == await model.detokenize(continued(reference_of(lfm2), PROMPTS[0]))
    own, drafts = 5 * 3 * (2 + 2) * 64 * 4, 2 * 3 * ((3 + 2) * 192 + 8 * 16 * 16 + 2 * (192 + 8)) * 4
    for family, num_bytes, kept in (("lfm2", own, 3), ("mamba2", drafts, 0)):
        told = f"{num_bytes / 2**20:.1f} MiB for 2 sequences and {kept} kept prefixes."
        assert f"States of recurrent layers of {family}: {told}" in caplog.text
    for free, num_fitting in ((own // 5 * 2 + drafts // 2 * 2 - 1, 1), (own // 5, 0)):
        memory = DeviceMemory(total=free, free=free)
        with (
            patch("paged_sdk.build.stateful.device_memory", return_value=memory),
            pytest.raises(OutOfMemoryError, match=rf"for {num_fitting} sequences \(with_max_num_seqs\)"),
        ):
            await TextSpeculativeBuilder(target, drafter, SpeculativeConfig(gamma=2)).build()


async def test_a_draft_model_keeps_no_prefixes_whatever_the_environment_asks_of_its_target(
    mamba2: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISTRALRS_PREFIX_CACHE_N", "4")
    target = builder_of(tiny_checkpoint).without_paged_attn()
    async with TextSpeculativeBuilder(target, builder_of(mamba2), SpeculativeConfig(gamma=2)).build() as model:
        response = await model.send_completion_request(PROMPTS[0], GREEDY)
        assert response.choices[0].text == await model.detokenize(continued(reference_of(tiny_checkpoint), PROMPTS[0]))


async def test_the_end_of_a_drafted_answer_is_found_by_the_next_turn(lfm2: Path) -> None:
    """Also if the last step's drafts went beyond the end of its last whole block."""
    reference = reference_of(lfm2)
    for num_tokens in (13, 14, 15, 16):
        text = continued(reference, PROMPTS[0])[:num_tokens]
        builder = builder_of(lfm2).with_paged_attn(pool(800))
        parts = load_parts(
            builder.source, builder.settings, read_environment({}), proposer=Prophet([*PROMPTS[0], *text])
        )
        async with Model(parts) as model:
            sampling = evolve(GREEDY, max_len=num_tokens)
            await model.send_completion_request(PROMPTS[0], sampling)
            assert model.stats().accepted_tokens > 6
            turn = [*PROMPTS[0], *text, 3, 4, 5, 6, 7, 8, 9, 10]
            response = await model.send_completion_request(turn, GREEDY)
            assert response.choices[0].text == await model.detokenize(continued(reference, turn))
            cached = response.usage.prompt_tokens_details.cached_tokens
            assert cached == (len(PROMPTS[0]) + num_tokens - 1) // 8 * 8


class Prophet:
    """Proposes the tokens of a known text."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def propose(self, sequences: Sequence[TokenSequence]) -> list[list[int]]:
        return [list(self._tokens[len(each.token_ids) : len(each.token_ids) + 6]) for each in sequences]

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""


async def test_one_device(lfm2: Path) -> None:
    topology = Topology.empty().with_range(range(2), LayerTopology(device="meta"))
    with pytest.raises(ConfigError):
        await builder_of(lfm2).with_topology(topology).build()


async def test_plans_count_states(lfm2: Path, tmp_path: Path) -> None:
    builder = builder_of(lfm2).with_paged_attn(pool(800)).with_max_num_seqs(3)
    plan = plan_memory(builder)
    assert plan.bytes_per_token == 2 * 2 * 16 * 4  # keys and values of one layer
    assert plan.state_bytes == (3 + 16) * 3 * (2 + 8) * 64 * 4  # slots, layers, kept inputs with drafts', channels
    assert plan_memory(builder.with_prefix_cache_n(None)).state_bytes == 3 * 3 * (2 + 8) * 64 * 4
    few = builder.with_speculation(SpeculativeConfig(gamma=3))
    assert plan_memory(few).state_bytes == (3 + 16) * 3 * (2 + 3) * 64 * 4
    assert plan_memory(TextModelBuilder(make_checkpoint("llama", tmp_path)).with_force_cpu()).state_bytes == 0


async def test_kept_states_fit_the_memory(lfm2: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They take half of what running sequences leave."""
    builder, each = builder_of(lfm2).with_max_num_seqs(3).with_prefix_cache_n(10), 3 * (2 + 8) * 64 * 4
    config = EngineConfig(max_num_seqs=3, prefix_cache_n=10)
    for free, kept in ((100 * each, 10), (3 * each + 8 * each, 4), (3 * each, 0)):
        with patch("paged_sdk.build.stateful.device_memory", return_value=DeviceMemory(total=free, free=free)):
            fitted = fit_kept_states(config, shape_of(lfm2), torch.float32, device=torch.device("cpu"))
        assert fitted == evolve(config, prefix_cache_n=kept)
    few = DeviceMemory(total=0, free=2 * each)
    with (
        patch("paged_sdk.build.stateful.device_memory", return_value=few),
        pytest.raises(OutOfMemoryError, match=r"for 2 sequences \(with_max_num_seqs\)") as refused,
    ):
        await builder.build()
    assert (refused.value.needed, refused.value.available) == (3 * each, 2 * each)
    caplog.set_level("INFO", "paged_sdk")
    some = DeviceMemory(total=0, free=5 * each)
    with patch("paged_sdk.build.stateful.device_memory", return_value=some):
        async with builder.build() as model:
            assert len(manager_of(model)._free_kept) == 1
    assert "States of 1 prefixes are kept, not of 10" in caplog.text


async def test_a_model_without_attention_needs_no_memory_for_keys_and_values(mamba2: Path) -> None:
    builder = builder_of(mamba2).with_max_num_seqs(3).with_max_model_len(10_000)
    plan = plan_memory(builder)
    assert (plan.bytes_per_token, plan.kv_bytes) == (0, 0)
    assert plan.kv_tokens == 3 * 4096  # as by default on the CPU
    assert (
        plan.state_bytes == (3 + 16) * 3 * ((3 + 8) * (128 + 2 * 2 * 16) + 8 * 16 * 16 + 8 * (128 + 2 * 2 * 16 + 8)) * 4
    )
    assert plan_memory(builder.with_max_num_seqs(1)).kv_tokens == 10_016  # a text of the maximum length
    for memory, tokens in ((MemoryGpuConfig.MB(1), 3 * 4096), (MemoryGpuConfig.ContextSize(640), 640)):
        assert plan_memory(builder.with_paged_attn(PagedAttentionMeta(gpu_memory=memory))).kv_tokens == tokens
    for cache_type in (PagedCacheType.F8E4M3, PagedCacheType.Q4):
        with pytest.raises(ConfigError, match="auto: mamba2 keeps no keys and values"):
            await builder.with_paged_attn(pool(800, cache_type)).build()


async def test_a_gguf_file_without_attention_says_what_its_directory_says(mamba2: Path, tmp_path: Path) -> None:
    file = write_gguf(mamba2, tmp_path / "model.gguf", type="F32")
    builder = GgufModelBuilder(file).with_dtype("float32").with_force_cpu().with_num_threads(1)
    expected = continued(reference_of(mamba2), PROMPTS[0])
    async with builder.build() as model:
        response = await model.send_completion_request(PROMPTS[0], GREEDY)
        assert response.choices[0].text == await model.detokenize(expected)


@pytest.mark.parametrize(("change", "setting"), REFUSED)
async def test_what_is_refused_without_attention(mamba2: Path, change: Any, setting: str) -> None:
    with pytest.raises(ConfigError, match="recurrent layers") as refused:
        await change(builder_of(mamba2)).build()
    assert refused.value.setting == setting


async def test_batch_invariance_needs_layers_in_one_call(tmp_path: Path) -> None:
    falcon_h1 = make_other_checkpoint("falcon_h1", tmp_path, **CONFIGS["falcon_h1"])
    with pytest.raises(ConfigError, match="no recurrent layers beside attention") as refused:
        await builder_of(falcon_h1).with_batch_invariance().build()
    assert refused.value.setting == "with_batch_invariance"


async def test_states_alone_are_a_prefix_cache(mamba2: Path) -> None:
    reference, tokens = reference_of(mamba2), list(range(60, 91))
    async with builder_of(mamba2).with_paged_attn(pool(4000)).build() as model:
        for cached in (0, 24):
            response = await model.send_completion_request(tokens, GREEDY)
            assert response.choices[0].text == await model.detokenize(continued(reference, tokens))
            assert response.usage.prompt_tokens_details.cached_tokens == cached
        await model.re_isq_model(IsqType.Q8_0)
        again = await model.send_completion_request(tokens, GREEDY)
        assert again.usage.prompt_tokens_details.cached_tokens == 0


async def test_prefixes_are_not_pinned(lfm2: Path) -> None:
    async with builder_of(lfm2).build() as model:
        with pytest.raises(InvalidRequestError, match=r"pinned: .* a model without recurrent layers"):
            await model.pin([{"role": "system", "content": "You are a guide. " * 20}])
        assert model.stats().blocks_used == model.stats().blocks_pinned == 0
        await model.send_completion_request([5, 6, 7], sampling=SamplingParams(temperature=0, max_len=3))
