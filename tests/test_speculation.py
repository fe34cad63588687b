"""Whole models with drafts: every text is the one without, whatever else was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from attrs import evolve, frozen

from arrivals import Step, gather, obeyed
from drafting import NoDrafts, drafting, drafting_model
from paged_sdk import (
    CompletionResponse,
    ConfigError,
    Constraint,
    GgufModelBuilder,
    IsqType,
    MemoryGpuConfig,
    Model,
    ModelLoadError,
    ModelStats,
    PagedAttentionMeta,
    PagedCacheType,
    SamplingParams,
    SpeculativeConfig,
    TextModelBuilder,
    TextSpeculativeBuilder,
)
from paged_sdk.build.assembly import load_parts
from paged_sdk.config.env import read_environment
from paged_sdk.config.sampling import DryParams
from paged_sdk.scheduler.proposer import Proposer
from paged_sdk.speculative.forced_tokens import ForcedTokens
from talk import until
from tiny import VOCAB_SIZE, make_checkpoint, make_gguf

PROMPTS: Final = ([5, 6, 7, 8] * 6, [40, 41, 42] * 5, list(range(60, 90)))
BASE: Final = SamplingParams(temperature=0.0, max_len=24, ignore_eos=True)
DRAWN: Final = evolve(BASE, temperature=0.7, seed=3)
SAMPLINGS: Final = {
    "greedy": BASE,
    "drawn": DRAWN,
    "truncated": evolve(DRAWN, top_k=20, top_p=0.9, min_p=0.02),
    "penalized": evolve(BASE, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1),
    "biased": evolve(DRAWN, logits_bias={7: 4.0, 9: 4.0}),
    "with logprobs": evolve(BASE, top_n_logprobs=3),
    "dry": evolve(BASE, dry_params=DryParams(multiplier=0.8)),
    "choices": evolve(DRAWN, n_choices=3),
    "stopped": evolve(BASE, stop=["e", "a"], max_len=60),
    "ended": evolve(DRAWN, ignore_eos=False, min_tokens=6, logits_bias={0: 6.0, 2: 6.0}),
    "short": evolve(BASE, max_len=1),
    "to the context's end": evolve(BASE, max_len=None),
}
LENGTH: Final = 100

Builder = Callable[[TextModelBuilder], TextModelBuilder]


def _pool(**settings: Any) -> Builder:
    return lambda builder: builder.with_paged_attn(PagedAttentionMeta(block_size=4, **settings))


MODES: Final[dict[str, Builder]] = {
    "paged": _pool(gpu_memory=MemoryGpuConfig.ContextSize(4000)),
    "fp8": _pool(gpu_memory=MemoryGpuConfig.ContextSize(4000), cache_type=PagedCacheType.F8E4M3),
    "preempted": _pool(gpu_memory=MemoryGpuConfig.ContextSize(220)),
    "contiguous": lambda builder: builder.without_paged_attn(),
    "chunked": lambda builder: builder.with_max_num_batched_tokens(24),
}


@frozen
class Run:
    """Holds what requests were answered, and what the engine counted."""

    responses: list[CompletionResponse]
    stats: ModelStats


async def run(builder: TextModelBuilder, samplings: Sequence[SamplingParams], proposer: Proposer | None) -> Run:
    """Send every prompt with every sampling, all at once and then the first few again."""
    parts = load_parts(builder.source, builder.settings, read_environment({}), proposer=proposer)
    async with Model(parts) as model:
        found: dict[int, CompletionResponse] = {}
        asked = [(prompt, sampling) for sampling in samplings for prompt in PROMPTS]

        async def ask(place: int) -> None:
            prompt, sampling = asked[place % len(asked)]
            found[place] = await model.send_completion_request(prompt, sampling)

        await gather(model, *map(ask, range(len(asked))))
        for place in range(4):
            await ask(len(asked) + place)
        stats = model.stats()
        assert stats.blocks_used == 0
    return Run([found[place] for place in sorted(found)], stats)


def said(response: CompletionResponse) -> list[tuple[str, str | None]]:
    return [(choice.text, choice.finish_reason) for choice in response.choices]


def assert_equal(drafted: Run, plain: Run) -> None:
    assert list(map(said, drafted.responses)) == list(map(said, plain.responses))
    for one, other in zip(drafted.responses, plain.responses, strict=True):
        assert one.usage.completion_tokens == other.usage.completion_tokens
        for choice, same in zip(one.choices, other.choices, strict=True):
            assert (choice.logprobs is None) == (same.logprobs is None)
            if choice.logprobs is not None and same.logprobs is not None:
                ours, theirs = choice.logprobs.content, same.logprobs.content
                assert [each.token for each in ours] == [each.token for each in theirs]
                assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=1e-4)
    assert drafted.stats.drafted_tokens > drafted.stats.accepted_tokens > 0
    assert drafted.stats.steps < plain.stats.steps
    assert plain.stats.drafted_tokens == 0


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("mode", MODES)
async def test_every_text_is_the_one_without_drafts(builder: TextModelBuilder, mode: str) -> None:
    builder = MODES[mode](builder.with_max_model_len(LENGTH))
    samplings = list(SAMPLINGS.values())
    plain = await run(builder, samplings, None)
    drafted = await run(builder, samplings, drafting())
    assert_equal(drafted, plain)
    assert (drafted.stats.preemptions > 0) == (mode == "preempted")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.long] * (mode in ("fp8", "chunked"))) for mode in MODES]
)
async def test_a_draft_model_changes_no_text(builder: TextModelBuilder, tiny_checkpoint: Path, mode: str) -> None:
    """The model guesses for itself, so of greedy texts everything is right."""
    builder = MODES[mode](builder.with_max_model_len(LENGTH))
    samplings = list(SAMPLINGS.values())
    plain = await run(builder, samplings, None)
    draft = drafting_model(builder, tiny_checkpoint)
    drafted = await run(builder, samplings, draft)
    assert_equal(drafted, plain)
    assert draft.num_followed <= 1  # the last one's end is told with the next step
    greedy = (await run(builder, [BASE], drafting_model(builder, tiny_checkpoint))).stats
    assert greedy.accepted_tokens == greedy.drafted_tokens > greedy.steps


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_windows_of_attention_slide_over_drafts(tmp_path: Path) -> None:
    await check_family("mistral", tmp_path, "paged", gamma=7)


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3", "mixtral", "gemma2", "phi3"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gamma", [1, 16])
async def test_every_family_too(tmp_path: Path, family: str, mode: str, gamma: int) -> None:
    await check_family(family, tmp_path, mode, gamma=gamma)


async def check_family(family: str, directory: Path, mode: str, *, gamma: int) -> None:
    make_checkpoint(family, directory)
    builder = TextModelBuilder(directory).with_dtype("float32").with_force_cpu().with_num_threads(1)
    builder = MODES[mode](builder.with_max_model_len(LENGTH))
    plain = await run(builder, list(SAMPLINGS.values()), None)
    assert_equal(await run(builder, list(SAMPLINGS.values()), drafting(gamma)), plain)


WAYS: Final[dict[str, dict[str, Any]]] = {
    "suffix": {"logits_bias": dict.fromkeys((5, 6, 7, 8), 40.0)},
    "prediction": {"logits_bias": dict.fromkeys((5, 6, 7, 8), 40.0)},
    "model": {"top_k": 4},
    "forced": {"temperature": 8.0, "max_len": 60},
}
FEW_SENTENCES: Final = Constraint.regex("(one|two|three) of the (first|last|next)")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("way", WAYS)
async def test_drawn_tokens_have_the_distribution_of_those_without_drafts(
    builder: TextModelBuilder, tiny_checkpoint: Path, way: str
) -> None:
    await check_distribution(builder, tiny_checkpoint, way, num_texts=300)


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("way", WAYS)
async def test_drawn_tokens_have_that_distribution_in_many_texts(
    builder: TextModelBuilder, tiny_checkpoint: Path, way: str
) -> None:
    await check_distribution(builder, tiny_checkpoint, way, num_texts=4_000)


async def check_distribution(builder: TextModelBuilder, directory: Path, way: str, *, num_texts: int) -> None:
    """Compare two samples of other seeds: where drafts were verified, they differ by chance alone."""
    settings: dict[str, Any] = {"temperature": 1.0, "max_len": 3, "ignore_eos": way != "forced", **WAYS[way]}
    options: dict[str, Any] = {"constraint": FEW_SENTENCES} if way == "forced" else {}

    # So short that the smaller model has read it before the first token that it could guess.
    prompt = [5, 6, 7, 8] * (1 if way == "model" else 4)

    async def counts(proposer: Proposer, first: int) -> tuple[Counter[str], ModelStats]:
        parts = load_parts(builder.source, builder.settings, read_environment({}), proposer=proposer)
        async with Model(parts) as model:
            if way == "prediction":
                options["prediction"] = await model.detokenize([5, 6, 7, 8])
            tokens: Counter[str] = Counter()
            size = 1 if way == "prediction" else 10  # a prediction is of one text
            seeds = range(first, first + num_texts, size)
            for some in (seeds[start : start + 40] for start in range(0, len(seeds), 40)):
                answers = await gather(
                    model,
                    *(
                        model.send_completion_request(
                            prompt, SamplingParams(**settings, seed=seed, n_choices=size), **options
                        )
                        for seed in some
                    ),
                )
                tokens.update(choice.text for answer in answers for choice in answer.choices)
            return tokens, model.stats()

    proposer: Proposer
    match way:
        case "suffix":
            proposer = drafting(2)
        case "prediction":
            proposer = drafting(2, looks_back=False)
        case "model":
            proposer = drafting_model(builder, directory, gamma=2)
        case _:
            proposer = ForcedTokens(NoDrafts())
    ones, stats = await counts(proposer, 0)
    others, plain_stats = await counts(NoDrafts(), num_texts)
    assert sum(ones.values()) == sum(others.values()) == num_texts
    assert (stats.forced_tokens if way == "forced" else stats.accepted_tokens) > 30
    assert plain_stats.drafted_tokens == 0
    texts = ones.keys() | others.keys()
    statistic = sum((ones[text] - others[text]) ** 2 / (ones[text] + others[text]) for text in texts)
    degrees = len(texts) - 1
    assert degrees >= 8
    # Wilson and Hilferty's approximation: the cube root of a chi-square is nearly normal. Three deviations.
    spread = 2 / (9 * degrees)
    assert statistic < degrees * (1 - spread + 3 * spread**0.5) ** 3


@pytest.mark.anyio
async def test_cancelling_while_drafts_are_verified_gives_everything_back(builder: TextModelBuilder) -> None:
    proposer = drafting()
    parts = load_parts(builder.source, builder.settings, read_environment({}), proposer=proposer)
    async with Model(parts) as model:
        for num_steps in (1, 5, 9):
            params = SamplingParams(temperature=0.0, max_len=400, ignore_eos=True)
            await obeyed(model)
            step = Step(model, num_steps)
            async with model.stream_completion_request(PROMPTS[0], params):
                await until(step.is_done.is_set)
            step.may_end.set()
        await model.send_completion_request(PROMPTS[1], BASE)
        stats = model.stats()
        assert stats.accepted_tokens > 0
        assert stats.blocks_used == 0
        assert stats.running == 0
        assert proposer.num_followed <= 1  # the last one's end is told with the next step


@pytest.mark.anyio
async def test_a_model_is_told_to_speculate_by_its_builder_or_the_environment(
    builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gamma(builder: TextModelBuilder) -> int:
        async with builder.build() as model:
            await model.send_completion_request(PROMPTS[0], BASE)
            return model.config.gamma

    assert await gamma(builder) == 0
    assert await gamma(builder.with_speculation(SpeculativeConfig())) == 16
    monkeypatch.setenv("MISTRALRS_SPECULATIVE_GAMMA", "3")
    assert await gamma(builder) == 3
    assert await gamma(builder.with_speculation(SpeculativeConfig(gamma=7))) == 7
    assert await gamma(builder.with_speculation(None)) == 0


@pytest.mark.parametrize("gamma", [0, -1, 1025, 1.5, "4", None, True])
def test_a_number_of_drafts_that_cannot_be_is_refused(gamma: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig(gamma)
    assert caught.value.value is gamma


@pytest.mark.parametrize("value", [16, "on", SpeculativeConfig, True])
def test_speculation_takes_its_own_settings_alone(builder: TextModelBuilder, value: Any) -> None:
    with pytest.raises(ConfigError, match="with_speculation"):
        builder.with_speculation(value)


def small(directory: Path, **changes: Any) -> TextModelBuilder:
    """Write a model of the same vocabulary with other weights."""
    torch.manual_seed(1)
    make_checkpoint("llama", directory, **changes)
    return TextModelBuilder(directory).with_dtype("float32")


@pytest.mark.anyio
async def test_a_model_with_a_smaller_one(
    builder: TextModelBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However bad its guesses are, texts stay; and both are closed together."""

    async def texts(builder: TextModelBuilder | TextSpeculativeBuilder) -> tuple[list[Any], int]:
        async with builder.build() as model:
            answers = [await model.send_completion_request(prompt, BASE) for prompt in PROMPTS]
            await model.reset_prefix_cache()
            return list(map(said, answers)), model.config.gamma

    expected, _ = await texts(builder)
    draft = small(tmp_path)
    assert await texts(TextSpeculativeBuilder(builder, draft, SpeculativeConfig(gamma=3))) == (expected, 3)
    assert await texts(TextSpeculativeBuilder(builder.without_paged_attn(), draft)) == (expected, 16)
    monkeypatch.setenv("MISTRALRS_SPECULATIVE_DRAFT_MODEL", str(tmp_path))
    assert await texts(builder) == (expected, 16)
    monkeypatch.setenv("MISTRALRS_SPECULATIVE_DRAFT_MODEL", str(tmp_path / "nowhere"))
    assert await texts(builder.with_speculation(None)) == (expected, 0)
    with pytest.raises(ModelLoadError, match="nowhere"):
        await builder.build()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("tag", ["", ":F16"])
