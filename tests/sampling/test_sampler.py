"""The sampler against naive float64 sampling, transformers' logits processors, and itself in other batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from naive_sampler import naive_distribution, naive_process, naive_uniform
from rows import encode, make_request
from rows import make_row as row
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paged_sdk.config.sampling import DryParams, SamplingParams
from paged_sdk.sampling.native_draw import NativeTokenDraw
from paged_sdk.sampling.processors import default_processors
from paged_sdk.sampling.raw_logprobs import RawLogprobs
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.sampler import SampledRows, Sampler

pytestmark = pytest.mark.usefixtures("every_draw")

CPU = torch.device("cpu")


def make_sampler(vocab_size: int) -> Sampler:
    return Sampler(vocab_size, CPU, default_processors(vocab_size, encode))


def sample_with(sampler: Sampler, logits: torch.Tensor, rows: Sequence[SampleRow]) -> SampledRows:
    return sampler.sample(logits, sampler.prepare(rows))


def sample(logits: npt.ArrayLike, rows: Sequence[SampleRow]) -> list[list[int]]:
    """Sample token ids with a new sampler; logits of one row serve all."""
    table = torch.tensor(
        np.broadcast_to(np.atleast_2d(np.array(logits, np.float32)), (len(rows), np.shape(logits)[-1]))
    )
    return sample_with(make_sampler(table.shape[1]), table, rows).token_ids


GRID = st.integers(-64, 64).map(lambda eighths: eighths / 8)
"""Logits on a grid: ties are frequent and float32 holds them exactly."""


@st.composite
def all_settings(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    def optional(strategy: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | strategy)

    return SamplingParams(
        temperature=optional(st.sampled_from([0.0, 0.25, 0.7, 1.0, 3.0])),
        top_k=optional(st.integers(1, vocab_size + 3)),
        top_p=optional(st.floats(0.01, 1.0)),
        min_p=optional(st.floats(0.0, 1.0)),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5, -0.25])),
        presence_penalty=draw(st.sampled_from([0.0, 1.0, -0.5])),
        repetition_penalty=optional(st.sampled_from([1.0, 0.5, 1.25, 2.0])),
        logits_bias=optional(st.dictionaries(st.integers(0, vocab_size - 1), GRID | st.just(-math.inf), max_size=4)),
        dry_params=optional(
            st.builds(
                DryParams,
                multiplier=st.sampled_from([0.0, 0.5, 1.0]),
                base=st.sampled_from([1.0, 2.0]),
                allowed_length=st.integers(0, 3),
            )
        ),
        min_tokens=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 2**80)),
    )


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_setting_as_in_naive_float64(data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(7, 40))
    logits = data.draw(st.lists(GRID | st.just(-math.inf), min_size=vocab_size, max_size=vocab_size))
    assume(max(logits) > -math.inf)  # the caller has to see to that
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=12)
    params = data.draw(all_settings(vocab_size))
    given_row = row(
        params, prompt=[0, *data.draw(tokens)], output=data.draw(tokens), choice_index=data.draw(st.integers(0, 3))
    )

    scores = naive_process(np.array(logits), given_row, breakers={(3,), (4,), (5,), (6,)})
    chosen = sample(logits, [given_row])[0]
    if scores.max() == -np.inf:
        assert chosen == []
    elif params.is_greedy:
        assert chosen == [int(scores.argmax())]
    else:
        assert params.seed is not None
        distribution = naive_distribution(scores, given_row)
        uniform = naive_uniform(params.seed, given_row.choice_index, given_row.num_output_tokens)
        expected, margin = distribution.draw(uniform)
        assume(min(margin, distribution.margin) > 1e-6)  # float32 may fall to the other side
        assert chosen == [expected]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "min_p": 0.05},
    {"top_k": 5},
    {"top_k": 40, "top_p": 0.8},
    {"top_p": 0.9},
    {"temperature": 2.5, "top_p": 0.99},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "temperature": 1.1},
]


def transformers_probabilities(logits: torch.Tensor, params: SamplingParams, tokens: Sequence[int]) -> torch.Tensor:
    """Return what transformers' processors make of one row, in the documented order."""
    processors: list[Any] = []
    if params.repetition_penalty is not None:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature is not None:
        processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k is not None:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p is not None:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p is not None:
        processors.append(MinPLogitsWarper(params.min_p))
    input_ids: Any = torch.tensor([list(tokens)])
    processed: Any = LogitsProcessorList(processors)(input_ids, logits[None].clone())
    return torch.softmax(processed[0].double(), dim=-1)


