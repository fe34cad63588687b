"""Numbers added to scores by distance, judged by T5's own module of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from paged_sdk.kernels.attention import decode_attention, masked_attention, prefill_attention
from paged_sdk.kernels.attention_inputs import ScoreOptions
from paged_sdk.kernels.relative_bias import RelativeBias

HEADS, SIZE, LENGTH, REACH = 4, 16, 150, 40


def t5_bias(*, is_decoder: bool) -> tuple[RelativeBias, Tensor]:
    """Return numbers by bucket, and what T5 makes of them for all pairs, ``[1, num_heads, length, length]``."""
    torch.manual_seed(0)
    config: Any = T5Config(
        num_heads=HEADS,
        relative_attention_num_buckets=12,
        relative_attention_max_distance=REACH,
        is_decoder=is_decoder,
    )
    module: Any = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    module.relative_attention_bias.weight.data.normal_()
    distances = torch.arange(-REACH, REACH + 1)
    buckets = module._relative_position_bucket(distances, not is_decoder, 12, REACH)
    weight = module.relative_attention_bias.weight.detach()
    return RelativeBias(buckets, weight.T), module.compute_bias(LENGTH, LENGTH).detach()


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("num_tokens", [LENGTH, 7])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_scores_have_the_numbers_of_t5(*, is_decoder: bool, window: int | None, num_tokens: int, kv_heads: int) -> None:
    relative, wanted = t5_bias(is_decoder=is_decoder)
    query = torch.randn(LENGTH, HEADS, SIZE)
    key, value = torch.randn(2, LENGTH, kv_heads, SIZE)
    scores = ScoreOptions(scale=0.3, window=window, softcap=4.0, relative=relative, bidirectional=not is_decoder)
    found = prefill_attention(query[-num_tokens:], key, value, scores)

    heads = [each.repeat_interleave(HEADS // each.shape[1], 1).transpose(0, 1) for each in (query, key, value)]
    capped = 4.0 * torch.tanh(heads[0] @ heads[1].mT * 0.3 / 4.0) + wanted[0]
    places = torch.arange(LENGTH)
    ahead = places - places[:, None]
    seen = ahead.abs() < (window or LENGTH) if not is_decoder else (ahead <= 0) & (-ahead < (window or LENGTH))
    expected = (capped.masked_fill(~seen, -torch.inf).softmax(-1) @ heads[2]).transpose(0, 1)
    torch.testing.assert_close(found, expected[-num_tokens:], atol=2e-5, rtol=2e-5)


def test_numbers_of_queries_and_keys() -> None:
    """A text of several in a step, of which one is cut where its beginning is known already."""
    torch.manual_seed(0)
    buckets = torch.arange(2 * REACH, -1, -1) // 7
    size = int(buckets.max()) + 1
    head, query, key = torch.randn(HEADS, size), torch.randn(300, HEADS, size), torch.randn(300, HEADS, size)
    relative = RelativeBias(buckets, head, query, key).of_tokens(20, 20 + LENGTH)
    queries, keys = torch.arange(5, 60), torch.arange(3, LENGTH)
    found = relative.between(queries, keys, start=2)
    for own, seen in ((5, 3), (59, LENGTH - 1), (40, 40), (17, 30)):
        bucket = buckets[min(max(seen - own, -REACH), REACH) + REACH]
        wanted = head[:, bucket] + query[20 + own - 2, :, bucket] + key[20 + seen - 2, :, bucket]
        torch.testing.assert_close(found[:, own - 5, seen - 3], wanted)


def test_other_forms_of_attention_take_none() -> None:
    relative, _ = t5_bias(is_decoder=True)
    scores = ScoreOptions(scale=1.0, relative=relative)
    rows = torch.zeros(1, HEADS, SIZE)
    with pytest.raises(AssertionError, match="relative"):
        decode_attention(rows, rows[None], rows[None], None, scores)
    with pytest.raises(AssertionError, match="relative"):
        masked_attention(rows, rows, rows, torch.ones(1, 1, 1, dtype=torch.bool), scores)
