"""Compute linear attention by the gated delta rule (Yang et al., 2024, arXiv 2412.06464), from where earlier steps left
off.

The state of a head is a matrix ``S``, ``[key_dim, value_dim]``, that maps keys to values. A token with query q, key k,
value v, decay a and write strength b updates it and reads it::

    S = a * S                            forgets
    S = S + outer(k, b * (v - k @ S))    replaces part of what k maps to by v
    output = q @ S
"""

from __future__ import annotations

from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.chunk_decay import decay_between
from paged_sdk.kernels.recurrent_step import ChunkGrid, RecurrentRows

__all__ = ["gated_delta_rule"]

_CHUNK: Final = 64
"""Tokens that are computed together: the paper's choice. The work within a chunk grows with the square of its size,
that between chunks with their number."""

_NORM_EPS: Final = 1e-6


@frozen(eq=False, kw_only=True)
class _Inputs:
    """Holds the inputs of some tokens, in at least float32.

    :ivar query: ``[..., num_value_heads, key_dim]``, of unit length, divided by the root of its size; ``key`` is of
        unit length
    :ivar value: ``[..., num_value_heads, value_dim]``
    :ivar log_decay: ``[..., num_value_heads]``, at most 0
    :ivar strength: ``[..., num_value_heads]``
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    strength: Tensor

    def at(self, tokens: Tensor) -> _Inputs:
        """Return those of some tokens, ``[...]`` int64; zeros, which change no state, for a token beyond the last."""
        taken = (
            torch.cat([each, each.new_zeros(1, *each.shape[1:])])[tokens]
            for each in (self.query, self.key, self.value, self.log_decay, self.strength)
        )
        query, key, value, log_decay, strength = taken
        return _Inputs(query=query, key=key, value=value, log_decay=log_decay, strength=strength)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, pool: Tensor, rows: RecurrentRows
) -> Tensor:
    """Apply the rule to the tokens of each sequence, in at least float32, and keep the states.

    Rows of one token are computed together; the tokens of longer rows in chunks, the chunks of all rows together.

    :param query: ``[num_tokens, num_key_heads, key_dim]``, the tokens of all rows in the order of the rows; scaled to
        unit length here, as is ``key``, ``[num_tokens, num_key_heads, key_dim]``
    :param value: ``[num_tokens, num_value_heads, value_dim]``; a multiple of the number of key heads
    :param log_decay: ``[num_tokens, num_value_heads]``, at most 0: the logarithm of what remains of the state
    :param strength: ``[num_tokens, num_value_heads]``: the part that is replaced, from 0 to 1
    :param pool: ``[num_slots, num_value_heads, key_dim, value_dim]`` float32 (float64 of float64 inputs): the states of
        the rows' sequences before the step; replaced by those after it
    :returns: ``[num_tokens, num_value_heads, value_dim]`` of the dtype of ``value``
    """
    num_copies = value.shape[1] // key.shape[1]
    inputs = _Inputs(
        query=_unit(query.to(pool.dtype)).mul_(query.shape[-1] ** -0.5).repeat_interleave(num_copies, 1),
        key=_unit(key.to(pool.dtype)).repeat_interleave(num_copies, 1),
        value=value.to(pool.dtype),
        log_decay=log_decay.to(pool.dtype),
        strength=strength.to(pool.dtype),
    )
    states = rows.states(pool)
    if rows.only_decodes:
        output, states = _next(inputs, states)
        pool.index_copy_(0, rows.slots, states)
        return output.to(value.dtype)
    output = torch.empty_like(inputs.value)
    single_rows, single_tokens = rows.singles
    if len(single_rows):
        output[single_tokens], states[single_rows] = _next(inputs.at(single_tokens), states[single_rows])
    grid = rows.grid(_CHUNK)
    outputs, states[grid.rows] = _scan(inputs.at(grid.tokens), states[grid.rows], grid)
    output[grid.own] = outputs.flatten(0, 1)[grid.places]
    pool.index_copy_(0, rows.slots, states)
    return output.to(value.dtype)


def _next(inputs: _Inputs, states: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the rule to one token of each row.

    :param states: ``[num_rows, num_value_heads, key_dim, value_dim]``, which is changed
    :returns: the outputs, and the states after the tokens
    """
    states.mul_(inputs.log_decay.exp()[..., None, None])
    error = inputs.value - (inputs.key.unsqueeze(-2) @ states).squeeze(-2)
    states.addcmul_(inputs.key.unsqueeze(-1), (error * inputs.strength.unsqueeze(-1)).unsqueeze(-2))
    return (inputs.query.unsqueeze(-2) @ states).squeeze(-2), states


def _scan(inputs: _Inputs, states: Tensor, grid: ChunkGrid) -> tuple[Tensor, Tensor]:
    """Apply the rule chunk by chunk, as the paper derives it: within a chunk the updates depend on each other by a
    triangular system, whose solution is linear in the state before the chunk.

    :param inputs: of all chunks, ``[num_chunks, size, num_value_heads, ...]``
    :param states: of the grid's rows, which are changed
    :returns: the outputs, ``[num_chunks, size, num_value_heads, value_dim]``, and the states after the rows
    """
    query, key, value = (each.transpose(1, 2) for each in (inputs.query, inputs.key, inputs.value))  # heads first
    strength = inputs.strength.transpose(1, 2).unsqueeze(-1)
    log_decay = inputs.log_decay.transpose(1, 2)
    between = decay_between(log_decay)
    decay = log_decay.cumsum(-1).exp_().unsqueeze(-1)  # since the chunk's start
    system = (key * strength) @ key.mT * between  # solve_triangular takes its diagonal for ones
    right = torch.cat([value * strength, key * strength * decay], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, from_state = torch.split(solved, [value.shape[-1], key.shape[-1]], -1)
    scores = query @ key.mT * between
    reads = query * decay
    writes = (key * between[..., -1, :].unsqueeze(-1)).mT  # as much of them as the chunk's end has
    remains = decay[..., -1:, :]
    outputs = torch.empty_like(written)
    first = 0
    for count in grid.counts:
        own, state = slice(first, first + count), states[:count]
        new = written[own] - from_state[own] @ state
        outputs[own] = reads[own] @ state + scores[own] @ new
        states[:count] = state * remains[own] + writes[own] @ new
        first += count
    return outputs.transpose(1, 2), states


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt()
