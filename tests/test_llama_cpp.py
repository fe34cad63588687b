"""llama.cpp loads the files that are written here, and says after them what this package says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tiny
from arrivals import gather
from llamacpp import LlamaCpp
from paged_sdk import GgufModelBuilder, Model, SamplingParams, TokenLogprob, write_gguf

pytest.importorskip("xllamacpp", reason="it has wheels for Linux on x86-64 alone")
pytestmark = pytest.mark.anyio

NUM_TOKENS = 24
PROMPTS = [list(range(5 + length, 5 + 4 * length, 3)) for length in (3, 20, 47, 90)]
#: For counts near their bound: of 96 tokens, a twelfth more or less are the same from one instruction set to another.
MORE_PROMPTS = [*PROMPTS, *([5 + (7 * k + 11 * i) % 240 for i in range(k)] for k in (4, 9, 16, 25))]
ENDS = (0, 2)
#: By how much logprobs may differ. llama.cpp looks GELU up in a table of float16, and multiplies F16 by activations
#: that it rounds to float16; without these it was 0.0002 at most, with them 0.04.
CLOSE, CLOSE_GELU, CLOSE_F16 = 1e-3, 0.02, 0.08
#: With blocks it rounds activations to 8 bits; so do the kernels here, each in its way. It was 0.24 at most, of
#: a real model 0.48 for tokens of less than 1 %.
CLOSE_BLOCKS, CLOSE_REAL = 0.4, 0.7


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def ours(model: Model, prompt: list[int], num_tokens: int) -> list[TokenLogprob]:
    """Go on greedily after a prompt; the tokens come with the eight likeliest in their places."""
    sampling = SamplingParams(
        temperature=0,
        max_len=num_tokens,
        ignore_eos=True,
        logits_bias=dict.fromkeys(ENDS, float("-inf")),
        top_n_logprobs=8,
    )
    logprobs = (await model.send_completion_request(prompt, sampling)).choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.content) == num_tokens
    return list(logprobs.content)


async def num_agreed(
    model: Model, prompt: list[int], begun: list[TokenLogprob], theirs: list[int], close: float
) -> int:
    """Compare greedy tokens; where they part, this package goes on with llama.cpp's.

    They may part where this package finds llama.cpp's token about as likely as its own.

    :param begun: what this package says after the prompt
    :returns: how many tokens are the same
    """
    agreed = place = 0
    while place < len(theirs):
        for own in begun:
            other = theirs[place]
            place += 1
            if own.token_id != other:
                assert own.logprob - {each.token_id: each.logprob for each in own.top_logprobs}[other] < close
                break
            agreed += 1
        if place < len(theirs):
            begun = await ours(model, [*prompt, *theirs[:place]], len(theirs) - place)
    return agreed


async def must_agree(path: Path, close: float, dtype: str | None = None, prompts: list[list[int]] = PROMPTS) -> int:
    """Compare greedy tokens, and logprobs right after the prompts.

    :returns: how many tokens are the same
    """
    judge, same, compared = LlamaCpp(path), 0, 0
    builder = GgufModelBuilder(path).with_force_cpu().with_num_threads(1)
    async with (builder if dtype is None else builder.with_dtype(dtype)).build() as model:
        texts = await gather(model, *(ours(model, prompt, NUM_TOKENS) for prompt in prompts))
        for prompt, begun in zip(prompts, texts, strict=True):
            theirs = judge.complete(prompt, NUM_TOKENS, banned=ENDS)
            assert len(theirs.tokens) == NUM_TOKENS
            if max(theirs.logprobs, key=theirs.logprobs.__getitem__) == theirs.tokens[0]:
                compared += 1
                likely = {each.token_id: each.logprob for each in begun[0].top_logprobs}
                assert all(abs(likely[id] - theirs.logprobs[id]) < close for id in likely.keys() & theirs.logprobs)
            same += await num_agreed(model, prompt, begun, theirs.tokens, close)
    assert compared >= len(prompts) // 2  # tokens that end within a character come without logprobs
    return same


@pytest.mark.parametrize("family", tiny.FAMILIES)
async def test_float_files_say_the_same(family: str, tmp_path: Path) -> None:
    directory = tiny.make_checkpoint(family, tmp_path / "model", **tiny.GGUF_OVERRIDES.get(family, {}))
    close = CLOSE_GELU if family.startswith("gemma") else CLOSE
    whole = write_gguf(directory, tmp_path / "f32.gguf", type="F32")
    assert await must_agree(whole, close, "float32") > 0.9 * NUM_TOKENS * len(PROMPTS)
    half = write_gguf(directory, tmp_path / "f16.gguf", type="F16")
    assert await must_agree(half, CLOSE_F16, "float32") > 0.9 * NUM_TOKENS * len(PROMPTS)


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a llama whose rows fill the blocks of K formats."""
    wide: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "initializer_range": 0.08}
    return tiny.make_checkpoint("llama", tmp_path_factory.mktemp("wide"), **wide)


@pytest.mark.parametrize(
    "mixture",
    [
        *("Q3_K_M", "Q4_K_M", "IQ4_XS", "TQ1_0"),
        *(pytest.param(each, marks=pytest.mark.long) for each in ("Q2_K", "Q4_0", "Q5_1", "Q6_K", "Q8_0")),
    ],
)
async def test_quantized_files_say_nearly_the_same(mixture: str, wide_checkpoint: Path, tmp_path: Path) -> None:
    path = write_gguf(wide_checkpoint, tmp_path / "m.gguf", type=mixture)
    same = await must_agree(path, CLOSE_BLOCKS, prompts=MORE_PROMPTS)
    assert same > 0.8 * NUM_TOKENS * len(MORE_PROMPTS)


@pytest.mark.smollm2
async def test_the_embedded_model_says_nearly_the_same(smollm2: Path) -> None:
    judge = LlamaCpp(smollm2)
    prompts = [judge.encode(text) for text in ("The capital of France is", "def add(first, second):\n    return")]
    # All 48 of them are the same where this was written.
    assert await must_agree(smollm2, CLOSE_REAL, prompts=prompts) > 0.9 * NUM_TOKENS * len(prompts)
