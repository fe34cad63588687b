"""Short convolutions, the gated delta rule and selective state spaces over the rows of a step: what a plain loop over
tokens computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import pytest
import torch
from torch import Tensor

from paged_sdk.kernels.gated_delta import gated_delta_rule
from paged_sdk.kernels.mamba2 import selective_scan
from paged_sdk.kernels.recurrent_step import RecurrentRows
from paged_sdk.kernels.short_conv import short_conv

CPU: Final = torch.device("cpu")
CHANNELS, KERNEL = 6, 4
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 5
GROUPS, HEADS, STATE_SIZE, HEAD_DIM = 2, 6, 8, 5
NUM_SLOTS: Final = 7
# Tokens of each row, in steps of the same sequences: decodes, chunks of one length and of many, in any order.
STEPS: Final[dict[str, list[list[int]]]] = {
    "decodes": [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]],
    "one text": [[200], [1], [3], [64], [2]],
    "mixed": [[1, 70, 2], [130, 1, 1], [1, 1, 200], [64, 128, 1], [5, 3, 2]],
    "longest last": [[2, 3, 150], [1, 64, 65]],
}


def rows_of(lengths: Sequence[int], starts: Sequence[int], slots: Sequence[int]) -> RecurrentRows:
    return RecurrentRows(slots, starts, lengths, device=CPU)


def random_tensors(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def in_steps(
    compute: Callable[..., Tensor],
    texts: Sequence[Sequence[Tensor]],
    steps: Sequence[Sequence[int]],
    slots: Sequence[int],
) -> list[Tensor]:
    """Return the outputs of each text, computed in steps.

    :param compute: computes a step, of each of its inputs and the rows
    :param texts: the inputs of each text, each with a row per token
    """
    starts, parts = [0] * len(texts), [list[Tensor]() for _ in texts]
    for lengths in steps:
        spans = list(zip(texts, starts, lengths, strict=True))
        inputs = [
            torch.cat([text[each][start : start + n] for text, start, n in spans]) for each in range(len(texts[0]))
        ]
        out = compute(*inputs, rows_of(lengths, starts, slots))
        for own, part in zip(parts, torch.split(out, list(lengths)), strict=True):
            own.append(part)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    return [torch.cat(own) for own in parts]


def naive_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out = []
    for t in range(len(x)):
        first = t - KERNEL + 1
        out.append(bias + sum(weight[:, k] * x[first + k] for k in range(KERNEL) if first + k >= 0))
    return torch.stack(out)


def naive_delta(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor
) -> tuple[Tensor, Tensor]:
    """Follow the rule's definition, token by token and head by head; return the outputs and the states."""
    outputs = torch.empty_like(value)
    states = torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM, dtype=value.dtype)
    for t in range(len(value)):
        for head in range(VALUE_HEADS):
            source = head // (VALUE_HEADS // KEY_HEADS)
            k, q = (each / (each.square().sum() + 1e-6).sqrt() for each in (key[t, source], query[t, source]))
            state = states[head] * log_decay[t, head].exp()
            state = state + torch.outer(k, strength[t, head] * (value[t, head] - k @ state))
            states[head] = state
            outputs[t, head] = q / KEY_DIM**0.5 @ state
    return outputs, states


@pytest.mark.parametrize("name", STEPS)
def test_short_conv_over_steps(name: str) -> None:
    steps = STEPS[name]
    num_rows = len(steps[0])
    slots = [5, 0, 3][:num_rows]
    texts = random_tensors(1, *((sum(step[row] for step in steps), CHANNELS) for row in range(num_rows)))
    weight, bias = random_tensors(2, (CHANNELS, KERNEL), (CHANNELS,))
    pool = torch.full((NUM_SLOTS, KERNEL - 1, CHANNELS), torch.nan, dtype=torch.float64)
    outputs = in_steps(
        lambda x, rows: short_conv(x, weight, bias, pool, rows), [[text] for text in texts], steps, slots
    )
    for text, own, slot in zip(texts, outputs, slots, strict=True):
        torch.testing.assert_close(own, naive_conv(text, weight, bias), rtol=1e-12, atol=1e-12)
        kept = torch.cat([text.new_zeros(KERNEL - 1, CHANNELS), text])[-(KERNEL - 1) :]
        torch.testing.assert_close(pool[slot], kept, rtol=0, atol=0)
    unused = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    assert pool[unused].isnan().all()


@pytest.mark.parametrize("name", STEPS)
def test_gated_delta_rule_over_steps(name: str) -> None:
    steps = STEPS[name]
    num_rows = len(steps[0])
    slots = [5, 0, 3][:num_rows]
    texts = []
    for row in range(num_rows):
        length = sum(step[row] for step in steps)
        query, key, value, decay, strength = random_tensors(
            row,
            (length, KEY_HEADS, KEY_DIM),
            (length, KEY_HEADS, KEY_DIM),
            (length, VALUE_HEADS, VALUE_DIM),
            (length, VALUE_HEADS),
            (length, VALUE_HEADS),
        )
        texts.append([query, key, value, -decay.exp() / 4, strength.sigmoid()])
    pool = torch.full((NUM_SLOTS, VALUE_HEADS, KEY_DIM, VALUE_DIM), torch.nan, dtype=torch.float64)
    found = in_steps(lambda q, k, v, d, s, rows: gated_delta_rule(q, k, v, d, s, pool, rows), texts, steps, slots)
    for text, own, slot in zip(texts, found, slots, strict=True):
        outputs, states = naive_delta(*text)
        torch.testing.assert_close(own, outputs, rtol=0, atol=1e-10)
        torch.testing.assert_close(pool[slot], states, rtol=0, atol=1e-10)
    unused = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    assert pool[unused].isnan().all()


