from __future__ import annotations

from hashlib import sha256

from hypothesis import given, settings
from hypothesis import strategies as st

from paged_sdk.kv.block_hash import CacheKey, block_hash


def test_is_sha256_of_parent_and_little_endian_tokens() -> None:
    parent = bytes(range(32))
    expected = sha256(parent + (1).to_bytes(4, "little") + (70_000).to_bytes(4, "little")).digest()
    assert block_hash(parent, [1, 70_000]) == expected


def test_depends_on_everything_that_leads_to_a_block() -> None:
    root = block_hash(b"", [1, 2])
    hashes = [
        root,
        block_hash(b"", [2, 1]),
        block_hash(root, [1, 2]),
        block_hash(b"", [1, 2], [CacheKey(b"adapter")]),
        block_hash(b"", [1, 2], [CacheKey(b"adap"), CacheKey(b"ter")]),
        block_hash(b"", [1, 2], [CacheKey(b""), CacheKey(b"adapter")]),
        block_hash(b"", [1, 2], [CacheKey(b"adapter", 1)]),
    ]
    assert len(set(hashes)) == len(hashes)


def test_a_key_counts_where_it_begins() -> None:
    image = [CacheKey(b"image", 5)]
    assert block_hash(b"", [1, 2, 3, 4], image) == block_hash(b"", [1, 2, 3, 4])
    assert block_hash(b"", [5, 6, 7, 8], image, start=4) != block_hash(b"", [5, 6, 7, 8], start=4)
    assert block_hash(b"", [9, 9, 9, 9], image, start=8) == block_hash(b"", [9, 9, 9, 9], start=8)


keys = st.lists(st.builds(CacheKey, st.binary(max_size=20), st.integers(0, 3)), max_size=3).map(tuple)
blocks = st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4)


@settings(deadline=None, derandomize=True)
@given(first=blocks, second=blocks, first_keys=keys, second_keys=keys)
def test_equal_only_for_equal_input(
    first: list[int], second: list[int], first_keys: tuple[CacheKey, ...], second_keys: tuple[CacheKey, ...]
) -> None:
    same = first == second and first_keys == second_keys
    assert (block_hash(b"", first, first_keys) == block_hash(b"", second, second_keys)) is same
