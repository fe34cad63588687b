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
    before = {f"m, paged, alone, {i}": Text(f"m, paged, alone, {i}", [1, 2, 3], [0.5, 0.25, 0.125]) for i in range(4)}
    after = {key: evolve(text, token_ids=[1, 9, 3]) if key.endswith("1") else text for key, text in before.items()}
    after["m, paged, alone, 2"] = evolve(before["m, paged, alone, 2"], token_ids=[1, 2, 4])
    after["m, FP8, alone, 0"] = after.pop("m, paged, alone, 0")
    said: list[str] = []
    assert compare(before, after, said.append) == 2
    assert said == [
        "m, paged, alone: 2 of 3 differ, from token 1 on, where the first leads by at most 0.2500",
        "m, FP8, alone: 1 only on one side",
        "m, paged, alone: 1 only on one side",
        "2 of 3 texts differ",
    ]
    assert compare(before, before, said.append) == 0