async def test_the_environment_names_a_directory_of_gguf_files(
    tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = (make_gguf(tmp_path / role, quantization="F16") for role in ("target", "draft"))
    draft.rename(draft.with_name("model-F16.gguf"))
    monkeypatch.setenv("MISTRALRS_SPECULATIVE_DRAFT_MODEL", f"{draft.parent}{tag}")
    async with GgufModelBuilder(target).build() as model:
        assert model.config.gamma == 16


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_smaller_model_with_more_logits(builder: TextModelBuilder, tmp_path: Path) -> None:
    """Vocabularies are padded to different sizes: what only the smaller model has is not guessed."""
    small(tmp_path, vocab_size=VOCAB_SIZE + 700)
    builder = builder.with_max_model_len(LENGTH)
    plain = await run(builder, [BASE, DRAWN], None)
    drafted = await run(builder, [BASE, DRAWN], drafting_model(builder, tmp_path))
    assert list(map(said, drafted.responses)) == list(map(said, plain.responses))
    assert drafted.stats.drafted_tokens


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("kinds", [("text", "GGUF"), ("GGUF", "text"), ("GGUF", "GGUF")])
async def test_each_of_a_pair_is_loaded_in_its_own_way(tmp_path: Path, kinds: tuple[str, str]) -> None:
    """One is quantized to other types than the other; the larger one's text is its own."""
    target, draft = (
        GgufModelBuilder(make_gguf(tmp_path / role, quantization="F16", seed=seed))
        if kind == "GGUF"
        else small(tmp_path / role)
        for seed, (role, kind) in enumerate(zip(("target", "draft"), kinds, strict=True))
    )
    target, draft = target.with_isq(IsqType.Q8_0), draft.with_isq(IsqType.Q4_0)
    async with target.build() as alone, TextSpeculativeBuilder(target, draft).build() as pair:
        for prompt in PROMPTS:
            expected = await alone.send_completion_request(prompt, BASE)
            assert said(await pair.send_completion_request(prompt, BASE)) == said(expected)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_smaller_model_with_other_tokens_is_refused(builder: TextModelBuilder, tmp_path: Path) -> None:
    draft = small(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_start|>", "<|im_begin|>"))
    what = r"token 1 is '<.im_begin.>' there and '<.im_start.>' here"
    with pytest.raises(ConfigError, match=what) as caught:
        await TextSpeculativeBuilder(builder, draft).build()
    assert caught.value.value == str(tmp_path)


def test_what_is_no_builder_is_refused(builder: TextModelBuilder) -> None:
    for target, draft in ((builder, "path"), (None, builder)):
        with pytest.raises(ConfigError, match="a TextModelBuilder"):
            TextSpeculativeBuilder(target, draft)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="device"):
        TextSpeculativeBuilder(builder, builder.with_device("cuda"))
    with pytest.raises(ConfigError):
        TextSpeculativeBuilder(builder, builder, 16)  # type: ignore[arg-type]
