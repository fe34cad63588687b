"""Fused layers against the same layers one operation at a time, and against the decoded weights in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from attrs import frozen
from reference_decoding import CPU, logits, paged, random_prompt
from torch import Tensor

from native_weights import every_level, needs_library, workspace
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.moe import MoeConfig
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.config.rope import RopeConfig
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.kernels.step import StepContext
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.decoder_layer import DecoderLayer
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.models.fusible import why_not_fused
from paged_sdk.models.loading import load_model
from paged_sdk.models.moe_mlp import MoeMlp
from paged_sdk.quant.dense import DenseLinear
from paged_sdk.quant.dense_experts import DenseExperts
from paged_sdk.quant.native_block import FEW_ROWS
from paged_sdk.quant.native_embedding import NativeEmbedding
from paged_sdk.quant.policy import DENSE, WeightPolicy
from paged_sdk.types.step import StepRow
from paged_sdk.weights.gguf.source import GgufSource
from spans import span
from tiny import make_gguf

pytestmark = needs_library

#: Biases of every matrix, or of q, k and v; norms of q and k; one matrix for q, k and v, and one for gate and up; a
#: window of 32 tokens; experts, of which every token uses all: otherwise any error decides who is chosen where two are
#: nearly as likely; norms after attention and MLP, caps on scores, and two rotary embeddings.
FUSED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "mistral": {"sliding_window": 32},
    "mixtral": {"num_experts_per_tok": 4},
    "qwen3_moe": {"num_experts_per_tok": 8},
    "gemma2": {},
    "gemma3_text": {},
}
# tiny's own weights attend so sharply that any error decides what is seen; these leave errors near their size.
MILD = {"initializer_range": 0.1}
# In units of Checkpoint.error.
FEW_ERROR, MANY_ERROR = 0.8, 1.3
# Sums in another order, which a processor or an instruction set brings along, now and then round an activation to the
# next code. A code is a 127th of the largest of its group, about 2.5 times the root of the mean square, so one of the
# 64 columns of these models changes a product by 2.5 / 127 / sqrt(64) = 2.5e-3 of its size. Of half of the rows, no
# more than four codes may differ, which add up like sqrt(4); with one scale for a whole row, whose largest element is
# 3.5 times the root of the mean square, no more than thirty of all rows.
MEDIAN_LIMIT = 2 * 2.5 / 127 / 64**0.5
ROW_SCALE_LIMIT = 30**0.5 * 3.5 / 127 / 64**0.5
# All tokens of a step's first row count as generated, and so are multiplied by packed weights.
GENERATED = {0: 0}
# So many sequences never generate at a time: their form is that for few rows.
MANY = 1000


class Checkpoint:
    """A tiny GGUF file and the models that it becomes."""

    def __init__(self, directory: Path, family: str, *, quantization: str = "Q8_0", **overrides: Any) -> None:
        self.source = GgufSource(make_gguf(directory, family=family, quantization=quantization, **MILD | overrides))
        self.dense = self.load(DENSE)
        self._noisy = self.load(DENSE)
        generator = torch.Generator().manual_seed(0)
        for layer in self._noisy.layers:
            for weight in all_weights(layer):
                weight += 0.01 * weight.std() * torch.randn(weight.shape, generator=generator)

    def load(self, policy: WeightPolicy, *, dtype: torch.dtype = torch.float32) -> DecoderModel:
        return load_model(self.source.config, self.source, dtype=dtype, placement=CPU, policy=policy)

    def packed(self, *, one_form: bool = False, dtype: torch.dtype = torch.float32) -> DecoderModel:
        return self.load(WeightPolicy(keep_blocks=True, workspace=workspace(), one_form=one_form), dtype=dtype)

    def expected(self, text: Sequence[int]) -> Tensor:
        """Return logits of the decoded weights."""
        return whole(self.dense, text)

    def error(self, got: Tensor, text: Sequence[int]) -> float:
        """Return how far logits are from the expected ones; the unit is what noise of 1 % in every weight does.

        int8 activations cost 0.5 % of each product's norm in groups of 16, and 1 % with one scale per row beside the
        weights' own. What becomes of that after some layers is the model's affair: 1.5 to 30 % of these logits.
        """
        expected = self.expected(text)
        return relative(got, expected) / relative(whole(self._noisy, text), expected)


def all_weights(layer: DecoderLayer) -> Iterator[Tensor]:
    """Matrices of a dense layer."""
    for linear in layer.linears:
        assert isinstance(linear, DenseLinear)
        yield linear.weight
    if isinstance(layer.mlp, MoeMlp):
        assert isinstance(layer.mlp.experts, DenseExperts)
        yield from (layer.mlp.router, layer.mlp.experts.gate_up, layer.mlp.experts.down)


def whole(model: DecoderModel, text: Sequence[int]) -> Tensor:
    """Return all logits of a text, its keys and values in a torch backend."""
    return logits(model, paged(16)(model), [(text, 0, range(32))])[0]


def pool(
    model: DecoderModel,
    *,
    cache_type: PagedCacheType = PagedCacheType.AUTO,
    isa: str | None = None,
    num_threads: int = 1,
) -> NativePagedBackend:
    """As much as :func:`reference_decoding.paged` has."""
    settings = PoolSettings(block_size=16, dtype=model.dtype, device=CPU, cache_type=cache_type)
    return NativePagedBackend(model.config, settings, 64, workspace=workspace(isa, num_threads))


def fused(
    model: DecoderModel, *, few_rows: int = FEW_ROWS, isa: str | None = None, num_threads: int = 1
) -> tuple[FusedDecoderModel, NativePagedBackend]:
    backend = pool(model, isa=isa, num_threads=num_threads)
    assert why_not_fused(model, backend) is None
    return FusedDecoderModel(model, backend, few_rows=few_rows), backend


def in_chunks(
    model: CausalModel,
    backend: NativePagedBackend,
    text: Sequence[int],
    cuts: Sequence[int],
    *,
    num_prompt_tokens: int | None = None,
) -> Tensor:
    """Return a text's logits, computed in parts beside a decode and a chunk of other texts that begin anew each
    time.

    :param num_prompt_tokens: by default, parts of one token count as generated
    """
    lengths = None if num_prompt_tokens is None else {1: num_prompt_tokens}
    table, others = range(20, 40), ([1, 2, 3], [5, 4, 7])
    parts = []
    for first, last in zip((0, *cuts), (*cuts, len(text)), strict=True):
        rows: list[tuple[Sequence[int], int, Sequence[int]]] = [
            (random_prompt(5, seed=first), 0, others[0]),
            (text[first:last], first, table),
            (random_prompt(1, seed=last), 0, others[1]),
        ]
        parts.append(logits(model, backend, rows, num_prompt_tokens=lengths)[1])
    return torch.cat(parts)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def median_error(got: Tensor, expected: Tensor) -> float:
    """Of rows, the median of how far each is off."""
    errors = [relative(row, each) for row, each in zip(got, expected, strict=True)]
    return sorted(errors)[len(errors) // 2]


@pytest.fixture(scope="module", params=FUSED)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    name: str = request.param
    return Checkpoint(tmp_path_factory.mktemp(name), name.partition("-")[0], **FUSED[name])


@pytest.fixture
def llama(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path, "llama")


@pytest.mark.parametrize("length", [1, 7, FEW_ROWS])
def test_few_tokens(checkpoint: Checkpoint, length: int) -> None:
    # What one token alone is off by varies: the mean of several tells more.
    prompts = [random_prompt(length, seed=seed) for seed in range(4 if length == 1 else 1)]
    check_packed_arithmetic(checkpoint, checkpoint.packed(), prompts)


def test_many_tokens_on_packed_weights_alone(checkpoint: Checkpoint) -> None:
    """More than a window of 32."""
    check_packed_arithmetic(checkpoint, checkpoint.packed(one_form=True), [random_prompt(64)])


def test_where_embeddings_are_looked_up_changes_no_bit(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the layers' call, or before it, as for steps with images or with adapters that change embeddings."""
    text, found = random_prompt(30), []
    for is_native in (True, False):
        if not is_native:
            monkeypatch.setattr(NativeEmbedding, "native_weight", None)
        model, backend = fused(checkpoint.packed(dtype=torch.bfloat16))
        found.append(logits(model, backend, [(text, 0, range(9, 14))]))
    assert torch.equal(*map(torch.cat, found))


