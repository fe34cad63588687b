"""Compute selective state spaces (Mamba-2: Dao and Gu, 2024, arXiv 2405.21060), from where earlier steps left off.

The state of a head is a matrix ``S``, ``[state_size, head_dim]``. A token with input x, vectors B and C, step size s
and decay a updates it and reads it::

    S = a * S + outer(B, s * x)
    output = C @ S
"""

from __future__ import annotations

from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.chunk_decay import decay_between
from paged_sdk.kernels.recurrent_step import ChunkGrid, RecurrentRows

__all__ = ["selective_scan"]

_CHUNK: Final = 64
"""Tokens that are computed together. The work within a chunk grows with the square of its size, that between chunks
with their number; all kinds of recurrent layers of a step share one division into chunks."""


@frozen(eq=False, kw_only=True)
class _Inputs:
    """Holds the inputs of some tokens, in at least float32, by group of heads and by head within the group.

    :ivar value: ``[..., num_groups, heads_per_group, head_dim]``: inputs times their step sizes
    :ivar write: ``[..., num_groups, state_size]``: B; ``read``, C, likewise
    :ivar log_decay: ``[..., num_groups, heads_per_group]``, at most 0
    """

    value: Tensor
    write: Tensor
    read: Tensor
    log_decay: Tensor

    def at(self, tokens: Tensor) -> _Inputs:
        """Return those of some tokens, ``[...]`` int64; zeros, which change no state, for a token beyond the last."""
        value, write, read, log_decay = (
            torch.cat([each, each.new_zeros(1, *each.shape[1:])])[tokens]
            for each in (self.value, self.write, self.read, self.log_decay)
        )
        return _Inputs(value=value, write=write, read=read, log_decay=log_decay)


def selective_scan(
    x: Tensor, write: Tensor, read: Tensor, step: Tensor, log_decay: Tensor, pool: Tensor, rows: RecurrentRows
) -> Tensor:
    """Take the state of each sequence through its tokens, in at least float32, and keep it.

    Rows of one token are computed together; the tokens of longer rows in chunks, the chunks of all rows together.

    :param x: ``[num_tokens, num_heads, head_dim]``, the tokens of all rows in the order of the rows
    :param write: ``[num_tokens, num_groups, state_size]``, B of each group of heads; ``read``, C, likewise
    :param step: ``[num_tokens, num_heads]``: the step sizes, by which inputs are multiplied
    :param log_decay: ``[num_tokens, num_heads]``, at most 0: the logarithm of what remains of the state
    :param pool: ``[num_slots, num_heads, state_size, head_dim]`` float32 (float64 of float64 inputs): the states of the
        rows' sequences before the step; replaced by those after it
    :returns: ``[num_tokens, num_heads, head_dim]`` of the pool's dtype
    """
    groups = write.shape[1]
    inputs = _Inputs(
        value=torch.unflatten(x.to(pool.dtype) * step.to(pool.dtype).unsqueeze(-1), 1, (groups, -1)),
        write=write.to(pool.dtype),
        read=read.to(pool.dtype),
        log_decay=torch.unflatten(log_decay.to(pool.dtype), 1, (groups, -1)),
    )
    states = torch.unflatten(rows.states(pool), 1, (groups, -1))
    if rows.only_decodes:
        output, states = _next(inputs, states)
    else:
        output = torch.empty_like(inputs.value)
        single_rows, single_tokens = rows.singles
        if len(single_rows):
            output[single_tokens], states[single_rows] = _next(inputs.at(single_tokens), states[single_rows])
        grid = rows.grid(_CHUNK)
        outputs, states[grid.rows] = _scan(inputs.at(grid.tokens), states[grid.rows], grid)
        output[grid.own] = outputs.flatten(0, 1)[grid.places]
    pool.index_copy_(0, rows.slots, states.flatten(1, 2))
    return output.flatten(1, 2)


def _next(inputs: _Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
    """Take each row's state through one token.

    :param states: ``[num_rows, num_groups, heads_per_group, state_size, head_dim]``, which is changed
    :returns: the outputs, and the states after the tokens
    """
    states.mul_(inputs.log_decay.exp()[..., None, None])
    states.addcmul_(inputs.write[:, :, None, :, None], inputs.value.unsqueeze(-2))
    return (inputs.read[:, :, None, None] @ states).squeeze(-2), states


def _scan(inputs: _Inputs, states: Tensor, grid: ChunkGrid) -> tuple[Tensor, Tensor]:
    """Take the states through whole chunks: within one, the paper's dual form is a masked product like attention's.

    :param inputs: of all chunks, ``[num_chunks, size, ...]``
    :param states: of the grid's rows, which are changed
    :returns: the outputs, ``[num_chunks, size, num_groups, heads_per_group, head_dim]``, and the states after the rows
    """
    value = inputs.value.movedim(1, -2)
    read, write = (each.transpose(1, 2).unsqueeze(2) for each in (inputs.read, inputs.write))  # of each group
    log_decay = inputs.log_decay.movedim(1, -1)
    between = decay_between(log_decay)
    outputs = (read @ write.mT * between) @ value
    decay = log_decay.cumsum(-1).exp_().unsqueeze(-1)  # since the chunk's start
    writes = (write * between[..., -1, :].unsqueeze(-1)).mT  # as much of them as the chunk's end has
    first = 0
    for count in grid.counts:
        own, state = slice(first, first + count), states[:count]
        outputs[own] += (read[own] @ state) * decay[own]
        states[:count] = state * decay[own, ..., -1:, :] + writes[own] @ value[own]
        first += count
    return outputs.movedim(-2, 1), states
