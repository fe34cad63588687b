"""Changes the logits of a few tokens per row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

__all__ = ["SparseChange", "add_sparse", "index_of", "keep_only"]


@frozen(eq=False)
class SparseChange:
    """Holds amounts to add to the logits of some tokens.

    :ivar token_ids: distinct tokens
    :ivar amounts: one amount per token; -inf bans the token
    """

    token_ids: npt.NDArray[np.int64]
    amounts: npt.NDArray[np.float32]


def add_sparse(logits: Tensor, changes: Sequence[tuple[int, SparseChange]]) -> None:
    """Add sparse changes to logits in place.

    :param logits: float32 ``[N, V]``
    :param changes: rows, and the change to each
    """
    amounts = torch.from_numpy(np.concatenate([change.amounts for _, change in changes])).to(logits.device)
    index = index_of(logits, [row for row, _ in changes], [change.token_ids for _, change in changes])
    logits.index_put_(index, amounts, accumulate=True)


def keep_only(logits: Tensor, token_ids: npt.NDArray[np.int64]) -> None:
    """Ban all other tokens, in place.

    :param logits: float32 ``[V]``
    :param token_ids: the tokens that keep their logits
    """
    tokens = torch.from_numpy(token_ids).to(logits.device)
    kept = logits[tokens]
    logits.fill_(-torch.inf)
    logits[tokens] = kept


def index_of(logits: Tensor, rows: Sequence[int], tokens: Sequence[npt.NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
    """Return index tensors of every (row, token) pair.

    :param rows: row indices
    :param tokens: the tokens of each row
    """
    row_of_each = np.repeat(np.array(rows), [len(row_tokens) for row_tokens in tokens])
    return (
        torch.from_numpy(row_of_each).to(logits.device),
        torch.from_numpy(np.concatenate(tokens)).to(logits.device),
    )
