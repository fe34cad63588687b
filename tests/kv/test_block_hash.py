"""Names of blocks: by what they are defined, and that nothing else has the same."""

from __future__ import annotations

from hashlib import sha256
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_sdk.kv.block_hash import CacheKey, block_hashes

SIZE = 4


def defined(tokens: list[int], keys: tuple[CacheKey, ...]) -> list[bytes]:
    """Name blocks by the definition: a digest of everything since the last name that ends 16 blocks."""
    names: list[bytes] = []
    for index in range(len(tokens) // SIZE):
        first = index - index % 16
        data = names[first - 1] if first else bytes(32)
        for place in range(first * SIZE, (index + 1) * SIZE):
            if place % SIZE == 0:
                for key in (each for each in keys if place <= each.first_token < place + SIZE):
                    data += b"\xff\xff\xff\xff" + (key.first_token - place).to_bytes(8, "little")
                    data += len(key.content).to_bytes(8, "little") + key.content
            data += tokens[place].to_bytes(4, "little")
        names.append(sha256(data).digest())
    return names


@pytest.mark.parametrize(
    "keys",
    [
        (),
        (CacheKey(b"salt"),),
        (CacheKey(b"image", 9), CacheKey(b"adapter", 2), CacheKey(b"", 10)),
        (CacheKey(b"a", 70), CacheKey(b"b", 4 * 16), CacheKey(b"c", 4 * 16 - 1), CacheKey(b"d", 166)),
    ],
)
def test_are_digests_of_all_that_leads_to_a_block(keys: tuple[CacheKey, ...]) -> None:
    rng = Random(1)
    tokens = [rng.randrange(2**32 - 1) for _ in range(167)]
    names = defined(tokens, keys)
    assert block_hashes(tokens, SIZE, keys) == names
    assert block_hashes(tokens[: 20 * SIZE], SIZE, keys) == names[:20]
    for most in (0, 1, 15, 16, 17, 33):
        assert block_hashes(tokens, SIZE, keys, most=most) == names[:most]
    for known in (1, 15, 16, 17, 31, 32, 40, 41):
        assert block_hashes(tokens, SIZE, keys, known=names[:known]) == names[known:]
        assert block_hashes(tokens, SIZE, keys, known=names[:known], most=known + 1) == names[known:][:1]
    assert block_hashes(tokens[:3], SIZE, keys) == []


def test_depend_on_everything_that_leads_to_a_block() -> None:
    def last(tokens: list[int], *keys: CacheKey) -> bytes:
        return block_hashes(tokens, 2, keys)[-1]

    hashes = [
        last([1, 2]),
        last([2, 1]),
        last([1, 2, 1, 2]),
        last([1, 2], CacheKey(b"adapter")),
        last([1, 2], CacheKey(b"adap"), CacheKey(b"ter")),
        last([1, 2], CacheKey(b""), CacheKey(b"adapter")),
        last([1, 2], CacheKey(b"adapter", 1)),
        last([1, 2] * 16),
        last([1, 2] * 17),
    ]
    assert len(set(hashes)) == len(hashes)


def test_a_key_counts_where_it_begins() -> None:
    tokens = list(range(12))
    plain, with_image = block_hashes(tokens, 4), block_hashes(tokens, 4, [CacheKey(b"image", 5)])
    assert with_image[0] == plain[0]
    assert not set(with_image[1:]) & set(plain[1:])
    assert block_hashes(tokens, 4, [CacheKey(b"image", 12)]) == plain


keys = st.lists(st.builds(CacheKey, st.binary(max_size=20), st.integers(0, 11)), max_size=3).map(
    lambda drawn: tuple(sorted(drawn, key=lambda key: key.first_token // 4))
)
tokens = st.lists(st.sampled_from([0, 1, 2**32 - 2]), min_size=12, max_size=12)


@settings(deadline=None, derandomize=True)
@given(first=tokens, second=tokens, first_keys=keys, second_keys=keys)
def test_equal_only_for_equal_input(
    first: list[int], second: list[int], first_keys: tuple[CacheKey, ...], second_keys: tuple[CacheKey, ...]
) -> None:
    same = first == second and first_keys == second_keys
    assert (block_hashes(first, 4, first_keys)[-1] == block_hashes(second, 4, second_keys)[-1]) is same