def naive_scan(x: Tensor, write: Tensor, read: Tensor, step: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Follow the definition of the state space, token by token and head by head; return the outputs and the states."""
    outputs = torch.empty_like(x)
    states = torch.zeros(HEADS, STATE_SIZE, HEAD_DIM, dtype=x.dtype)
    for t in range(len(x)):
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            written = torch.outer(write[t, group], step[t, head] * x[t, head])
            states[head] = states[head] * log_decay[t, head].exp() + written
            outputs[t, head] = read[t, group] @ states[head]
    return outputs, states


@pytest.mark.parametrize("name", STEPS)
def test_selective_scan_over_steps(name: str) -> None:
    steps = STEPS[name]
    num_rows = len(steps[0])
    slots = [5, 0, 3][:num_rows]
    texts = []
    for row in range(num_rows):
        length = sum(step[row] for step in steps)
        x, write, read, size, decay = random_tensors(
            row,
            (length, HEADS, HEAD_DIM),
            (length, GROUPS, STATE_SIZE),
            (length, GROUPS, STATE_SIZE),
            (length, HEADS),
            (length, HEADS),
        )
        texts.append([x, write, read, size.exp(), -decay.exp() / 4])
    pool = torch.full((NUM_SLOTS, HEADS, STATE_SIZE, HEAD_DIM), torch.nan, dtype=torch.float64)
    found = in_steps(lambda x, w, r, s, d, rows: selective_scan(x, w, r, s, d, pool, rows), texts, steps, slots)
    for text, own, slot in zip(texts, found, slots, strict=True):
        outputs, states = naive_scan(*text)
        torch.testing.assert_close(own, outputs, rtol=0, atol=1e-10)
        torch.testing.assert_close(pool[slot], states, rtol=0, atol=1e-10)
    unused = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    assert pool[unused].isnan().all()


def test_strong_decay_of_a_state_space_loses_no_digits() -> None:
    """Sums of the logarithms since a chunk's start reach -1000, whose differences float32 holds to 1e-4 alone."""
    x, write, read, size = random_tensors(
        4, (120, HEADS, HEAD_DIM), (120, GROUPS, STATE_SIZE), (120, GROUPS, STATE_SIZE), (120, HEADS)
    )
    decay = -torch.linspace(1e-3, 32, 120 * HEADS, dtype=torch.float64).view(120, HEADS)
    pool = torch.zeros(1, HEADS, STATE_SIZE, HEAD_DIM)
    x, write, read, size, decay = (each.float() for each in (x, write, read, size, decay))
    out = selective_scan(x, write, read, size, decay, pool, rows_of([120], [0], [0]))
    expected, states = naive_scan(*(each.double() for each in (x, write, read, size, decay)))
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=5e-6)
    torch.testing.assert_close(pool[0].double(), states, rtol=1e-6, atol=5e-6)


def test_strong_decay_of_the_gated_delta_rule_loses_no_digits() -> None:
    """As above, over several chunks of tokens of which every other one decays by next to nothing."""
    query, key, value, decay, strength = random_tensors(
        5,
        (300, KEY_HEADS, KEY_DIM),
        (300, KEY_HEADS, KEY_DIM),
        (300, VALUE_HEADS, VALUE_DIM),
        *[(300, VALUE_HEADS)] * 2,
    )
    decay = -20 * decay.sigmoid()
    decay[::2] *= 1e-3
    query, key, value, decay, strength = (each.float() for each in (query, key, value, decay, strength.sigmoid()))
    pool = torch.zeros(1, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    out = gated_delta_rule(query, key, value, decay, strength, pool, rows_of([300], [0], [0]))
    expected, states = naive_delta(*(each.double() for each in (query, key, value, decay, strength)))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(pool[0].double(), states, rtol=0, atol=1e-6)


def test_strong_decay_does_not_overflow() -> None:
    """Between far tokens of a chunk almost nothing is left, and what is masked would be infinite."""
    query, key, value = random_tensors(
        3, (90, KEY_HEADS, KEY_DIM), (90, KEY_HEADS, KEY_DIM), (90, VALUE_HEADS, VALUE_DIM)
    )
    decay = torch.full((90, VALUE_HEADS), -50.0, dtype=torch.float64)
    strength = torch.ones(90, VALUE_HEADS, dtype=torch.float64)
    pool = torch.zeros(1, VALUE_HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float32)
    out = gated_delta_rule(query.float(), key.float(), value.float(), decay, strength, pool, rows_of([90], [0], [0]))
    expected, _ = naive_delta(query, key, value, decay, strength)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
