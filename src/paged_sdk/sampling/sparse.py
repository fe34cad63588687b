"""Changes the logits of a few tokens per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

__all__ = ["Entries", "SparseChange", "add_sparse", "ban", "keep_only"]


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
    :param changes: rows, each once, and the change to each
    """
    entries = Entries(logits, [row for row, _ in changes], [change.token_ids for _, change in changes])
    entries.write(entries.read() + entries.along(np.concatenate([change.amounts for _, change in changes])))


def ban(logits: Tensor, banned: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> None:
    """Ban tokens, in place.

    :param logits: float32 ``[N, V]``
    :param banned: rows, each once, and the tokens that each may not take
    """
    Entries(logits, [row for row, _ in banned], [tokens for _, tokens in banned]).write(-np.inf)


def keep_only(logits: Tensor, kept: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> None:
    """Ban all other tokens, in place.

    :param logits: float32 ``[N, V]``
    :param kept: rows, each once, and the tokens that keep their logits
    """
    entries = Entries(logits, [row for row, _ in kept], [tokens for _, tokens in kept])
    numbers = entries.read()
    entries.fill_rows(-np.inf)
    entries.write(numbers)


class Entries:
    """Refers to the logits of some tokens of some rows.

    They are read and written as an array on the CPU, and as a tensor on other devices: between two steps, when the
    weights have replaced torch's dispatcher in the caches, each of its operations takes 20 to 100 us, and numpy's 5.

    :param logits: float32 ``[N, V]``
    :param rows: row indices, each once
    :param tokens: distinct tokens of each row
    """

    def __init__(self, logits: Tensor, rows: Sequence[int], tokens: Sequence[npt.NDArray[np.int64]]) -> None:
        self._device = logits.device
        self._rows = rows
        self._table: Any = logits.numpy() if logits.device.type == "cpu" else logits
        row_of_each = np.repeat(np.array(rows), [len(row_tokens) for row_tokens in tokens])
        self._index = self.along(row_of_each), self.along(np.concatenate(tokens))

    def along(self, numbers: npt.NDArray[Any]) -> Any:
        """Return numbers of the entries, one for each, as their logits are read: to compute with these."""
        return numbers if self._device.type == "cpu" else torch.from_numpy(numbers).to(self._device)

    def read(self) -> Any:
        """Return a copy of the logits, row after row."""
        return self._table[self._index]

    def write(self, logits: Any) -> None:
        """Replace the logits, in the order in which they are read, or all by one number."""
        self._table[self._index] = logits

    def fill_rows(self, logit: float) -> None:
        """Replace every logit of the rows by a number, not only those of the entries."""
        for row in self._rows:
            self._table[row] = logit
