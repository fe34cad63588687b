"""Every family generates what transformers generates, in float32, however its KV is kept and its prompt is cut."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from reference_decoding import contiguous, greedy, logits, ours, paged, random_prompt, reference_greedy
from transformers import PreTrainedModel

from paged_sdk.models.decoder import DecoderModel
from tiny import FAMILIES, build_model

NUM_TOKENS = 8
PROMPT_LENGTHS = (1, 31, 32, 33, 200)


@functools.cache
def models(family: str) -> tuple[PreTrainedModel, DecoderModel]:
    reference: Any = build_model(family)
    reference.set_attn_implementation("eager")  # the one that knows softcaps
    return reference, ours(reference)


@functools.cache
def expected(family: str, length: int) -> list[int]:
    return reference_greedy(models(family)[0], random_prompt(length), NUM_TOKENS)


@pytest.mark.thinned("family", "length", "block_size")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", PROMPT_LENGTHS)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_paged_at_once(family: str, length: int, block_size: int) -> None:
    model = models(family)[1]
    assert greedy(model, paged(block_size), random_prompt(length), NUM_TOKENS) == expected(family, length)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_contiguous_and_chunked(family: str, length: int) -> None:
    model = models(family)[1]
    prompt = random_prompt(length)
    assert greedy(model, contiguous, prompt, NUM_TOKENS, chunk=48) == expected(family, length)
    assert greedy(model, paged(16), prompt, NUM_TOKENS, chunk=29) == expected(family, length)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str) -> None:
    reference, model = models(family)
    prompt = random_prompt(200)
    with torch.inference_mode():
        scores = reference(torch.tensor([prompt])).logits[0]
    (own,) = logits(model, paged(16)(model), [(prompt, 0, list(range(31, 0, -1)))])
    assert (own - scores).abs().max() < 1e-4 * scores.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_is_exact_for_any_chunks_batch_and_cache(family: str) -> None:
    """Rounding is 1e-15 of the logits: an error of bookkeeping could not hide behind it."""
    model = ours(models(family)[0], dtype=torch.float64)
    prompt = random_prompt(90)
    (whole,) = logits(model, contiguous(model), [(prompt, 0, [0])])
    backend = paged(16)(model)
    table, others = [3, 1, 4, 9, 5, 26, 2], ([7, 10], [11, 12, 13])
    parts = []
    for first, last in ((0, 40), (40, 41), (41, 89), (89, 90)):
        # Beside it a decode and a chunk of other texts, before and after.
        rows = [
            (random_prompt(1, seed=first), first % 30, others[0]),
            (prompt[first:last], first, table),
            (random_prompt(5, seed=first), first % 40, others[1]),
        ]
        parts.append(logits(model, backend, rows)[1])
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-5)  # logits are float32


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_decodes_is_its_rows_alone(family: str) -> None:
    model = models(family)[1]
    prompts = [random_prompt(length, seed=1) for length in (3, 47, 48, 120)]
    tables = [[0], [1, 2, 3], [4, 5, 6], list(range(7, 15))]
    backend = paged(16)(model)
    first = [
        row[-1].argmax()
        for row in logits(model, backend, [(p[:-1], 0, t) for p, t in zip(prompts, tables, strict=True)])
    ]
    assert len(first) == 4
    batch = logits(model, backend, [([p[-1]], len(p) - 1, t) for p, t in zip(prompts, tables, strict=True)])
    for prompt, row in zip(prompts, batch, strict=True):
        (alone,) = logits(model, contiguous(model), [(prompt, 0, [0])])
        assert (row[0] - alone[-1]).abs().max() < 1e-4 * alone.abs().max()
