"""Applies a rule that changes states token by token to rows with drafts, by torch operations.

A state cannot go back to before a token. So it stays as it is before the drafts, a copy goes on through them, and their
inputs are kept: when it is known how many drafts were right, the next step takes the state through these first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from paged_sdk.kernels.recurrent_step import RecurrentRows

__all__ = ["StateRule", "apply_rule"]

StateRule: TypeAlias = Callable[[Sequence[Tensor], Tensor, RecurrentRows], Tensor]
"""Takes inputs, ``[num_tokens, columns]`` each, through the states of a pool, which it changes, and returns what the
tokens read, ``[num_tokens, ...]``."""


def apply_rule(rule: StateRule, inputs: Sequence[Tensor], pool: Tensor, kept: Tensor, rows: RecurrentRows) -> Tensor:
    """Apply a rule to the tokens of a step, and leave states and inputs as the next step needs them.

    :param inputs: ``[num_tokens, columns]`` each, of one dtype
    :param pool: ``[num_slots, ...]``: the states, as the rule has them
    :param kept: ``[num_slots, most_drafts, columns of all inputs]``, at least as wide a dtype: the inputs of drafts
    :returns: ``[num_tokens, ...]``: what the rule returns for the tokens
    """
    if rows.drafts is None:
        return rule(inputs, pool, rows)
    divided, columns = rows.divided, [each.shape[1] for each in inputs]
    new = torch.cat(list(inputs), -1)
    line = torch.cat([kept[divided.kept].to(new.dtype), new])
    pool[divided.cleared] = 0
    reads: list[Tensor] = []
    if divided.known is not None:
        reads.append(rule(torch.split(line[divided.known_tokens], columns, -1), pool, divided.known))
    if divided.guessed is not None:
        states = pool[divided.guessed_slots]  # a copy, which nothing reads afterwards
        reads.append(rule(torch.split(line[divided.guessed_tokens], columns, -1), states, divided.guessed))
        tokens, slots, places = divided.new
        kept[slots, places] = new[tokens].to(kept.dtype)
    return torch.cat(reads)[divided.own]
