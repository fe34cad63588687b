"""The attention layer for a model of one's own: a prompt, then one token after another, on a paged KV cache.

python examples/attention_layer.py
"""

from __future__ import annotations

import torch

from paged_sdk.kernels import InputMetadata, PagedAttention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
NUM_BLOCKS, BLOCK_SIZE = 32, 64
PROMPT, DECODES = 1024, 4


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attention = PagedAttention(NUM_HEADS, HEAD_DIM, HEAD_DIM**-0.5, NUM_KV_HEADS)
    cache_shape = (NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    key_cache, value_cache = (torch.zeros(cache_shape, device=device) for _ in range(2))

    # The sequence's blocks, wherever they are; token i is in block i // 64 of them, at place i % 64.
    blocks = torch.randperm(NUM_BLOCKS, device=device)[: (PROMPT + DECODES) // BLOCK_SIZE + 1]
    position = torch.arange(PROMPT + DECODES, device=device)
    slots = blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    # What a model's projections would give, for all tokens: [1, tokens, heads * head_dim].
    query = torch.randn(1, PROMPT + DECODES, NUM_HEADS * HEAD_DIM, device=device)
    key, value = (torch.randn(1, PROMPT + DECODES, NUM_KV_HEADS * HEAD_DIM, device=device) for _ in range(2))

    outputs = []
    ends = [PROMPT, *range(PROMPT + 1, PROMPT + DECODES + 1)]
    for start, end in zip([0, *ends], ends, strict=False):
        input_metadata = InputMetadata(
            is_prefill=start == 0,
            slot_mapping=slots[start:end],
            block_tables=blocks[None],
            context_lens=torch.tensor([end], device=device),
            max_seqlen_q=end - start,
            max_context_len=end,
        )
        part = slice(start, end)
        output = attention(
            query[:, part],
            key[:, part],
            value[:, part],
            None,  # attention_mask: causal
            key_cache,
            value_cache,
            input_metadata,
        )
        outputs.append(output)
        print(f"{'prefill' if start == 0 else 'decode':>7}: {tuple(output.shape)} over {end} keys")

    # The same at once, without a cache.
    whole = attention(query, key, value, None, None, None, InputMetadata(True, slots))
    print(f"largest difference: {(torch.cat(outputs, 1) - whole).abs().max():.1e}")


if __name__ == "__main__":
    main()
