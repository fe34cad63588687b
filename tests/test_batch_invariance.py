"""By default a text does not depend on how much of its prompt was cached, nor on a few texts around it; with one
arithmetic for every row count it depends on nothing around it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from adapter_files import write_adapter
from arrivals import gather
from native_weights import needs_library
from paged_sdk import ConfigError, GgufModelBuilder, IsqType, Model, SamplingParams, TextModelBuilder
from test_recurrent_models import CONFIGS

pytestmark = pytest.mark.anyio

NUM_TOKENS = 5
RECURRENT: Final = {name: CONFIGS[name] for name in CONFIGS if name != "falcon_h1"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def continuation(model: Model, prompt: list[int], adapter: str | None = None) -> list[tuple[int, float]]:
    """Return tokens and their logprobs: equal logprobs mean equal logits, to the last bit."""
    sampling = SamplingParams(temperature=0, max_len=NUM_TOKENS, ignore_eos=True, top_n_logprobs=0)
    logprobs = (await model.send_completion_request(prompt, sampling, adapter=adapter)).choices[0].logprobs
    assert logprobs is not None
    return [(token.token_id, token.logprob) for token in logprobs.content]


async def all_at_once(model: Model, prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
    results: dict[int, list[tuple[int, float]]] = {}

    async def send(index: int) -> None:
        results[index] = await continuation(model, prompts[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(prompts)):
            tasks.start_soon(send, index)
    return [results[index] for index in range(len(prompts))]


@pytest.fixture(params=[pytest.param("smollm2", marks=pytest.mark.smollm2), "mixtral", "qwen3_moe", "gemma3_text"])
def file(request: pytest.FixtureRequest, shallow_smollm2: Path, tmp_path: Path) -> Path:
    """Return a real model, or a tiny one with mixtures of experts or with norms after attention and MLP."""
    if request.param == "smollm2":
        return shallow_smollm2
    return tiny.make_gguf(tmp_path, family=request.param, quantization="Q8_0")


@needs_library
async def test_the_same_logits_alone_and_in_a_batch_chunked_or_cached(file: Path) -> None:
    await assert_invariant(GgufModelBuilder(file).with_force_cpu())


@needs_library
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_the_same_logits_of_dense_weights(builder: TextModelBuilder, dtype: str) -> None:
    await assert_invariant(builder.with_dtype(dtype))


@needs_library
async def test_the_same_logits_of_experts_beside_an_mlp(tmp_path: Path) -> None:
    """Whose weights have two forms without batch invariance, and whose output has a gate."""
    sizes: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    file = tiny.make_other_checkpoint("qwen2_moe", tmp_path, **sizes, shared_expert_intermediate_size=64)
    await assert_invariant(TextModelBuilder(file).with_force_cpu().with_isq(IsqType.Q8_0))


@needs_library
@pytest.mark.parametrize("isq", [None, IsqType.Q8_0], ids=["bfloat16", "quantized"])
@pytest.mark.parametrize(
    "family", ["lfm2", *(pytest.param(name, marks=pytest.mark.long) for name in RECURRENT if name != "lfm2")]
)
async def test_the_same_logits_of_recurrent_layers(family: str, isq: IsqType | None, tmp_path: Path) -> None:
    builder = TextModelBuilder(tiny.make_other_checkpoint(family, tmp_path, **RECURRENT[family])).with_force_cpu()
    await assert_invariant(builder if isq is None else builder.with_isq(isq))


@needs_library
@pytest.mark.parametrize("family", ["llama", "gemma2"])
async def test_the_same_logits_beside_texts_of_other_adapters(family: str, tmp_path: Path) -> None:
    """One of which brings each row of a product to a length of its own, and one changes a single matrix."""
    base, reference = tiny.make_checkpoint(family, tmp_path / "base"), tiny.build_model(family)
    write_adapter(tmp_path / "plain", reference, seed=1)
    write_adapter(tmp_path / "decomposed", reference, seed=2, use_dora=True)
    write_adapter(tmp_path / "small", reference, seed=3, rank=2, targets=("o_proj",))
    await assert_invariant_beside(base, [tmp_path / name for name in ("plain", "decomposed", "small")])


@needs_library
async def test_the_same_logits_through_adapters_of_embeddings_and_output_projections(tmp_path: Path) -> None:
    base, reference = tiny.make_checkpoint("llama", tmp_path / "base"), tiny.build_model("llama")
    write_adapter(tmp_path / "head", reference, seed=1, rank=24, targets=("lm_head",))
    path = write_adapter(tmp_path / "both", reference, seed=2, targets=("lm_head",)) / "adapter_model.safetensors"
    name, generator = "base_model.model.model.embed_tokens.lora_embedding", torch.Generator().manual_seed(3)
    shapes = {"A": (4, reference.config.vocab_size), "B": (reference.config.hidden_size, 4)}
    sides = {f"{name}_{side}": torch.randn(shape, generator=generator) for side, shape in shapes.items()}
    save_file(load_file(path) | sides, path)
    await assert_invariant_beside(base, [tmp_path / "head", tmp_path / "both"], dtype="float32")


async def assert_invariant_beside(base: Path, adapters: list[Path], *, dtype: str = "auto") -> None:
    """Check that texts are the same beside those of other adapters, and of none."""
    builder = TextModelBuilder(base).with_dtype(dtype).with_force_cpu().with_batch_invariance().with_num_threads(2)
    names = (*(path.name for path in adapters), None)
    prompts = [[100 + 7 * i + j for j in range(length)] for i, length in enumerate((40, 3, 65))]
    asked = [(prompt, name) for prompt in prompts for name in names]
    for path in adapters:
        builder = builder.with_adapter(path)
    async with builder.with_prefix_cache_n(0).build() as model:
        alone = [await continuation(model, *each) for each in asked]
        assert await gather(model, *(continuation(model, *each) for each in asked)) == alone


async def assert_invariant(builder: GgufModelBuilder | TextModelBuilder) -> None:
    prompts = [[100 + 7 * i + j for j in range(length)] for i, length in enumerate((3, 40, 90, 150, 7, 65, 33, 128))]
    builder = builder.with_batch_invariance().with_num_threads(2)
    async with builder.with_prefix_cache_n(0).build() as model:
        alone = [await continuation(model, prompt) for prompt in prompts]
    async with builder.with_max_num_batched_tokens(70).build() as model:
        assert await all_at_once(model, prompts) == alone
        assert await all_at_once(model, prompts) == alone, "from the prefix cache"
        assert model.stats().prefix_hits > 0


@pytest.mark.smollm2
@needs_library
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
async def test_by_default_a_prompt_has_the_same_logits_whenever_it_is_asked(shallow_smollm2: Path, dtype: str) -> None:
    """From quantized weights, which have a form for prompts and one for generated tokens, and from dense ones.

    Prompts leave 1, 2, 8, 9, 12, 13 and 32 tokens beside the blocks that are cached the second time.
    """
    builder = GgufModelBuilder(shallow_smollm2).with_force_cpu().with_dtype(dtype).with_num_threads(2)
    lengths = (33, 66, 40, 73, 44, 45, 64, 5, 12, 150)
    prompts = [[100 + 7 * i + j for j in range(length)] for i, length in enumerate(lengths)]
    async with builder.with_max_num_batched_tokens(90).build() as model:
        first = [await continuation(model, prompt) for prompt in prompts]
        assert [await continuation(model, prompt) for prompt in prompts] == first, "from the prefix cache"
        assert model.stats().prefix_hits > 0
        assert await all_at_once(model, prompts) == first, "in a batch, from the prefix cache"
        await model.reset_prefix_cache()
        assert await all_at_once(model, prompts) == first, "in a batch, in chunks"


async def test_it_is_refused_where_it_cannot_be_kept(builder: TextModelBuilder) -> None:
    with pytest.raises(ConfigError, match="with_batch_invariance"):
        await builder.without_paged_attn().with_batch_invariance().build()
