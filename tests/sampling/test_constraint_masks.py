"""Masks are made only where they are needed, and change no choice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import pytest
import torch
from attrs import evolve
from rows import make_grammar, make_request, make_row

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.constraints.masks import Mask, MaskFiller, Positions
from paged_sdk.errors import ConstraintError
from paged_sdk.sampling.constraint import Constraints
from paged_sdk.sampling.processors import default_processors
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.sampler import Sampler
from paged_sdk.types.constraint import Constraint

TOKENS: Final = [bytes([65 + each]) for each in range(26)] + [
    b"AB",
    b"ABC",
    b"BC",
    b"{",
    b"}",
    b'"',
    b'{"',
    b"K",
    b":1",
]
TOKENS[2] = b""
CONSTRAINTS: Final = (
    Constraint.regex("(ABC|ABD|X)*Y"),
    Constraint.regex("[A-H]{1,4}(K|ABCDE)"),
    Constraint.json_schema({"type": "object", "properties": {"K": {"const": 1}}, "required": ["K"]}),
)


class Counted(MaskFiller):
    """Counts the positions of which masks are made."""

    num = 0

    def fill(self, positions: Sequence[Positions]) -> list[Mask | str]:
        self.num += sum(each.num for each in positions)
        return super().fill(positions)


def sampled(sampler: Sampler, rows: Sequence[SampleRow], seed: int) -> list[list[int]]:
    logits = torch.randn(len(rows), len(TOKENS), generator=torch.Generator().manual_seed(seed))
    return sampler.sample(logits, sampler.prepare(rows)).token_ids


@pytest.mark.parametrize("place", range(len(CONSTRAINTS)))
def test_a_token_that_is_allowed_needs_no_mask_and_none_is_chosen_otherwise(place: int) -> None:
    grammar = make_grammar(CONSTRAINTS[place], TOKENS)
    settings = [SamplingParams(temperature=0.0, seed=0), SamplingParams(top_k=1, temperature=2.0, seed=1)]
    requests = [evolve(make_request(params), grammar=grammar) for params in settings]
    samplers = [
        Sampler(
            len(TOKENS),
            torch.device("cpu"),
            default_processors(len(TOKENS), lambda text: [], prepare_all_masks=prepare_all_masks),
        )
        for prepare_all_masks in (True, False)
    ]
    counts = []
    for sampler in samplers:
        constraints = sampler._processors[-1]
        assert isinstance(constraints, Constraints)
        constraints._filler = Counted(len(TOKENS))
        counts.append(constraints._filler)
    rng = random.Random(place)
    num_chosen = 0
    for text in range(40):
        outputs: list[list[int]] = [[], []]
        for _ in range(8):
            rows = [
                make_row(request, output, seq_id=2 * text + number)
                for number, (request, output) in enumerate(zip(requests, outputs, strict=True))
            ]
            seed = rng.randrange(1 << 30)
            made, asked = (sampled(sampler, rows, seed) for sampler in samplers)
            assert made == asked
            num_chosen += len(made)
            if [] in made or [2] in made:  # a dead end, or the end
                break
            for output, tokens in zip(outputs, made, strict=True):
                output += tokens
    assert num_chosen == counts[0].num
    assert 0 < counts[1].num < counts[0].num


@pytest.mark.parametrize("prepare_all_masks", [True, False])
def test_a_stop_token_ends_no_text_in_the_middle_of_its_sentence(*, prepare_all_masks: bool) -> None:
    """Neither where it is the only one that may follow, and so needs no logits."""
    stop = TOKENS.index(b"H")
    params = SamplingParams(temperature=0.0, seed=0, stop_token_ids=(stop,))
    request = make_request(params, stop_token_ids=frozenset({2, stop}))
    request = evolve(request, grammar=make_grammar(Constraint.regex("DFHJ"), TOKENS))
    sampler = Sampler(
        len(TOKENS),
        torch.device("cpu"),
        default_processors(len(TOKENS), lambda text: [], prepare_all_masks=prepare_all_masks),
    )
    output: list[int] = []
    for _ in range(2):
        output += sampled(sampler, [make_row(request, output)], seed=0)[0]
    assert [TOKENS[token] for token in output] == [b"D", b"F"]
    result = sampler.sample(torch.zeros(1, len(TOKENS)), sampler.prepare([make_row(request, output)]))
    assert isinstance(result.failed[0], ConstraintError)