@pytest.mark.parametrize("given_settings", SETTINGS)
@pytest.mark.parametrize("vocab_size", [30, 700, 5000])
def test_frequencies_are_those_of_transformers_processors(given_settings: dict[str, Any], vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(vocab_size, generator=generator) * 3
    prompt, output = [1, 2, 3, 4], [4, 5, 6]
    num_rows, num_samples = 40, 100
    rows = [
        row(SamplingParams(seed=seed, **given_settings), prompt=prompt, output=output, num_samples=num_samples)
        for seed in range(num_rows)
    ]
    counts = Counter(token for tokens in sample(logits.numpy(), rows) for token in tokens)

    probabilities = transformers_probabilities(logits, rows[0].request.sampling, prompt + output).numpy()
    assert set(counts) <= set(np.flatnonzero(probabilities).tolist())
    # Chi-square with the unlikely tokens in one bin: mean `bins - 1`, variance twice that.
    expected = probabilities * num_rows * num_samples
    observed = np.array([counts[token] for token in range(vocab_size)])
    likely = expected >= 5
    expected = np.append(expected[likely], expected[~likely].sum())
    observed = np.append(observed[likely], observed[~likely].sum())
    expected, observed = expected[expected > 0], observed[expected > 0]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert statistic < len(expected) - 1 + 5 * math.sqrt(2 * len(expected)) + 5


MIXED: list[SamplingParams] = [
    SamplingParams.deterministic(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, seed=2, min_p=0.02),
    SamplingParams(temperature=2.0, seed=10, top_k=100),
    SamplingParams(seed=3, top_p=0.9),
    SamplingParams(temperature=4.0, seed=4, top_p=0.97),
    SamplingParams(seed=5, top_k=3),
    SamplingParams(seed=6, top_k=300, top_p=0.999),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, top_n_logprobs=3),
    SamplingParams(seed=7, frequency_penalty=0.4, presence_penalty=0.1, logits_bias={9: 4.0}, top_n_logprobs=0),
    SamplingParams(seed=8, dry_params=DryParams(multiplier=2.0, allowed_length=1), min_tokens=5, top_n_logprobs=40),
    SamplingParams(seed=9, temperature=1.3, top_k=50, repetition_penalty=1.1, min_p=0.01),
    SamplingParams.deterministic(),
]


Chosen: TypeAlias = tuple[list[int], list[RawLogprobs] | None]


def generate(
    logits: torch.Tensor, params: Sequence[SamplingParams], batches: Sequence[Sequence[int]]
) -> list[list[Chosen]]:
    """Run several steps of sequences that go through one sampler in the given batches."""
    sampler = make_sampler(logits.shape[-1])
    requests = [make_request(each, [index, 1, 2]) for index, each in enumerate(params)]
    outputs: list[list[Chosen]] = [[] for _ in params]
    for step in logits:
        for batch in batches:
            rows = [
                row(
                    requests[index],
                    [tokens[0] for tokens, _ in outputs[index]],
                    seq_id=10 * index,
                    choice_index=index % 3,
                    num_samples=1 + index % 2,
                )
                for index in batch
            ]
            sampled = sample_with(sampler, step[list(batch)], rows)
            assert not sampled.failed
            for index, tokens, logprobs in zip(batch, sampled.token_ids, sampled.logprobs, strict=True):
                outputs[index].append((tokens, logprobs))
    return outputs


@pytest.mark.parametrize(("vocab_size", "rounding"), [(61, None), (1003, None), (20_000, None), (3000, 4)])
def test_a_row_does_not_depend_on_its_batch(vocab_size: int, rounding: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, len(MIXED), vocab_size, generator=generator) * 4
    if rounding:
        logits = (logits * rounding).round() / rounding  # many ties
    everyone = range(len(MIXED))
    together = generate(logits, MIXED, [everyone])
    assert generate(logits, MIXED, [[index] for index in everyone]) == together
    assert generate(logits, MIXED, [everyone[::2], everyone[1::2]]) == together
    assert all(len(tokens) == 1 + index % 2 for index in everyone for tokens, _ in together[index])


def test_samples_of_one_row_are_those_of_the_choices_alone() -> None:
    logits = np.random.default_rng(0).normal(size=300) * 2
    for given_settings in SETTINGS:
        params = SamplingParams(seed=11, **given_settings)
        together = sample(logits, [row(params, choice_index=2, num_samples=5)])[0]
        alone = sample(logits, [row(params, choice_index=2 + index) for index in range(5)])
        assert [[token] for token in together] == alone
        assert len(set(together)) > 1


def test_seed_choice_and_position_each_change_the_numbers() -> None:
    logits = np.zeros(1000)
    base = sample(logits, [row(SamplingParams(seed=1))])
    assert sample(logits, [row(SamplingParams(seed=1), prompt=(5, 6, 7), seq_id=9)]) == base
    others = [
        row(SamplingParams(seed=2)),
        row(SamplingParams(seed=1), choice_index=1),
        row(SamplingParams(seed=1), output=[3]),
        row(SamplingParams(seed=1 + 2**64)),
    ]
    assert len({tokens[0] for tokens in sample(logits, others)} | {base[0][0]}) == 5


