"""Tokens that are proposed to constraints are drawn from the distribution that the mask would have left."""

from __future__ import annotations

import random
from typing import Final

import numpy as np
import pytest
import torch
from attrs import evolve
from rows import make_grammar, make_request, make_row

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.kernels.sampling import NOT_DRAWN
from paged_sdk.sampling.constraint import Constraints
from paged_sdk.sampling.processors import default_processors
from paged_sdk.sampling.proposals import Proposals
from paged_sdk.sampling.sampler import Sampler
from paged_sdk.types.constraint import Constraint

pytestmark = pytest.mark.usefixtures("every_draw")

TOKENS: Final = [bytes([65 + each]) for each in range(26)]
TOKENS[2] = b""
ALLOWED: Final = [3, 5, 7, 8, 9, 20, 21, 25]
GRAMMAR: Final = make_grammar(Constraint.regex("[DFHIJUVZ]{9}"), TOKENS)
NUM_TEXTS: Final = 3_000
NUM_PLACES: Final = 30

SETTINGS: Final = {
    "temperature": SamplingParams(temperature=0.8),
    "hot": SamplingParams(temperature=3.0),
    "top-p": SamplingParams(temperature=1.0, top_p=0.7),
    "small top-p": SamplingParams(temperature=1.5, top_p=0.2),
    "min-p": SamplingParams(temperature=1.0, min_p=0.15),
    # Nothing in float32, but banned tokens are less likely.
    "smallest min-p": SamplingParams(temperature=1.0, min_p=1e-50),
    "top-k": SamplingParams(temperature=1.0, top_k=4),
    "all of them": SamplingParams(temperature=1.3, top_k=20, top_p=0.8, min_p=0.05),
    "top-p and min-p": SamplingParams(temperature=1.3, top_p=0.9, min_p=0.1),
    # So near to 1 that all that is allowed does not reach it, as sums are rounded.
    "top-p of nearly all": SamplingParams(temperature=1.0, top_p=1 - 1e-9),
}
PLACES: Final = {
    "likely": {3: 3.0, 5: 2.5, 7: 2.0, 11: 1.0, 8: 1.0, 20: 0.5},
    "between others": {3: 2.0, 11: 2.5, 5: 1.5, 12: 1.0, 7: 1.0, 13: 3.0, 21: 1.0},
    "unlikely": {11: 6.0, 12: 5.0, 13: 4.0, 3: 1.0, 25: 0.5},
}


def make_sampler(*, prepare_all_masks: bool) -> Sampler:
    vocab_size = len(TOKENS)
    return Sampler(
        vocab_size,
        torch.device("cpu"),
        default_processors(vocab_size, lambda text: [], prepare_all_masks=prepare_all_masks),
    )


