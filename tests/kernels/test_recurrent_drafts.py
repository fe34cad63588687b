"""Drafts in recurrent layers: whatever guesses come between, a text's tokens read what they read without them, by torch
operations and in native calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import pytest
import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from native_weights import every_level, needs_library, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.drafted_rule import apply_rule
from paged_sdk.kernels.gated_delta import gated_delta_rule
from paged_sdk.kernels.mamba2 import selective_scan
from paged_sdk.kernels.native.recurrent import NativeGatedDelta, NativeMamba2, NativeShortConv
from paged_sdk.kernels.recurrent_step import RecurrentRows
from paged_sdk.kernels.row_drafts import RowDrafts
from paged_sdk.kernels.short_conv import short_conv

CPU: Final = torch.device("cpu")
LENGTHS: Final = (60, 1, 41, 25)
MOST: Final = 5
HEADS, GROUPS, DIM, STATE, TAPS = 4, 2, 16, 20, 4
DELTA: Final = 2 * GROUPS * DIM + HEADS * DIM
SCAN: Final = HEADS * DIM + 2 * GROUPS * STATE
Step = Sequence[tuple[int, int, int, int]]
"""Text, known tokens, right drafts and wrong drafts of each row."""


@frozen
class Layer:
    """Computes some tokens with the states of a list, one of each of ``shapes`` per slot.

    :ivar columns: widths of its inputs
    """

    columns: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    forward: Callable[[Sequence[Tensor], Sequence[Tensor], RecurrentRows], Tensor]


def uniform(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def torch_conv(inputs: Sequence[Tensor], states: Sequence[Tensor], rows: RecurrentRows) -> Tensor:
    return short_conv(inputs[0], uniform(DELTA, TAPS), None, states[0], rows)


def torch_delta(inputs: Sequence[Tensor], states: Sequence[Tensor], rows: RecurrentRows) -> Tensor:
    def rule(inputs: Sequence[Tensor], pool: Tensor, rows: RecurrentRows) -> Tensor:
        query, key, value = torch.split(inputs[0], [GROUPS * DIM, GROUPS * DIM, HEADS * DIM], -1)
        strength, decay = inputs[1].chunk(2, -1)
        heads = [torch.unflatten(each, 1, (-1, DIM)) for each in (query, key, value)]
        return gated_delta_rule(heads[0], heads[1], heads[2], -F.softplus(decay), strength.sigmoid(), pool, rows)

    return apply_rule(rule, inputs[:2], states[0], states[1], rows).flatten(1) * inputs[2]


def torch_scan(inputs: Sequence[Tensor], states: Sequence[Tensor], rows: RecurrentRows) -> Tensor:
    def rule(inputs: Sequence[Tensor], pool: Tensor, rows: RecurrentRows) -> Tensor:
        x, write, read = torch.split(inputs[0], [HEADS * DIM, GROUPS * STATE, GROUPS * STATE], -1)
        size = F.softplus(inputs[1])
        write, read = (torch.unflatten(each, 1, (GROUPS, -1)) for each in (write, read))
        return selective_scan(torch.unflatten(x, 1, (-1, DIM)), write, read, size, -size, pool, rows)

    return apply_rule(rule, inputs[:2], states[0], states[1], rows).flatten(1) * inputs[2]


def native_conv(inputs: Sequence[Tensor], states: Sequence[Tensor], rows: RecurrentRows) -> Tensor:
    conv = NativeShortConv(uniform(DELTA, TAPS).float(), None, silu=True)
    assert rows.native is not None
    return conv.forward(inputs[0], states[0], rows.native)


def native_delta(inputs: Sequence[Tensor], states: Sequence[Tensor], rows: RecurrentRows) -> Tensor:
    rule = NativeGatedDelta(
        GROUPS, DIM, rate=uniform(HEADS), step_bias=uniform(HEADS), norm_weight=uniform(DIM), norm_eps=1e-6
    )
    assert rows.native is not None
    return rule.forward(inputs[0], inputs[1], inputs[2], states[0], states[1], rows.native)


def native_scan(inputs: Sequence[Tensor], states: Sequence[Tensor], rows: RecurrentRows) -> Tensor:
    weights = {name: uniform(HEADS) for name in ("rate", "step_bias", "skip")}
    rule = NativeMamba2(DIM, STATE, GROUPS, **weights, norm_weight=None, norm_eps=1e-6, gate_first=True)
    assert rows.native is not None
    return rule.forward(inputs[0], inputs[1], inputs[2], states[0], states[1], rows.native)


CONV_SHAPES: Final = ((TAPS - 1 + MOST, DELTA),)
DELTA_SHAPES: Final = ((HEADS, DIM, DIM), (MOST, DELTA + 2 * HEADS))
SCAN_SHAPES: Final = ((HEADS, STATE, DIM), (MOST, SCAN + HEADS))
TORCH: Final = {
    "conv": Layer((DELTA,), CONV_SHAPES, torch_conv),
    "delta": Layer((DELTA, 2 * HEADS, HEADS * DIM), DELTA_SHAPES, torch_delta),
    "scan": Layer((SCAN, HEADS, HEADS * DIM), SCAN_SHAPES, torch_scan),
}
NATIVE: Final = {
    "conv": Layer((DELTA,), CONV_SHAPES, native_conv),
    "delta": Layer((DELTA, 2 * HEADS, HEADS * DIM), DELTA_SHAPES, native_delta),
    "scan": Layer((SCAN, HEADS, HEADS * DIM), SCAN_SHAPES, native_scan),
}


def texts_of(layer: Layer, dtype: torch.dtype) -> list[list[Tensor]]:
    """Return each text's inputs, and behind them as many wrong ones as a step may need."""
    generator = torch.Generator().manual_seed(3)
    return [
        [torch.randn(length + MOST, width, generator=generator).to(dtype) for width in layer.columns]
        for length in LENGTHS
    ]


