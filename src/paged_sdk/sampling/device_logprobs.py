"""Computes logprobs of tokens chosen on the device, and lists them once they are copied to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from paged_sdk.sampling.candidates import select_rows, sort_likeliest
from paged_sdk.sampling.raw_logprobs import RawLogprobs

__all__ = ["LogprobRows", "LogprobTensors"]

LogprobTensors: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""The logprobs of the chosen tokens, ``[R]`` float32; the logprobs of the likeliest tokens in any order,
``[R, width]`` float32; and the ids of the likeliest tokens, ``[R, width]`` int64."""


class LogprobRows:
    """Computes logprobs of the raw logits, for the R rows of a step whose requests want logprobs.

    :param rows: indices of these rows in the step, ascending
    :param top_ns: how many of the likeliest tokens each row lists; capped at V
    """

    def __init__(self, rows: Sequence[int], top_ns: Sequence[int]) -> None:
        self.rows = rows
        self._top_ns = top_ns

    def all_logprobs(self, logits: Tensor) -> Tensor:
        """Compute the logprobs of every token. Call this before processors change the logits.

        :param logits: ``[N, V]`` float32, the logits of the whole step
        :returns: ``[R, V]`` float32
        """
        return torch.log_softmax(select_rows(logits, self.rows), dim=-1)

    def look_up(self, all_logprobs: Tensor, tokens: Tensor) -> LogprobTensors:
        """Select the logprobs of the chosen and of the likeliest tokens.

        :param all_logprobs: ``[R, V]`` float32
        :param tokens: ``[N]`` int64, the tokens chosen in the whole step; below 0: no token
        """
        chosen = select_rows(tokens, self.rows).clamp(min=0)
        top = all_logprobs.topk(min(max(self._top_ns), all_logprobs.shape[1]), dim=-1, sorted=False)
        return all_logprobs.gather(-1, chosen[:, None])[:, 0], top.values, top.indices

    def entries(self, token_ids: Sequence[int], logprobs: LogprobTensors) -> list[RawLogprobs]:
        """Make one entry for each of the R rows.

        :param token_ids: ``[R]``, the chosen tokens
        :param logprobs: the result of :meth:`look_up`, copied to the host
        """
        chosen, values, tokens = logprobs
        sorted_values, sorted_tokens = sort_likeliest(values.numpy(), tokens.numpy())
        columns = (token_ids, chosen.tolist(), self._top_ns, sorted_tokens.tolist(), sorted_values.tolist())
        return [
            RawLogprobs(token, logprob, tuple(zip(top_tokens[:top_n], top_logprobs[:top_n], strict=True)))
            for token, logprob, top_n, top_tokens, top_logprobs in zip(*columns, strict=True)
        ]
