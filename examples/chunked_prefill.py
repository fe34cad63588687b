"""Chunked prefill: one long prompt as three rows of 4096 tokens in one call, told apart by cu_seqlens_q.

python examples/chunked_prefill.py
"""

from __future__ import annotations

import torch

from paged_sdk.kernels import InputMetadata, PagedAttention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 32
CHUNK, BLOCK_SIZE = 4096, 64
LENGTH = 3 * CHUNK


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention = PagedAttention(NUM_HEADS, HEAD_DIM, HEAD_DIM**-0.5, NUM_KV_HEADS)
    num_blocks = LENGTH // BLOCK_SIZE
    cache_shape = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    key_cache, value_cache = (torch.zeros(cache_shape, device=device) for _ in range(2))
    blocks = torch.randperm(num_blocks, device=device)
    position = torch.arange(LENGTH, device=device)
    query = torch.randn(LENGTH, NUM_HEADS, HEAD_DIM, device=device)
    key, value = (torch.randn(LENGTH, NUM_KV_HEADS, HEAD_DIM, device=device) for _ in range(2))

    # Each chunk is a row with a block table and a context length of its own. One row of block tables for all of them
    # says that they are chunks of one sequence; its context length is that of the last one.
    input_metadata = InputMetadata(
        is_prefill=True,
        slot_mapping=blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE,
        block_tables=blocks[None],
        context_lens=torch.tensor([LENGTH], device=device),
        cu_seqlens_q=torch.tensor([0, CHUNK, 2 * CHUNK, 3 * CHUNK], device=device),
        max_seqlen_q=CHUNK,
        max_context_len=LENGTH,
    )
    chunked = attention(query, key, value, None, key_cache, value_cache, input_metadata)
    print(f"rows end after {input_metadata.rows.context_lens.tolist()} keys")

    whole = attention(query, key, value, None, None, None, InputMetadata(True, position))
    print(f"largest difference to the whole prompt at once: {(chunked - whole).abs().max():.1e}")


if __name__ == "__main__":
    main()