@pytest.mark.parametrize("given_settings", [*SETTINGS, {"temperature": 0.0}, {"temperature": 1e-6, "top_p": 0.5}])
def test_a_single_finite_logit_is_taken(given_settings: dict[str, Any]) -> None:
    for vocab_size in (40, 4000):
        logits = np.full(vocab_size, -np.inf)
        logits[17] = -3.0
        rows = [row(SamplingParams(seed=seed, **given_settings)) for seed in range(5)]
        assert sample(logits, rows) == [[17]] * 5


@pytest.mark.parametrize("vocab_size", [50, 5000])
def test_ties_go_to_the_lowest_ids(vocab_size: int) -> None:
    def drawn(**given_settings: Any) -> set[int]:
        rows = [row(SamplingParams(seed=seed, **given_settings), num_samples=20) for seed in range(10)]
        return {token for tokens in sample(np.zeros(vocab_size), rows) for token in tokens}

    assert drawn(temperature=0.0) == {0}
    assert drawn(top_k=1) == {0}
    assert drawn(top_k=3) == {0, 1, 2}
    assert drawn(top_p=5.5 / vocab_size) == set(range(6))
    assert drawn(top_k=10, top_p=0.41) == set(range(5))
    assert drawn(min_p=1.0, top_k=4) == set(range(4))
    assert len(drawn(min_p=1.0)) > 20


def test_top_p_that_is_reached_exactly_takes_no_more() -> None:
    assert set(sample(np.zeros(8), [row(SamplingParams(seed=0, top_p=0.5), num_samples=100)])[0]) == {0, 1, 2, 3}


@pytest.mark.parametrize("given_settings", [{}, {"top_p": 0.999}, {"min_p": 0.5}])
def test_an_endless_temperature_is_even_but_heeds_bans(given_settings: dict[str, Any]) -> None:
    logits = np.random.default_rng(0).normal(size=1000)
    logits[100:] = -np.inf
    params = SamplingParams(temperature=1e300, seed=0, **given_settings)
    chosen = set(sample(logits, [row(params, num_samples=2000)])[0])
    assert 95 < len(chosen) <= 100
    assert max(chosen) < 100


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    logits = np.zeros(16)
    rows = [row(SamplingParams(seed=3, top_k=top_k), num_samples=300) for top_k in (16, 17, 10**6)]
    unlimited = sample(logits, [row(SamplingParams(seed=3), num_samples=300)])[0]
    assert set(unlimited) == set(range(16))
    assert sample(logits, rows) == [unlimited] * 3


@pytest.mark.parametrize("given_settings", [*SETTINGS, {"temperature": 0.0, "top_n_logprobs": 2}])
def test_a_row_without_a_choice_stays_alone_with_it(given_settings: dict[str, Any]) -> None:
    logits = torch.randn(4, 400, generator=torch.Generator().manual_seed(1))
    rows = [row(SamplingParams(seed=1, **given_settings), seq_id=seq_id) for seq_id in range(4)]
    good = sample_with(make_sampler(400), logits.clone(), rows)
    logits[1, 3] = math.nan
    logits[2] = -math.inf
    sampled = sample_with(make_sampler(400), logits, rows)
    tokens, logprobs = good.token_ids, good.logprobs
    assert sampled.token_ids == [tokens[0], [], [], tokens[3]]
    assert sampled.logprobs == [logprobs[0], None, None, logprobs[3]]
    assert {index: str(error) for index, error in sampled.failed.items()} == dict.fromkeys(
        (1, 2), "request r: the logits hold NaN or Inf"
    )
    assert not good.failed


def test_a_row_whose_every_token_is_banned_fails_alone() -> None:
    bans = SamplingParams(temperature=0.0, logits_bias=dict.fromkeys(range(4), -math.inf))
    sampled = sample_with(make_sampler(4), torch.zeros(2, 4), [row(bans), row(SamplingParams.deterministic())])
    assert sampled.token_ids == [[], [0]]
    assert {index: str(error) for index, error in sampled.failed.items()} == {0: "request r: every token is banned"}


def test_min_tokens_bans_stop_tokens_until_then() -> None:
    logits = np.array([0.0, 1.0, 9.0, 2.0])
    params = SamplingParams(temperature=0.0, min_tokens=2)
    assert sample(logits, [row(params, [0] * length) for length in range(4)]) == [[3], [3], [2], [2]]