def expected(logits: torch.Tensor, params: SamplingParams) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Mask, then cut, as it is written down: without any shortcut."""
    order = sorted(ALLOWED, key=lambda token: (-float(logits[token]), token))[: params.top_k]
    assert params.temperature is not None
    weights = np.exp(np.array([float(logits[token]) for token in order]) / params.temperature)
    weights /= weights.sum()
    before = weights.cumsum() - weights
    weights[(before >= (params.top_p or 1.0)) | (weights < (params.min_p or 0.0) * weights[0])] = 0
    chances = np.zeros(len(TOKENS))
    chances[order] = weights / weights.sum()
    return chances


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SETTINGS)
def test_distribution_is_that_of_masked_logits(name: str, place: str) -> None:
    logits = torch.full((len(TOKENS),), -1.0)
    for token, value in PLACES[place].items():
        logits[token] = value
    request = evolve(make_request(evolve(SETTINGS[name], seed=11)), grammar=GRAMMAR)
    sampler = make_sampler(prepare_all_masks=False)
    row = make_row(request, num_samples=NUM_TEXTS)
    sampled = sampler.sample(logits[None].clone(), sampler.prepare([row])).token_ids[0]
    counts, chances = np.bincount(sampled, minlength=len(TOKENS)), expected(logits, SETTINGS[name])
    assert len(sampled) == NUM_TEXTS
    assert not counts[chances == 0].any()
    kept = chances > 0
    if kept.sum() > 1:
        chi_square = ((counts[kept] - chances[kept] * NUM_TEXTS) ** 2 / (chances[kept] * NUM_TEXTS)).sum()
        # One of 100,000 is larger (Wilson and Hilferty's approximation).
        freedom = kept.sum() - 1
        assert chi_square < freedom * (1 - 2 / (9 * freedom) + 4.26 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_do_not_depend_on_when_a_mask_is_made(name: str) -> None:
    rng = random.Random(name)
    samplers = [make_sampler(prepare_all_masks=prepare_all_masks) for prepare_all_masks in (True, False)]
    fills = [0, 0]
    for which, sampler in enumerate(samplers):
        constraints = sampler._processors[-1]
        assert isinstance(constraints, Constraints)
        fill = constraints._filler.fill

        def counted(positions, fill=fill, which=which):  # type: ignore[no-untyped-def]
            fills[which] += sum(each.num for each in positions)
            return fill(positions)

        constraints._filler.fill = counted  # type: ignore[method-assign]
    for text in range(NUM_PLACES):
        params = evolve(SETTINGS[name], seed=rng.randrange(100))
        request = evolve(make_request(params), grammar=GRAMMAR)
        output = [rng.choice(ALLOWED) for _ in range(rng.randrange(8))]
        rows = [make_row(request, output, seq_id=text)]
        alone = torch.randn(1, len(TOKENS), generator=torch.Generator().manual_seed(text)) * 2
        found = [each.sample(alone.clone(), each.prepare(rows)).token_ids for each in samplers]
        # Drafts have masks of all their positions made at once.
        drafted = make_row(request, [*output, rng.choice(ALLOWED)], seq_id=text)
        sampler = make_sampler(prepare_all_masks=False)
        both = sampler.sample(alone.repeat(2, 1), sampler.prepare([*rows, drafted])).token_ids
        assert found[0] == found[1] == both[:1]
    assert fills[0] == NUM_PLACES
    assert fills[1] < NUM_PLACES or SETTINGS[name].top_k is not None


def test_the_likeliest_tokens_are_asked_for_one_after_the_other() -> None:
    logits = torch.zeros(len(TOKENS))
    for rank, token in enumerate([11, 12, 13, 7, 3]):
        logits[token] = 9.0 - rank
    request = evolve(make_request(SamplingParams(temperature=0.0, seed=0)), grammar=GRAMMAR)
    sampler = make_sampler(prepare_all_masks=False)
    constraints = sampler._processors[-1]
    assert isinstance(constraints, Constraints)
    prepared = sampler.prepare([make_row(request)])
    assert sampler.sample(logits[None].clone(), prepared).token_ids == [[7]]
    assert [change.mask for _, change in prepared.changes[-1]] == [None]
    # Where all that is left ties, the mask says which is the first that is allowed.
    logits[[7, 3]] = 0
    prepared = sampler.prepare([make_row(request)])
    assert sampler.sample(logits[None].clone(), prepared).token_ids == [[3]]
    assert [change.mask for _, change in prepared.changes[-1]] != [None]


def test_nothing_is_proposed_to_a_row_without_a_finite_maximum() -> None:
    """Its likeliest token is NOT_DRAWN, which is not an index."""
    request = evolve(make_request(SamplingParams(temperature=0.0, seed=0)), grammar=GRAMMAR)
    sampler = make_sampler(prepare_all_masks=False)
    rows = [make_row(request)]
    changes = sampler.prepare(rows).changes[-1]
    logits = torch.arange(len(TOKENS), dtype=torch.float32)[None]
    logits[0, 11] = torch.inf
    for known in ({}, {0: NOT_DRAWN}):
        assert not Proposals(logits, rows, sampler._processors[-1], changes, sampler._token_draw, known).taken