def steps_of(seed: int) -> list[Step]:
    """Draw steps: chunks, decodes, and decodes with drafts, all or some or none of which are right."""
    chosen, computed, steps = random.Random(seed), [0] * len(LENGTHS), list[Step]()
    most = MOST - 1  # so that the token before them may be a draft, too
    while any(count < length for count, length in zip(computed, LENGTHS, strict=True)):
        rows = []
        for text, (count, length) in enumerate(zip(computed, LENGTHS, strict=True)):
            left = length - count
            if not left or chosen.random() < 0.2:
                continue
            known = chosen.randint(1, min(left, 20 if chosen.random() < 0.3 else 1))
            right = wrong = 0
            if count and chosen.random() < 0.8:
                right = chosen.randint(0, min(left - known, most))
                wrong = chosen.randint(0, most - right)
            rows.append((text, known, right, wrong))
            computed[text] += known + right
        chosen.shuffle(rows)
        steps += [rows] if rows else []
    return steps


def run(
    layer: Layer,
    steps: Sequence[Step],
    dtype: torch.dtype,
    isa: str | None = None,
    num_threads: int = 0,
    *,
    one_by_one: bool = False,
) -> list[Tensor]:
    """Return what the tokens of each text read.

    :param num_threads: of native kernels; 0: torch operations
    :param one_by_one: whether drafts have a step each, as those that a draft model makes, for which the last known
        token is a draft, too
    """
    wide = torch.promote_types(dtype, torch.float32)
    kept_dtype = dtype if len(layer.shapes) == 1 else wide
    states = [torch.full((len(LENGTHS), *shape), torch.nan, dtype=kept_dtype) for shape in layer.shapes]
    texts, computed, pending = texts_of(layer, dtype), [0] * len(LENGTHS), [0] * len(LENGTHS)
    reads: list[list[Tensor]] = [[] for _ in LENGTHS]

    def compute(rows: Sequence[tuple[int, int, list[int], int]]) -> list[Tensor]:
        """Compute rows, each of a text, its start, the places of its inputs and its drafts."""
        drafts = RowDrafts(
            tuple(pending[row[0]] for row in rows),
            tuple(max(row[3] - len(row[2]), 0) for row in rows),
            tuple(min(row[3], len(row[2])) for row in rows),
        )
        for row in rows:
            pending[row[0]] = 0
        counts = [len(row[2]) for row in rows]
        out = layer.forward(
            [torch.cat([texts[row[0]][each][row[2]] for row in rows]) for each in range(len(layer.columns))],
            states,
            RecurrentRows(
                [row[0] for row in rows],
                [row[1] for row in rows],
                counts,
                drafts=drafts if drafts.most else None,
                device=CPU,
                workspace=workspace(isa, num_threads) if num_threads else None,
            ),
        )
        return list(torch.split(out, counts))

    for step in steps:
        rows = []
        for text, known, right, wrong in step:
            first, end = computed[text], computed[text] + known + right
            places = [*range(first, end), *range(LENGTHS[text], LENGTHS[text] + wrong)]
            rows.append((text, first, places, right + wrong))
        if one_by_one:
            begun = [
                (text, first, places[:known], 1)
                for (text, first, places, _), (_, known, *_) in zip(rows, step, strict=True)
            ]
            parts = compute(begun)
            for n in range(1, MOST):
                later = [
                    (row, (text, first + known + n - 1, [places[known + n - 1]], n + 1))
                    for row, ((text, first, places, drafts), (_, known, *_)) in enumerate(zip(rows, step, strict=True))
                    if n <= drafts
                ]
                if later:
                    for (row, _), part in zip(later, compute([each for _, each in later]), strict=True):
                        parts[row] = torch.cat([parts[row], part])
        else:
            parts = compute(rows)
        for (text, known, right, _), part in zip(step, parts, strict=True):
            reads[text].append(part[: known + right])
            computed[text] += known + right
            pending[text] = right + one_by_one
    assert computed == list(LENGTHS)
    return [torch.cat(each) for each in reads]


