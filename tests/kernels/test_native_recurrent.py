"""Recurrent layers in one native call each, against torch operations in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from native_weights import every_level, needs_library, workspace
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.gated_delta import gated_delta_rule
from paged_sdk.kernels.mamba2 import selective_scan
from paged_sdk.kernels.native.recurrent import NativeGatedDelta, NativeMamba2, NativeRecurrentRows, NativeShortConv
from paged_sdk.kernels.recurrent_step import RecurrentRows
from paged_sdk.kernels.short_conv import short_conv

pytestmark = needs_library

CPU: Final = torch.device("cpu")
NUM_SLOTS: Final = 5
EPS: Final = 1e-6
KEY_HEADS, VALUE_HEADS = 2, 4
GROUPS, HEADS = 2, 6
# Slot, tokens before and tokens of each row.
STEPS: Final = {
    "decodes": [(3, 4, 1), (0, 0, 1), (2, 9, 1)],
    "mixed": [(4, 0, 37), (1, 5, 1), (0, 0, 1), (3, 7, 2)],
    "prefill": [(2, 0, 130)],
}
ROUNDING: Final = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
every_dtype = pytest.mark.parametrize("dtype", ROUNDING, ids=str)
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


def rows_of(step: Sequence[tuple[int, int, int]], isa: str | None = None, num_threads: int = 1) -> RecurrentRows:
    slots, starts, lengths = zip(*step, strict=True)
    return RecurrentRows(slots, starts, lengths, device=CPU, workspace=workspace(isa, num_threads))


def native(rows: RecurrentRows) -> NativeRecurrentRows:
    assert rows.native is not None
    return rows.native


def close(got: Tensor, expected: Tensor, *, times: float = 1.0) -> None:
    tolerance = ROUNDING[got.dtype] * times
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


class Delta:
    """Makes random inputs of the rule, and computes what it is to return."""

    def __init__(self, num_tokens: int, dtype: torch.dtype, key_dim: int, value_dim: int) -> None:
        generator = torch.Generator().manual_seed(num_tokens + key_dim)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.key_dim = key_dim
        self.width = VALUE_HEADS * value_dim
        self.channels = 2 * KEY_HEADS * key_dim + self.width
        # As in a model, gates are a part of the projection that the inputs come from.
        projected = random(num_tokens, self.channels + self.width).to(dtype)
        self.inputs, self.gates = torch.split(projected, [self.channels, self.width], -1)
        self.rates = (random(num_tokens, 2 * VALUE_HEADS) * 3).to(dtype)
        self.rate, self.step_bias, self.norm_weight = random(VALUE_HEADS).exp(), random(VALUE_HEADS), random(value_dim)
        self.pool = random(NUM_SLOTS, VALUE_HEADS, key_dim, value_dim)
        self.kept = torch.empty(NUM_SLOTS, 0, self.channels + 2 * VALUE_HEADS)
        self.native = NativeGatedDelta(
            KEY_HEADS,
            key_dim,
            rate=self.rate,
            step_bias=self.step_bias,
            norm_weight=self.norm_weight,
            norm_eps=EPS,
        )

    def expected(self, pool: Tensor, rows: RecurrentRows) -> Tensor:
        size = KEY_HEADS * self.key_dim
        query, key, value = torch.split(self.inputs.double(), [size, size, self.width], -1)
        strength, decay = self.rates.double().chunk(2, -1)
        read = gated_delta_rule(
            torch.unflatten(query, -1, (KEY_HEADS, -1)),
            torch.unflatten(key, -1, (KEY_HEADS, -1)),
            torch.unflatten(value, -1, (VALUE_HEADS, -1)),
            -self.rate * F.softplus(decay + self.step_bias),
            strength.sigmoid(),
            pool,
            rows,
        )
        normed = F.rms_norm(read, read.shape[-1:], self.norm_weight.double(), EPS)
        return normed.flatten(1) * F.silu(self.gates.double())


@every_level
@every_dtype
@every_step
@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("is_gated", [False, True])
def test_short_conv(
    isa: str, dtype: torch.dtype, step: list[tuple[int, int, int]], taps: int, *, is_gated: bool
) -> None:
    channels, num_tokens = 208, sum(row[2] for row in step)
    generator = torch.Generator().manual_seed(taps)
    b, c, x = torch.randn(num_tokens, 3 * channels, generator=generator).to(dtype).chunk(3, -1)
    weight = torch.randn(channels, taps, generator=generator).to(dtype)
    bias = torch.randn(channels, generator=generator).to(dtype) if is_gated else None
    pool = torch.randn(NUM_SLOTS, taps - 1, channels, generator=generator).to(dtype)
    wide, rows = pool.double(), rows_of(step, isa)
    conv = NativeShortConv(weight, bias, silu=not is_gated)
    got = conv.forward(x, pool, native(rows), (b, c) if is_gated else None)
    inputs = b * x if is_gated else x  # rounded
    wide_bias = None if bias is None else bias.double()
    expected = short_conv(inputs.double(), weight.double(), wide_bias, wide, rows)
    close(got, c.double() * expected if is_gated else F.silu(expected), times=4)
    assert torch.equal(pool.double(), wide)


@every_level
@every_dtype
@every_step
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 48), (128, 32)])
def test_gated_delta(
    isa: str, dtype: torch.dtype, step: list[tuple[int, int, int]], key_dim: int, value_dim: int
) -> None:
    delta = Delta(sum(row[2] for row in step), dtype, key_dim, value_dim)
    rows, wide = rows_of(step, isa), delta.pool.double()
    expected = delta.expected(wide, rows)
    got = delta.native.forward(delta.inputs, delta.rates, delta.gates, delta.pool, delta.kept, native(rows))
    close(got, expected, times=20 if dtype is torch.float32 else 2)
    close(delta.pool, wide, times=20)


class Mamba:
    """Makes random inputs of a state space, and computes what it is to return.

    :param has_norm: whether the output is normalized
    """

    def __init__(
        self, num_tokens: int, dtype: torch.dtype, head_dim: int, state_size: int, *, has_norm: bool, gate_first: bool
    ) -> None:
        generator = torch.Generator().manual_seed(num_tokens + head_dim)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.sizes = [HEADS * head_dim, GROUPS * state_size, GROUPS * state_size]
        self.gate_first = gate_first
        # As in a model, all are parts of one projection.
        projected = random(num_tokens, self.sizes[0] + sum(self.sizes) + HEADS).to(dtype)
        self.gates, self.inputs, self.steps = torch.split(projected, [self.sizes[0], sum(self.sizes), HEADS], -1)
        self.rate, self.step_bias, self.skip = random(HEADS).exp(), random(HEADS), random(HEADS)
        self.norm_weight = random(self.sizes[0]) if has_norm else None
        self.pool = random(NUM_SLOTS, HEADS, state_size, head_dim)
        self.kept = torch.empty(NUM_SLOTS, 0, sum(self.sizes) + HEADS)
        self.native = NativeMamba2(
            head_dim,
            state_size,
            GROUPS,
            rate=self.rate,
            step_bias=self.step_bias,
            skip=self.skip,
            norm_weight=self.norm_weight,
            norm_eps=EPS,
            gate_first=gate_first,
        )

    def expected(self, pool: Tensor, rows: RecurrentRows) -> Tensor:
        x, write, read = torch.split(self.inputs.double(), self.sizes, -1)
        x = torch.unflatten(x, -1, (HEADS, -1))
        size = F.softplus(self.steps.double() + self.step_bias)
        write, read = (torch.unflatten(each, -1, (GROUPS, -1)) for each in (write, read))
        out = selective_scan(x, write, read, size, -self.rate * size, pool, rows) + x * self.skip.unsqueeze(-1)
        gates = F.silu(self.gates.double())
        if self.gate_first or self.norm_weight is None:
            return self._normed(out.flatten(1) * gates)
        return self._normed(out.flatten(1)) * gates

    def _normed(self, out: Tensor) -> Tensor:
        if self.norm_weight is None:
            return out
        groups = torch.unflatten(out, -1, (GROUPS, -1))
        return F.rms_norm(groups, groups.shape[-1:], None, EPS).flatten(1) * self.norm_weight


@every_level
@every_dtype
@every_step
@pytest.mark.parametrize(
    ("head_dim", "state_size", "has_norm", "gate_first"),
    [(16, 20, True, True), (64, 128, False, True), (48, 16, True, False)],
)
def test_mamba2(
    isa: str,
    dtype: torch.dtype,
    step: list[tuple[int, int, int]],
    head_dim: int,
    state_size: int,
    *,
    has_norm: bool,
    gate_first: bool,
) -> None:
    num_tokens = sum(row[2] for row in step)
    mamba = Mamba(num_tokens, dtype, head_dim, state_size, has_norm=has_norm, gate_first=gate_first)
    rows, wide = rows_of(step, isa), mamba.pool.double()
    expected = mamba.expected(wide, rows)
    got = mamba.native.forward(mamba.inputs, mamba.steps, mamba.gates, mamba.pool, mamba.kept, native(rows))
    close(got, expected, times=20 if dtype is torch.float32 else 2)
    close(mamba.pool, wide, times=20)


def test_neither_cuts_nor_company_nor_threads_change_a_bit() -> None:
    delta, channels = Delta(60, torch.bfloat16, 64, 64), 64
    mamba = Mamba(60, torch.bfloat16, 64, 32, has_norm=True, gate_first=True)
    weight = torch.randn(channels, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    conv = NativeShortConv(weight, None, silu=True)

    def run(parts: Sequence[list[tuple[int, int, int]]], num_threads: int = 1) -> list[Tensor]:
        """Compute tokens 0 to 39 in slot 1 and the others in slot 2."""
        pools = [torch.zeros(NUM_SLOTS, 3, channels, dtype=torch.bfloat16)]
        pools += [torch.zeros_like(each) for each in (delta.pool, mamba.pool)]
        outs = [torch.empty(60, channels, dtype=torch.bfloat16)]
        outs += [torch.empty_like(each) for each in (delta.gates, mamba.gates)]
        for step in parts:
            rows = native(rows_of(step, num_threads=num_threads))
            tokens = torch.cat([torch.arange(start, start + n) + (0 if slot == 1 else 40) for slot, start, n in step])
            inputs, gates = delta.inputs[tokens], delta.gates[tokens]
            outs[0][tokens] = conv.forward(inputs[:, :channels], pools[0], rows)
            outs[1][tokens] = delta.native.forward(inputs, delta.rates[tokens], gates, pools[1], delta.kept, rows)
            inputs, steps, gates = (each[tokens] for each in (mamba.inputs, mamba.steps, mamba.gates))
            outs[2][tokens] = mamba.native.forward(inputs, steps, gates, pools[2], mamba.kept, rows)
        return [*outs, *pools]

    whole = run([[(1, 0, 40), (2, 0, 20)]])
    assert all(each.isfinite().all() for each in whole)
    for parts in (
        [[(1, 0, 40)], [(2, 0, 20)]],
        [[(2, 0, 3)], [(2, 3, 17), (1, 0, 17)], [(1, 17, 1)], [(1, 18, 22)]],
    ):
        assert all(map(torch.equal, run(parts), whole))
    assert all(map(torch.equal, run([[(1, 0, 40), (2, 0, 20)]], num_threads=2), whole))


def test_what_is_not_finite_stays_in_its_row() -> None:
    delta = Delta(3, torch.float32, 32, 32)
    rows = native(rows_of(STEPS["decodes"]))
    expected = delta.native.forward(delta.inputs, delta.rates, delta.gates, delta.pool.clone(), delta.kept, rows)
    delta.inputs[1] = torch.nan
    got = delta.native.forward(delta.inputs, delta.rates, delta.gates, delta.pool, delta.kept, rows)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], expected[[0, 2]])
    mamba = Mamba(3, torch.float32, 32, 32, has_norm=True, gate_first=True)
    expected = mamba.native.forward(mamba.inputs, mamba.steps, mamba.gates, mamba.pool.clone(), mamba.kept, rows)
    mamba.inputs[1] = torch.nan
    got = mamba.native.forward(mamba.inputs, mamba.steps, mamba.gates, mamba.pool, mamba.kept, rows)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], expected[[0, 2]])


def test_what_does_not_fit_is_refused() -> None:
    assert not NativeShortConv.serves(torch.ones(24, 4))
    assert not NativeShortConv.serves(torch.ones(32, 9))
    assert not NativeShortConv.serves(torch.ones(32, 4, dtype=torch.float64))
    assert not NativeGatedDelta.serves(torch.float32, 128, 264)
    assert not NativeGatedDelta.serves(torch.float64, 128, 128)
    rows, conv = native(rows_of(STEPS["decodes"])), NativeShortConv(torch.ones(32, 4), None, silu=False)
    with pytest.raises(ConfigError, match="x"):
        conv.forward(torch.ones(2, 32), torch.ones(NUM_SLOTS, 3, 32), rows)
    with pytest.raises(ConfigError, match="pool"):
        conv.forward(torch.ones(3, 32), torch.ones(NUM_SLOTS, 2, 32), rows)
    delta = Delta(3, torch.float32, 32, 32)
    with pytest.raises(ConfigError, match="rates"):
        delta.native.forward(delta.inputs, delta.rates.half(), delta.gates, delta.pool, delta.kept, rows)
    with pytest.raises(ConfigError, match="pool"):
        delta.native.forward(delta.inputs, delta.rates, delta.gates, delta.pool.double(), delta.kept, rows)
    assert not NativeMamba2.serves(torch.float32, 24, 128)
    assert not NativeMamba2.serves(torch.float32, 64, 126)
    assert not NativeMamba2.serves(torch.float32, 64, 260)
    assert not NativeMamba2.serves(torch.float64, 64, 128)
    mamba = Mamba(3, torch.float32, 32, 32, has_norm=False, gate_first=True)
    with pytest.raises(ConfigError, match="steps"):
        mamba.native.forward(mamba.inputs, mamba.steps.half(), mamba.gates, mamba.pool, mamba.kept, rows)
    with pytest.raises(ConfigError, match="pool"):
        mamba.native.forward(mamba.inputs, mamba.steps, mamba.gates, mamba.pool.double(), mamba.kept, rows)
