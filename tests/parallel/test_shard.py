"""Ranks divide heads, neurons and tokens among them: all of each, none twice, cut between blocks where that is
possible.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.rope import RopeConfig
from paged_sdk.errors import ConfigError, UnsupportedQuantizationError
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix, tensor_type_of
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, UnreadRows
from paged_sdk.parallel.shard import WHOLE, Shard, shard_of, token_slices


def shape(num_heads: int, num_kv_heads: int, head_dim: int) -> DecoderConfig:
    return DecoderConfig(
        model_type="llama",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=1536,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=64,
        norm_eps=1e-5,
        ropes=(RopeConfig(rotary_dim=2),),
        sliding_windows=(None,),
        attention_scale=1.0,
    )


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("heads", [(9, 3, 64), (12, 2, 128), (8, 8, 64), (32, 8, 128), (8, 1, 16), (24, 4, 80)])
def test_heads(heads: tuple[int, int, int], size: int) -> None:
    num_heads, num_kv_heads, head_dim = heads
    shards = [shard_of(shape(*heads), rank, size) for rank in range(size)]
    assert [head for shard in shards for head in shard.heads] == list(range(num_heads))
    group = num_heads // num_kv_heads
    for shard in shards:
        assert {head // group for head in shard.heads} == set(shard.kv_heads)
        # Kernels know a query head's key-value head by its number.
        assert len(shard.kv_heads) == 1 or len(shard.heads) == group * len(shard.kv_heads)
        assert shard.kv_holders == sum(other.kv_heads == shard.kv_heads for other in shards)
        assert shard.of_heads(head_dim) == slice(shard.heads.start * head_dim, shard.heads.stop * head_dim)
        local = shard.local(shape(*heads))
        assert (local.num_heads, local.num_kv_heads) == (len(shard.heads), len(shard.kv_heads))


def test_heads_are_cut_between_blocks() -> None:
    # Each key-value head has six query heads of 128 elements: two of them make a block of 256.
    shards = [shard_of(shape(12, 2, 128), rank, 4) for rank in range(4)]
    assert [len(shard.heads) for shard in shards] == [4, 2, 4, 2]
    assert all(shard.of_heads(128).start % 256 == 0 for shard in shards)


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (1536, 2, [768, 768]),
        (8960, 2, [4608, 4352]),
        (44, 3, [15, 15, 14]),
        (96, 2, [64, 32]),
        (1536, 4, [512, 512, 256, 256]),
    ],
)
def test_neurons(count: int, size: int, expected: list[int]) -> None:
    slices = [Shard(rank=rank, size=size).neurons(count) for rank in range(size)]
    assert [own.stop - own.start for own in slices] == expected
    assert (slices[0].start, slices[-1].stop) == (0, count)
    assert all(one.stop == other.start for one, other in pairwise(slices))


@pytest.mark.parametrize(("count", "size"), [(49152, 2), (151936, 3), (100, 3), (5, 5)])
def test_tokens(count: int, size: int) -> None:
    slices = token_slices(count, size)
    assert (slices[0].start, slices[-1].stop) == (0, count)
    assert all(one.stop == other.start for one, other in pairwise(slices))
    assert all(own.stop > own.start for own in slices)


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [(576, 2, [288, 288]), (576, 4, [160, 160, 128, 128]), (1536, 3, [512, 512, 512]), (48, 3, [16, 16, 16])],
)
def test_outputs(count: int, size: int, expected: list[int]) -> None:
    slices = [own for rank in range(size) if (own := Shard(rank=rank, size=size).outputs(count)) is not None]
    assert [own.stop - own.start for own in slices] == expected
    assert (slices[0].start, slices[-1].stop) == (0, count)
    assert all(one.stop == other.start for one, other in pairwise(slices))


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [(768, 2, [384, 384]), (2880, 4, [736, 736, 704, 704]), (160, 4, [64, 32, 32, 32])],
)
def test_rows_of_experts(count: int, size: int, expected: list[int]) -> None:
    shards = [Shard(rank=rank, size=size) for rank in range(size)]
    slices = [own for shard in shards if (own := shard.expert_rows(count)) is not None]
    assert [own.stop - own.start for own in slices] == expected
    assert slices == [shard.outputs(count) for shard in shards]


@pytest.mark.parametrize(("count", "size"), [(96, 4), (80, 2)])
def test_rows_of_experts_that_are_not_divided(count: int, size: int) -> None:
    assert all(Shard(rank=rank, size=size).expert_rows(count) is None for rank in range(size))


@pytest.mark.parametrize("count", [16, 100])
def test_outputs_that_are_not_divided(count: int) -> None:
    assert Shard(rank=0, size=2).outputs(count) is None


def test_more_ranks_than_there_are_parts() -> None:
    with pytest.raises(ConfigError, match="at most 9"):
        shard_of(shape(9, 3, 64), 0, 10)
    with pytest.raises(ConfigError, match="at most 3"):
        Shard(rank=0, size=4).neurons(3)
    with pytest.raises(ConfigError, match="at most 5"):
        token_slices(5, 6)


def test_one_rank_has_all() -> None:
    assert shard_of(shape(9, 3, 64), 0, 1) is WHOLE
    assert WHOLE.local(shape(9, 3, 64)) == shape(9, 3, 64)


def test_columns_of_a_file_are_read_with_their_rows() -> None:
    whole = torch.arange(60.0).view(6, 10)
    read: list[tuple[int, int]] = []

    def rows(first: int, last: int) -> torch.Tensor:
        read.append((first, last))
        return whole[first:last].clone()

    part = DenseMatrix(UnreadRows(shape=(6, 10), itemsize=4, read=rows)).cols(slice(2, 7)).rows(slice(1, 4))
    assert part.shape == (3, 5)
    assert not read
    assert torch.equal(part.weight, whole[1:4, 2:7])
    assert read == [(1, 4)]


def test_columns_of_blocks() -> None:
    blocks = torch.randint(0, 256, (4, 3 * 34), dtype=torch.uint8)
    blocks.view(4, 3, 34)[:, :, :2] = torch.tensor([1.5], dtype=torch.float16).view(torch.uint8)
    unread = UnreadRows(shape=(4, 102), itemsize=1, read=lambda first, last: blocks[first:last].clone())
    whole = BlockMatrix(tensor_type_of("Q8_0"), unread)
    assert torch.equal(whole.cols(slice(32, 96)).decoded(), whole.decoded()[:, 32:96])
    with pytest.raises(UnsupportedQuantizationError):
        whole.cols(slice(32, 80))