WHOLE: Final = [[(text, length, 0, 0) for text, length in enumerate(LENGTHS)]]


@pytest.mark.parametrize("kind", TORCH)
def test_torch_operations(kind: str) -> None:
    layer = TORCH[kind]
    expected = run(layer, WHOLE, torch.float64)
    for seed in range(12):
        got = run(layer, steps_of(seed // 2), torch.float64, one_by_one=seed % 2 > 0)
        for each, whole in zip(got, expected, strict=True):
            torch.testing.assert_close(each, whole, rtol=1e-9, atol=1e-9)


@needs_library
@pytest.mark.parametrize("kind", NATIVE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_level
def test_native_calls_to_the_bit(kind: str, dtype: torch.dtype, isa: str) -> None:
    layer = NATIVE[kind]
    expected = run(layer, WHOLE, dtype, isa, 1)
    assert all(each.isfinite().all() for each in expected)
    for seed in range(4):
        got = run(layer, steps_of(seed), dtype, isa, 1 + seed // 2, one_by_one=seed % 2 > 0)
        assert all(map(torch.equal, got, expected))


@needs_library
def test_rows_divided_by_form_keep_their_drafts() -> None:
    """The first part of a row takes the state through earlier drafts, the last one has the new ones."""
    rows = RecurrentRows(
        [2, 0, 1],
        [4, 9, 7],
        [3, 4, 2],
        drafts=RowDrafts((1, 0, 2), (0, 0, 0), (0, 2, 1)),
        device=CPU,
        workspace=workspace(),
    )
    assert rows.native is not None
    tokens = torch.tensor([True, True, True, True, False, False, False, False, False])
    first, last = rows.native.part(tokens), rows.native.part(~tokens)
    assert first._drafts == RowDrafts((1, 0), (0, 0), (0, 0))
    assert last._drafts == RowDrafts((0, 2), (0, 0), (2, 1))
    assert rows.native.part(torch.arange(9) < 0)._drafts is None
    for part, edges in ((first, [0, 3, 4]), (last, [0, 3, 5])):
        assert [after - before for before, after in pairwise(edges)] == torch.tensor(part._kept[2]).diff().tolist()


def test_all_numbers_of_divided_rows_are_int64() -> None:
    """Some devices have no float64."""
    drafts = RowDrafts((1, 0, 0), (0, 2, 0), (1, 1, 2))
    rows = RecurrentRows([2, 0, 1], [4, 9, 0], [3, 1, 2], drafts=drafts, device=CPU).divided
    numbers = [
        *rows.kept,
        rows.cleared,
        rows.known_tokens,
        rows.guessed_slots,
        rows.guessed_tokens,
        rows.own,
        *rows.new,
    ]
    for each in (rows.known, rows.guessed):
        assert each is not None
        numbers += [each.slots, *map(torch.from_numpy, each._on_host)]
    assert {each.dtype for each in numbers} == {torch.int64}
    assert rows.cleared.tolist() == [1]


@needs_library
def test_more_drafts_than_there_is_room_for() -> None:
    rows = RecurrentRows(
        [0], [3], [MOST + 2], drafts=RowDrafts((0,), (0,), (MOST + 1,)), device=CPU, workspace=workspace()
    )
    for layer in NATIVE.values():
        inputs = [torch.zeros(MOST + 2, width) for width in layer.columns]
        states = [torch.zeros(1, *shape) for shape in layer.shapes]
        with pytest.raises(ConfigError, match="rows of at most 5 drafts"):
            layer.forward(inputs, states, rows)
    assert rows.native is not None
    with pytest.raises(ConfigError, match="rows with drafts of 2 threads"):
        rows.native.check_drafts(MOST + 1, workspace(None, 2))