def check_packed_arithmetic(checkpoint: Checkpoint, packed: DecoderModel, prompts: Sequence[Sequence[int]]) -> None:
    model, backend = fused(packed)
    errors = []
    for prompt in prompts:
        (own,) = logits(model, backend, [(prompt, 0, range(9, 14))], num_prompt_tokens=GENERATED)
        (one_by_one,) = logits(packed, pool(packed), [(prompt, 0, range(9, 14))], num_prompt_tokens=GENERATED)
        # The same arithmetic, but for sums in another order: now and then an activation is rounded to the next code,
        # and later tokens see it.
        assert median_error(own, one_by_one) < MEDIAN_LIMIT
        assert relative(own, one_by_one) < 2e-2
        errors.append(checkpoint.error(own, prompt))
    assert sum(errors) / len(errors) < FEW_ERROR


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("length", [1, 40])
def test_the_same_experts_are_chosen(family: str, length: int, tmp_path: Path) -> None:
    """A few of them, as the model says; by most tokens exactly those, as two may be nearly as likely."""
    packed = Checkpoint(tmp_path, family).packed(one_form=True)
    model, backend = fused(packed)
    prompt = random_prompt(length)
    (own,) = logits(model, backend, [(prompt, 0, range(9, 14))])
    (one_by_one,) = logits(packed, pool(packed), [(prompt, 0, range(9, 14))])
    assert median_error(own, one_by_one) < MEDIAN_LIMIT


