"""A block that is found holds what was computed of the same tokens, images, adapter and salt."""

from __future__ import annotations

import random
from typing import Final, TypeAlias

import pytest

from paged_sdk.kv.block_hash import CacheKey
from paged_sdk.kv.manager import KvTable
from paged_sdk.kv.paged import KvCacheManager

BLOCK: Final = 4
Content: TypeAlias = tuple[tuple[int, ...], tuple[tuple[int, bytes], ...]]
"""What keys and values of a block depend on: all tokens up to its end, and what begins among them, where."""


def content(token_ids: list[int], keys: tuple[CacheKey, ...], end: int) -> Content:
    return tuple(token_ids[:end]), tuple(
        sorted((key.first_token, key.content) for key in keys if key.first_token < end)
    )


def draw_prompt(draw: random.Random) -> tuple[list[int], tuple[CacheKey, ...]]:
    """Make a prompt of which many others have a part: images whose tokens are all the same one, of digests that differ
    by a bit, at the same and at neighbouring places, with adapters and salts of the same bytes.
    """
    token_ids, keys = [], []
    if draw.random() < 0.5:
        keys.append(CacheKey(draw.choice((b"salt:a", b"salt:b", b"salt:"))))
    if draw.random() < 0.5:
        keys.append(CacheKey(draw.choice((b"adapter:a", b"adapter:b", b"image:a")), draw.choice((0, 0, 3, 4))))
    for _ in range(draw.randint(1, 4)):
        token_ids += draw.choice(([1], [1, 2], [1, 2, 3], [0]))
        if draw.random() < 0.7:
            keys.append(CacheKey(b"image:" + bytes([draw.choice((0, 1, 2, 128))]) * 8, len(token_ids)))
            token_ids += [0] * draw.choice((3, 4, 5))
    return token_ids + [2] * draw.randint(1, 3), tuple(keys)


def fuzz(seed: int, num_prompts: int) -> int:
    """Compute prompts one after the other, and return how many tokens were found.

    :raises AssertionError: a block was found that holds something else
    """
    draw, kv = random.Random(seed), KvCacheManager(2000, BLOCK)
    holds: dict[int, Content] = {}
    for _ in range(num_prompts):
        token_ids, keys = draw_prompt(draw)
        table = KvTable(keys)
        prefix = kv.match(table, token_ids)
        kv.attach(table, prefix, token_ids)
        num_found = prefix.num_tokens // BLOCK
        for place, block in enumerate(table.ids[:num_found]):
            assert holds[block] == content(token_ids, keys, (place + 1) * BLOCK)
        assert (
            kv.grow(table, prefix.num_tokens, len(token_ids) - prefix.num_tokens) == len(token_ids) - prefix.num_tokens
        )
        for place in range(num_found, len(table.ids)):
            holds[table.ids[place]] = content(token_ids, keys, (place + 1) * BLOCK)
        kv.commit(table, token_ids, len(token_ids))
        kv.free(table, token_ids, len(token_ids))
    return kv.prefix_hits


def test_near_identical_prompts() -> None:
    assert fuzz(0, 3000) > 3000


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_near_identical_prompts(seed: int) -> None:
    assert fuzz(seed, 10_000) > 10_000
