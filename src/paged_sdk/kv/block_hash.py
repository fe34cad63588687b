"""Name a block's content by a hash chain over the tokens that led to it."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Sequence
from hashlib import sha256

from attrs import frozen

__all__ = ["CacheKey", "block_hash", "block_hashes"]


@frozen
class CacheKey:
    """Names something other than tokens that the KV depends on, from one token of the sequence on.

    It enters the hash of the block that holds its first token, and through the chain all later ones. So two
    conversations share their blocks up to the first image that differs.

    :ivar content: what tells it apart: a cache salt, a digest of an adapter's weights or of an image
    :ivar first_token: position of the first token that depends on it; 0 for what concerns the whole sequence
    """

    content: bytes
    first_token: int = 0


def block_hash(parent: bytes, token_ids: Sequence[int], keys: Iterable[CacheKey] = (), *, start: int = 0) -> bytes:
    """Hash a full block: SHA-256 over its parent's hash, its tokens, and the keys that begin in it.

    Two blocks with one hash hold the same KV, and tokens are not compared after a hit: finding two inputs with one
    SHA-256 digest takes about 2**128 attempts, even for somebody who chooses the prompts.

    :param parent: hash of the block before it; empty for the first block
    :param token_ids: the tokens of the block, each below 2**32
    :param keys: the sequence's keys; those that begin in other blocks are ignored
    :param start: position of the block's first token
    """
    # Every part has a known length, so that no two inputs give the same bytes.
    digest = sha256(parent)
    digest.update(struct.pack(f"<{len(token_ids)}I", *token_ids))
    for key in keys:
        if start <= key.first_token < start + len(token_ids):
            digest.update(struct.pack("<QQ", key.first_token - start, len(key.content)))
            digest.update(key.content)
    return digest.digest()


def block_hashes(
    token_ids: Sequence[int], block_size: int, keys: Sequence[CacheKey] = (), *, most: int = sys.maxsize
) -> list[bytes]:
    """Hash the full blocks of a sequence, from its start on: what :func:`block_hash` gives for one after the other.

    Tokens are packed once and not for each block: a block of 32 takes 0.8 us here and 1.2 us there.

    :param most: how many blocks are hashed at most
    """
    num_blocks = min(len(token_ids) // block_size, most)
    packed = struct.pack(f"<{num_blocks * block_size}I", *token_ids[: num_blocks * block_size])
    with_keys = {key.first_token // block_size for key in keys}
    width = block_size * 4
    hashes, parent = [], b""
    for index in range(num_blocks):
        if index in with_keys:
            start = index * block_size
            parent = block_hash(parent, token_ids[start : start + block_size], keys, start=start)
        else:
            parent = sha256(parent + packed[index * width : (index + 1) * width]).digest()
        hashes.append(parent)
    return hashes