@pytest.mark.parametrize("length", [1, FEW_ROWS + 1, 200])
def test_tokens_of_a_prompt(checkpoint: Checkpoint, length: int) -> None:
    packed = checkpoint.packed()
    model, backend = fused(packed)
    prompt = random_prompt(length)
    prompts = {0: length}
    (own,) = logits(model, backend, [(prompt, 0, range(9, 24))], num_prompt_tokens=prompts)
    (one_by_one,) = logits(packed, pool(packed), [(prompt, 0, range(9, 24))], num_prompt_tokens=prompts)
    assert checkpoint.error(own, prompt) < MANY_ERROR
    # As above; with one scale per row, a code's step is larger.
    assert relative(own, one_by_one) < ROW_SCALE_LIMIT


def test_chunks_and_decodes_of_a_mixed_batch(checkpoint: Checkpoint) -> None:
    model, backend = fused(checkpoint.packed())
    text = random_prompt(170)
    got = in_chunks(model, backend, text, (40, 41, 150, 151, 152))
    assert checkpoint.error(got, text) < MANY_ERROR


@pytest.mark.parametrize("num_prompt_tokens", [0, 45, 90])
def test_a_token_depends_on_neither_batch_nor_chunks_nor_threads(
    checkpoint: Checkpoint, num_prompt_tokens: int
) -> None:
    """Generated tokens - all, half or none of the text - come one by one, or many at once after a preemption."""
    packed = checkpoint.packed()
    model, backend = fused(packed)
    text = random_prompt(90)
    lengths = {0: num_prompt_tokens}
    alone = torch.cat(
        [
            logits(model, backend, [([token], i, range(50, 60))], num_prompt_tokens=lengths)[0]
            for i, token in enumerate(text)
        ]
    )
    for cuts in ((30, 88), (1, 2, 58), (57, 58)):
        assert torch.equal(in_chunks(model, backend, text, cuts, num_prompt_tokens=num_prompt_tokens), alone)
    shared, others = fused(packed, num_threads=2)
    got = in_chunks(shared, others, text, (30, 60, 61, 62), num_prompt_tokens=num_prompt_tokens)
    assert torch.equal(got, alone)


@pytest.mark.parametrize("one_form", [False, True])
def test_tokens_whose_logits_are_asked_for_are_computed_as_all_are(checkpoint: Checkpoint, *, one_form: bool) -> None:
    """Bit for bit, as are the next step's: of a prompt's first chunk, its end with generated tokens, and drafts."""
    model, backend = fused(checkpoint.packed(one_form=one_form), num_threads=2)
    counts, num_prompt_tokens, num_logits = [40, 25, 4], (60, 12, 0), (0, 15, 2)
    tables = [range(10 * i, 10 * i + 4) for i in range(3)]
    rows = [
        span(0, count, table, num_prompt_tokens=num_prompt)
        for count, table, num_prompt in zip(counts, tables, num_prompt_tokens, strict=True)
    ]
    fewer = [attrs.evolve(row, num_logits=count) for row, count in zip(rows, num_logits, strict=True)]
    tokens = torch.tensor(random_prompt(sum(counts)))
    positions = torch.cat([torch.arange(count) for count in counts])
    next_step = [([1, 2, 3], count, table) for count, table in zip(counts, tables, strict=True)]

    def run(rows: Sequence[StepRow]) -> tuple[list[Tensor], list[Tensor]]:
        hidden = model.forward(tokens, positions, StepContext(attention=backend.prepare(rows)))
        return list(torch.split(hidden, counts)), logits(model, backend, next_step)

    (whole, after_whole), (some, after_some) = run(rows), run(fewer)
    for expected, got, count in zip(whole, some, num_logits, strict=True):
        assert torch.equal(got[len(got) - count :], expected[len(expected) - count :])
    assert not torch.equal(some[0], whole[0])
    assert all(map(torch.equal, after_some, after_whole))


