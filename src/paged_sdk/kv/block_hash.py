"""The name of a block's content: a hash chain over the tokens that led to it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

__all__ = ["block_hash"]


def block_hash(parent: bytes, token_ids: Sequence[int], extra_keys: tuple[bytes, ...] = ()) -> bytes:
    """Hash of a full block: SHA-256 over its parent's hash, its tokens and what else its KV depends on.

    Two blocks with one hash hold the same KV, and tokens are not compared after a hit: finding two inputs with one
    SHA-256 digest takes about 2**128 attempts, even for somebody who chooses the prompts.

    :param parent: hash of the block before it; empty for the first block
    :param token_ids: the tokens of the block, each below 2**32
    :param extra_keys: adapter, image content, cache salt
    """
    # Every part has a known length, so that no two inputs give the same bytes.
    digest = sha256(parent)
    digest.update(struct.pack(f"<{len(token_ids)}I", *token_ids))
    for key in extra_keys:
        digest.update(struct.pack("<Q", len(key)))
        digest.update(key)
    return digest.digest()
