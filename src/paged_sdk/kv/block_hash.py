"""Identify a block's content by a hash chain over all tokens up to its end."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from attrs import frozen

__all__ = ["CacheKey", "block_hashes"]

DIGEST_BLOCKS: Final = 16
ROOT: Final = bytes(32)
"""Used as the hash of the block before the first."""
KEY_MARK: Final = b"\xff" * 4


@frozen
class CacheKey:
    """Identifies something other than tokens that the KV depends on, from one token of the sequence on.

    It enters the hash of the block that holds ``first_token`` and, through the chain, of all later blocks. So two
    conversations share their blocks up to the first image that differs.

    :ivar content: what distinguishes it: a cache salt, a digest of an adapter's weights or of an image
    :ivar first_token: position of the first token that depends on it; 0 if the whole sequence does
    """

    content: bytes
    first_token: int = 0


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    keys: Sequence[CacheKey] = (),
    *,
    known: Sequence[bytes] = (),
    most: int = sys.maxsize,
) -> list[bytes]:
    """Hash the full blocks of a sequence: SHA-256 over everything up to the end of each block.

    Every 16th block starts a new digest from the previous block's hash, so that hashing can resume after any block by
    rereading at most 15. Within the 16, one running digest is used: 64 blocks of 32 tokens take 36 us, of which 12 are
    for taking the tokens out of a list; with one digest per block they take 45.

    Two blocks with the same hash hold the same KV, and tokens are not compared after a hit: finding two inputs with one
    SHA-256 digest takes about 2**128 attempts, even for an attacker who chooses the prompts. The keys that begin in a
    block are hashed before its tokens, each after a mark that is no token id, so no two inputs give the same bytes.

    :param token_ids: tokens, each below 2**32 - 1
    :param keys: the sequence's keys; those that begin in no full block are ignored
    :param known: hashes of the first blocks, which are not returned again
    :param most: the most blocks to hash, known ones included
    """
    num_blocks = min(len(token_ids) // block_size, most)
    if num_blocks <= len(known):
        return []
    begin = len(known) - len(known) % DIGEST_BLOCKS
    if begin or len(token_ids) - num_blocks * block_size >= block_size:
        token_ids = token_ids[begin * block_size : num_blocks * block_size]
    packed, width = _packed(token_ids), block_size * 4
    parts = [packed[place : place + width] for place in range(0, (num_blocks - begin) * width, width)]
    for key in reversed(keys):
        place, offset = divmod(key.first_token - begin * block_size, block_size)
        if 0 <= place < len(parts):
            parts[place] = KEY_MARK + struct.pack("<QQ", offset, len(key.content)) + key.content + parts[place]
    digest = sha256(known[begin - 1] if begin else ROOT)
    place = len(known) - begin
    digest.update(b"".join(parts[:place]))
    hashes: list[bytes] = []
    while place < len(parts):
        end = place - place % DIGEST_BLOCKS + DIGEST_BLOCKS
        update, name = digest.update, digest.digest
        for part in parts[place:end]:
            update(part)
            hashes.append(name())
        place, digest = end, sha256(hashes[-1])
    return hashes


def _packed(token_ids: Sequence[int]) -> bytes:
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