@pytest.mark.parametrize("num_sequences", [FEW_ROWS, FEW_ROWS + 1])
def test_the_number_of_sequences_that_generate_chooses_their_form(llama: Checkpoint, num_sequences: int) -> None:
    packed = llama.packed()
    model, backend = fused(packed)
    few, other_backend = fused(packed, few_rows=MANY)
    rows = [(random_prompt(1, seed=i), 0, [i]) for i in range(num_sequences)]
    prompt = (random_prompt(20), 0, range(40, 42))
    expected = torch.cat(logits(few, other_backend, [*rows, prompt]))
    got = torch.cat(logits(model, backend, [*rows, prompt]))
    assert torch.equal(got[num_sequences:], expected[num_sequences:])
    assert torch.equal(got[:num_sequences], expected[:num_sequences]) == (num_sequences <= FEW_ROWS)


@every_level
def test_every_instruction_set(checkpoint: Checkpoint, isa: str) -> None:
    """Few rows, then many, then one, by two threads; the first tokens are a prompt, then there are generated ones."""
    model, backend = fused(checkpoint.packed(), isa=isa, num_threads=2)
    text = random_prompt(50)
    parts = [
        logits(model, backend, [(text[first:last], first, range(9, 14))], num_prompt_tokens={0: 30})[0]
        for first, last in ((0, 2), (2, 10), (10, 49), (49, 50))
    ]
    assert checkpoint.error(torch.cat(parts), text) < MANY_ERROR


def test_with_one_form_a_row_does_not_depend_on_its_batch(checkpoint: Checkpoint) -> None:
    model, backend = fused(checkpoint.packed(one_form=True))
    text = random_prompt(170)
    (at_once,) = logits(model, backend, [(text, 0, range(50, 62))])
    assert checkpoint.error(at_once, text) < FEW_ERROR
    assert torch.equal(in_chunks(model, backend, text, (80, 168, 169)), at_once)