def test_ids_beyond_the_vocabulary_are_ignored() -> None:
    params = SamplingParams(temperature=0.0, logits_bias={1: 5.0, 4: 100.0}, min_tokens=1)
    stopping = make_request(params, [0], frozenset({2, 99}))
    assert sample([0.0, 1.0, 3.0, 5.0], [row(stopping)]) == [[1]]


def test_bias_beyond_float32_neither_overflows_nor_bans() -> None:
    params = SamplingParams(temperature=0.0, logits_bias={0: -math.inf, 1: -1e300, 2: 1e300})
    assert sample([9.0, 0.0, 0.0, 5.0], [row(params)]) == [[2]]
    params = SamplingParams(temperature=0.0, logits_bias={0: -math.inf, 1: -1e300})
    assert sample([9.0, 0.0], [row(params)]) == [[1]]
    params = SamplingParams(temperature=0.0, logits_bias={0: 1e300, 1: -1e300}, repetition_penalty=0.01)
    assert sample([9.0] * 16, [row(params, [0, 1])]) == [[0]]


def test_counts_follow_a_sequence_and_start_over_when_it_changes() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.5)
    generator = np.random.default_rng(5)
    sampler = make_sampler(12)
    histories = [[3, 4], [3, 4, 5, 5], [3, 4, 5, 5, 5, 1], [3, 4, 5, 9], [3, 4], [8], [8, 8, 8, 8]]
    requests = [make_request(params, [6, 3]), make_request(params, [3])]
    for index, output in enumerate([*histories * 2, *histories[::-1]]):
        given_row = row(requests[index < 2 * len(histories)], output)
        for _ in range(5):
            logits = generator.normal(size=(1, 12)).astype(np.float32)
            expected = naive_process(logits[0].astype(np.float64), given_row, ()).argmax()
            assert sample_with(sampler, torch.tensor(logits), [given_row]).token_ids == [[expected]]


def test_forgotten_sequences_leave_nothing_behind() -> None:
    sampler = make_sampler(12)
    params = SamplingParams(presence_penalty=1.0, seed=1)
    sample_with(sampler, torch.zeros(3, 12), [row(params, seq_id=seq_id) for seq_id in range(3)])
    sampler.forget([0, 2, 77])
    assert list(sampler._states) == [1]
    if isinstance(sampler._token_draw, NativeTokenDraw):
        assert list(sampler._token_draw._settings) == [1]


def test_another_request_under_the_same_id_is_heeded() -> None:
    sampler = make_sampler(4)
    for token in (1, 3):
        params = SamplingParams(temperature=0.0, logits_bias={token: 1.0})
        assert sample_with(sampler, torch.zeros(1, 4), [row(params, prompt=[0])]).token_ids == [[token]]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2)) * 3
    expected = torch.log_softmax(logits.double(), dim=-1)
    common: dict[str, Any] = {"logits_bias": {4: 50.0}, "presence_penalty": 1.0, "temperature": 0.5}
    rows = [
        row(SamplingParams(seed=1, top_n_logprobs=4, **common)),
        row(SamplingParams(seed=1, **common)),
        row(SamplingParams(seed=1, top_n_logprobs=0, **common), num_samples=2),
    ]
    sampled = sample_with(make_sampler(500), logits.clone(), rows)
    assert sampled.token_ids == [[4], [4], [4, 4]]
    assert sampled.logprobs[1] is None
    for index, length in ((0, 4), (2, 0)):
        entries = sampled.logprobs[index]
        assert entries is not None
        entry = entries[0]
        assert entries == [entry] * rows[index].num_samples
        assert entry.token_id == 4
        assert entry.logprob == pytest.approx(float(expected[index, 4]), abs=1e-5)
        top = expected[index].topk(length)
        assert [token for token, _ in entry.top] == top.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_no_rows_are_no_work() -> None:
    assert sample_with(make_sampler(5), torch.empty(0, 5), []) == SampledRows([], [])


def test_positions_of_one_text_are_those_of_steps_of_their_own() -> None:
    """As where drafts are verified: rows with ever more drafts, of which some are taken back afterwards."""
    params = SamplingParams(seed=4, frequency_penalty=0.7, repetition_penalty=1.2, min_tokens=3, top_n_logprobs=1)
    request, logits = make_request(params, [7, 8, 7]), torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    drafts, sampler = [5, 5, 9], make_sampler(12)
    output: list[int] = []
    for _ in range(4):
        rows = [row(request, [*output, *drafts[:depth]]) for depth in range(4)]
        together = sample_with(sampler, logits.clone(), rows)
        for depth, one in enumerate(rows):
            alone = sample_with(make_sampler(12), logits[depth : depth + 1].clone(), [one])
            assert (together.token_ids[depth], together.logprobs[depth]) == (alone.token_ids[0], alone.logprobs[0])
        output.append(together.token_ids[0][0])
