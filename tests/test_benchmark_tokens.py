"""Greedy tokens that are kept, to be compared with those of another version."""

from __future__ import annotations

import asyncio

from attrs import evolve
from benchmarks.greedy_tokens import NUM_TOKENS, Case, Text, compare, generate

from paged_sdk import TextModelBuilder


def test_texts_are_kept_for_every_way_of_keeping_kv(builder: TextModelBuilder) -> None:
    case = Case("tiny", builder, [[5, 6, 7], [9, 8]], 1)
    texts = {text.key: text for text in asyncio.run(generate(case))}
    # Weights that are not quantized are refused by batch invariance.
    modes = {key.split(", ")[1] for key in texts}
    assert {"paged", "FP8", "contiguous"} <= modes
    assert len(texts) == 3 * len(modes)
    alone = texts["tiny, paged, alone, 0"]
    assert len(alone.token_ids) == len(alone.leads) == NUM_TOKENS
    assert min(alone.leads) >= 0
    assert (
        alone.token_ids == texts["tiny, contiguous, alone, 0"].token_ids == texts["tiny, paged, together, 0"].token_ids
    )


def test_differences_are_said() -> None:
    before = {key: Text(key, [1, 2, 3], [0.5, 0.25, 0.125]) for key in "abc"}
    after = {"a": before["a"], "b": evolve(before["b"], token_ids=[1, 9, 3]), "d": before["c"]}
    said: list[str] = []
    assert compare(before, after, said.append) == 1
    assert said == [
        "b: differs from token 1 on, where the first leads by 0.2500",
        "c: only before",
        "d: only after",
        "1 of 2 texts differ",
    ]
    assert compare(before, before, said.append) == 0