@pytest.mark.thinned("quantization", "name", of=1)
@pytest.mark.parametrize("quantization", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("name", FUSED)
def test_every_family_in_other_types_of_blocks(name: str, quantization: str, tmp_path: Path) -> None:
    """Few rows, then many, as the layers one by one compute them."""
    checkpoint = Checkpoint(tmp_path, name.partition("-")[0], quantization=quantization, **FUSED[name])
    packed = checkpoint.packed()
    model, backend = fused(packed)
    text = random_prompt(60)
    few, many = (text[:FEW_ROWS], 0, range(9, 14)), (text[FEW_ROWS:], FEW_ROWS, range(9, 14))
    (own,) = logits(model, backend, [few], num_prompt_tokens=GENERATED)
    (one_by_one,) = logits(packed, pool(packed), [few], num_prompt_tokens=GENERATED)
    assert median_error(own, one_by_one) < MEDIAN_LIMIT
    (rest,) = logits(model, backend, [many])
    assert checkpoint.error(torch.cat((own, rest)), text) < MANY_ERROR


def test_tied_embeddings_and_long_heads(tmp_path: Path) -> None:
    checkpoint = Checkpoint(
        tmp_path, "qwen2", tie_word_embeddings=True, hidden_size=96, intermediate_size=160, head_dim=32
    )
    model, backend = fused(checkpoint.packed())
    text = random_prompt(140)
    assert checkpoint.error(in_chunks(model, backend, text, (20, 50, 51)), text) < MANY_ERROR


def test_bfloat16_between_the_layers_is_float32(llama: Checkpoint) -> None:
    """The model's dtype is that of embeddings, norms, keys and values only, so little is lost to it."""
    packed = llama.packed(one_form=True, dtype=torch.bfloat16)
    model, backend = fused(packed)
    text = random_prompt(60)
    (own,) = logits(model, backend, [(text, 0, range(4))])
    (one_by_one,) = logits(packed, pool(packed), [(text, 0, range(4))])
    assert own.dtype == torch.float32
    assert llama.error(own, text) < min(FEW_ERROR, llama.error(one_by_one, text))


@pytest.mark.parametrize("length", [60, 120])
def test_f8e4m3_keys_and_values(checkpoint: Checkpoint, length: int) -> None:
    """3 % of each layer's attention: as far from the exact cache as torch's backend is."""
    text = random_prompt(length)
    model = checkpoint.packed()
    backend = pool(model, cache_type=PagedCacheType.F8E4M3)
    runner = FusedDecoderModel(model, backend)
    (own,) = logits(runner, backend, [(text, 0, range(8))], num_prompt_tokens=GENERATED)
    (dense,) = logits(checkpoint.dense, paged(16, PagedCacheType.F8E4M3)(checkpoint.dense), [(text, 0, range(8))])
    assert checkpoint.error(own, text) < checkpoint.error(dense, text) + MANY_ERROR
    assert checkpoint.error(own, text) > checkpoint.error(dense, text) / 2


class Unpackable(GgufSource):
    """A file of a type that has no packed form: float32, as blocks."""

    def matrix(self, name: str) -> StoredMatrix:
        matrix = super().matrix(name)
        return matrix if matrix.is_dense else BlockMatrix(0, matrix.decoded().view(torch.uint8))


def test_weights_that_cannot_be_packed_are_fused(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "qwen2")
    checkpoint.source = Unpackable(tmp_path / "tiny-qwen2.Q8_0.gguf")
    model, backend = fused(checkpoint.packed())
    text = random_prompt(140)
    (at_once,) = logits(model, backend, [(text, 0, range(50, 62))], num_prompt_tokens={0: 140})
    assert checkpoint.error(at_once, text) < MANY_ERROR
    assert torch.equal(in_chunks(model, backend, text, (20, 50, 51), num_prompt_tokens=140), at_once)


class PlainExperts(GgufSource):
    """A file whose experts are not quantized."""

    def matrix(self, name: str) -> StoredMatrix:
        matrix = super().matrix(name)
        return DenseMatrix(matrix.decoded()) if ".experts." in name else matrix


class PlainHead(GgufSource):
    """A file whose embeddings and output projection are not quantized, as some are for quality's sake."""

    def matrix(self, name: str) -> StoredMatrix:
        matrix = super().matrix(name)
        return DenseMatrix(matrix.decoded()) if name in ("lm_head.weight", "model.embed_tokens.weight") else matrix


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_output_projection_of_plain_numbers(dtype: torch.dtype, tmp_path: Path, *, tied: bool) -> None:
    checkpoint = Checkpoint(tmp_path, "llama", tie_word_embeddings=tied)
    checkpoint.source = PlainHead(tmp_path / "tiny-llama.Q8_0.gguf")
    model, backend = fused(checkpoint.packed(dtype=dtype))
    text = random_prompt(20)
    (own,) = logits(model, backend, [(text, 0, range(2))], num_prompt_tokens=GENERATED)
    assert own.dtype == torch.float32
    assert checkpoint.error(own, text) < FEW_ERROR


@pytest.mark.parametrize("num_prompt_tokens", [0, 20])
def test_a_token_that_is_not_finite_hurts_no_other_sequence(
    llama: Checkpoint, num_prompt_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NativeEmbedding, "native_weight", None)  # the embeddings are looked up here
    model = llama.packed()
    runner, backend = fused(model)
    texts = [(random_prompt(20, seed=i), 0, range(4 * i, 4 * i + 4)) for i in range(3)]
    lengths = dict.fromkeys(range(3), num_prompt_tokens)
    clean = logits(runner, backend, texts, num_prompt_tokens=lengths)
    embed = model.embedding.in_float32
    broken = len(texts[0][0]) + 3

    def spoiled(token_ids: Tensor) -> Tensor:
        rows = embed(token_ids)
        rows[broken] = torch.inf
        return rows

    model.embedding.in_float32 = spoiled  # type: ignore[method-assign]
    got = logits(runner, backend, texts, num_prompt_tokens=lengths)
    assert torch.equal(got[0], clean[0])
    assert torch.equal(got[2], clean[2])
    assert got[1][3:].isnan().all()


def test_why_layers_cannot_be_fused(llama: Checkpoint, tmp_path: Path) -> None:
    model = llama.packed()
    assert why_not_fused(model, paged(16)(model)) == "its attention is not native"
    assert why_not_fused(llama.dense, pool(llama.dense)) == "its weights have no native kernel"
    rotated = llama.load(WeightPolicy(keep_blocks=True))
    assert why_not_fused(rotated, pool(rotated)) == "its weights have no native kernel"
    mixture = Checkpoint(tmp_path, "mixtral")
    model = mixture.packed()
    plain = [layer.mlp.experts for layer in mixture.dense.layers if isinstance(layer.mlp, MoeMlp)]
    for layer, experts in zip(model.layers, plain, strict=True):
        assert isinstance(layer.mlp, MoeMlp)
        layer.mlp.experts = experts
    assert why_not_fused(model, pool(model)) == "its experts have no native kernel"


def test_experts_of_plain_numbers_beside_quantized_layers(tmp_path: Path) -> None:
    mixture = Checkpoint(tmp_path, "mixtral", **FUSED["mixtral"])
    mixture.source = PlainExperts(tmp_path / "tiny-mixtral.Q8_0.gguf")
    runner, backend = fused(mixture.packed())
    text = random_prompt(60)
    assert mixture.error(in_chunks(runner, backend, text, (20, 21)), text) < MANY_ERROR


@frozen(kw_only=True)
class NewerConfig(DecoderConfig):
    """What :class:`DecoderConfig` may be one day, before the native decoder learns of it."""

    memory_tokens_are_kept: bool = False


@frozen(kw_only=True)
class NewerRope(RopeConfig):
    is_interleaved: bool = False


@frozen(kw_only=True)
class NewerMoe(MoeConfig):
    num_shared_experts: int


def as_kind(kind: type, instance: Any, **changes: Any) -> Any:
    """Return the same values as another class."""
    return kind(**attrs.asdict(instance, recurse=False) | changes)


def test_what_the_fused_layers_do_not_know_is_never_fused(llama: Checkpoint) -> None:
    """A new setting refuses every model that sets it, and a new kind of layer every model that has it."""
    model = llama.packed()
    backend = pool(model)

    def why_not(config: DecoderConfig) -> str | None:
        model.config = config
        return why_not_fused(model, backend)

    known = model.config
    assert why_not(as_kind(NewerConfig, known)) is None
    unknown = "the native decoder does not know"
    assert (
        why_not(as_kind(NewerConfig, known, memory_tokens_are_kept=True)) == f"{unknown} memory_tokens_are_kept = True"
    )
    for turned, reason in ((False, None), (True, f"{unknown} is_interleaved = True")):
        rope = as_kind(NewerRope, known.ropes[0], is_interleaved=turned)
        assert why_not(attrs.evolve(known, ropes=(*known.ropes[1:], rope))) == reason
    most = backend.native_pages.workspace.library.max_interleaved
    for rotary_dim, reason in ((most, None), (most + 2, f"{unknown} pairs of neighbours in more than {most} elements")):
        rope = attrs.evolve(known.ropes[0], interleaved=True, rotary_dim=rotary_dim)
        found = why_not(attrs.evolve(known, ropes=(rope, *known.ropes[1:])))
        assert (found is None) if reason is None else (found or "").startswith(reason)
    # A field without a default is one that every model sets.
    moe = NewerMoe(
        layers=frozenset(), num_experts=4, num_experts_per_token=2, intermediate_size=32, renormalize=True,
        num_shared_experts=0,
    )  # fmt: skip
    assert why_not(attrs.evolve(known, moe=moe)) == f"{unknown} num_shared_experts = 0"
    assert why_not(known) is None

    layer = model.layers[1]
    parts: list[Any] = [model, layer, layer.attention, layer.mlp, layer.mlp_norm, model.norm, *model.ropes.values()]
    for part in parts:
        kind = type(part)
        part.__class__ = type(f"Newer{kind.__name__}", (kind,), {})
        assert why_not_fused(model, backend) == f"the native decoder has no Newer{kind.__name__}"
        part.__class__ = kind
    assert why_not_fused(model, backend) is None
