"""What metadata say about a batch, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels import InputMetadata


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def lists(metadata: InputMetadata) -> tuple[object, list[int], list[int]]:
    rows = metadata.rows
    assert {rows.block_tables.dtype, rows.context_lens.dtype, rows.cu_seqlens_q.dtype} == {torch.int32}
    return rows.block_tables.tolist(), rows.context_lens.tolist(), rows.cu_seqlens_q.tolist()


def test_decodes_are_rows_of_one_token() -> None:
    metadata = InputMetadata(
        is_prefill=False,
        slot_mapping=ints(5, 9, 2),
        block_tables=torch.tensor([[0, 1], [2, 3], [4, 5]]),
        context_lens=ints(6, 2, 8),
        max_seqlen_q=512,
        max_context_len=8,
    )
    assert lists(metadata) == ([[0, 1], [2, 3], [4, 5]], [6, 2, 8], [0, 1, 2, 3])
    assert (metadata.rows.max_seqlen_q, metadata.rows.max_context_len) == (1, 8)


def test_a_prompt_is_one_row_unless_it_is_said_otherwise() -> None:
    metadata = InputMetadata(True, torch.arange(6), block_tables=torch.tensor([[3, 4]]), context_lens=ints(8))
    assert lists(metadata) == ([[3, 4]], [8], [0, 6])
    assert (metadata.rows.max_seqlen_q, metadata.rows.max_context_len) == (6, None)


def test_context_lengths_may_come_summed_up() -> None:
    metadata = InputMetadata(
        True,
        torch.arange(5),
        block_tables=torch.tensor([[0, 1], [2, 3]]),
        cu_seqlens_q=ints(0, 2, 5),
        cu_seqlens_k=ints(0, 7, 10),
    )
    assert metadata.rows.context_lens.tolist() == [7, 3]


def test_one_table_for_several_rows_makes_them_chunks() -> None:
    table, ends = torch.tensor([[7, 5, 6]]), ints(0, 4, 8, 9)
    for given in (ints(13), ints(8, 12, 13)):
        metadata = InputMetadata(
            True, torch.arange(9), block_tables=table, context_lens=given, cu_seqlens_q=ends, max_seqlen_q=4
        )
        assert lists(metadata) == ([[7, 5, 6]] * 3, [8, 12, 13], [0, 4, 8, 9])
        assert metadata.rows.max_seqlen_q == 4


def test_without_a_cache_keys_are_their_own_pages() -> None:
    metadata = InputMetadata(True, torch.arange(5), cu_seqlens_q=ints(0, 2, 5), max_seqlen_k=3)
    assert lists(metadata) == ([[0, 1, 2], [2, 3, 4]], [2, 3], [0, 2, 5])
    assert metadata.rows.max_context_len == 3
    metadata = InputMetadata(True, torch.arange(9), None, None, ints(0, 2, 5), ints(0, 5, 9), max_seqlen_k=5)
    assert lists(metadata) == ([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]], [5, 4], [0, 2, 5])
    assert lists(InputMetadata(True, torch.arange(2))) == ([[0, 1]], [2], [0, 2])


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ("slot_mapping", {"slot_mapping": [0, 1]}),
        ("slot_mapping", {"slot_mapping": torch.zeros(2)}),
        ("slot_mapping", {"slot_mapping": torch.zeros(1, 2, dtype=torch.int64)}),
        ("block_tables", {"block_tables": ints(0, 1)}),
        ("block_tables", {"block_tables": [[0, 1]]}),
        ("block_tables", {"is_prefill": False, "block_tables": None}),
        ("block_tables", {"block_tables": None, "context_lens": ints(9)}),
        ("block_tables.shape", {"block_tables": torch.zeros(2, 2, dtype=torch.int64)}),
        ("context_lens", {"context_lens": None}),
        ("context_lens", {"is_prefill": False, "context_lens": None}),
        ("context_lens.shape", {"context_lens": ints(2, 2)}),
        ("cu_seqlens_q", {"is_prefill": False, "cu_seqlens_q": ints(0, 1, 2)}),
        ("cu_seqlens_q", {"cu_seqlens_q": torch.zeros(2)}),
        ("cu_seqlens_q", {"block_tables": None, "context_lens": None, "cu_seqlens_k": ints(0, 2)}),
        ("cu_seqlens_k", {"context_lens": None, "cu_seqlens_k": torch.zeros(2)}),
        ("context_lens.device", {"context_lens": ints(2).to("meta")}),
        ("block_tables.device", {"is_prefill": False, "block_tables": torch.zeros(2, 2, device="meta")}),
    ],
)
def test_what_does_not_go_together_is_named(setting: str, changed: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "is_prefill": True,
        "slot_mapping": ints(0, 1),
        "block_tables": torch.tensor([[0, 1]]),
        "context_lens": ints(2),
    }
    InputMetadata(**arguments)
    with pytest.raises(ConfigError) as caught:
        InputMetadata(**arguments | changed)
    assert caught.value.setting == setting
    assert caught.value.allowed
