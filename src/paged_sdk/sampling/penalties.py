"""Changes to the logits of a few tokens per row: what is added, and what a token's earlier occurrences cost it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.sampling.history import TokenHistory

__all__ = ["add_sparse", "apply_penalties"]


def add_sparse(logits: Tensor, changes: Sequence[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32]]]) -> None:
    """Add to the logits of some tokens, in place.

    :param logits: float32 ``[N, V]``
    :param changes: a row, distinct token ids, and what to add to the logit of each; -inf bans it
    """
    if not changes:
        return
    tokens = [row_tokens for _, row_tokens, _ in changes]
    values = torch.from_numpy(np.concatenate([row_values for _, _, row_values in changes]))
    logits.index_put_(_index(logits, [row for row, _, _ in changes], tokens), values.to(logits.device), accumulate=True)


def apply_penalties(logits: Tensor, rows: Sequence[tuple[int, SamplingParams, TokenHistory]]) -> None:
    """Lower the logits of tokens that occur already, in place.

    First repetition (Keskar et al., "CTRL", 2019: logits above zero are divided, others multiplied; prompt and
    output), then frequency and presence as OpenAI's API defines them (output only).

    :param logits: float32 ``[N, V]``
    :param rows: a row, its settings, and its tokens
    """
    if not rows:
        return
    tokens = [history.distinct_tokens for _, _, history in rows]
    sizes = [len(row_tokens) for row_tokens in tokens]

    def per_token(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), sizes)).to(logits.device)

    repetition = per_token(
        [1.0 if params.repetition_penalty is None else params.repetition_penalty for _, params, _ in rows]
    )
    frequency = per_token([params.frequency_penalty for _, params, _ in rows])
    presence = per_token([params.presence_penalty for _, params, _ in rows])
    counts = torch.from_numpy(np.concatenate([history.output_counts for _, _, history in rows])).to(logits)

    index = _index(logits, [row for row, _, _ in rows], tokens)
    scores = logits[index]
    scores = torch.where(scores < 0, scores * repetition, scores / repetition)
    logits[index] = scores - (frequency * counts + presence * (counts > 0))


def _index(logits: Tensor, rows: Sequence[int], tokens: Sequence[npt.NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
    """Every pair of a row and one of its tokens."""
    row_of_each = np.repeat(np.array(rows), [len(row_tokens) for row_tokens in tokens])
    return (
        torch.from_numpy(row_of_each).to(logits.device),
        torch.from_numpy(np.concatenate(tokens)).to(logits.device),
    )
