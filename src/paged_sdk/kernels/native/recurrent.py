"""Computes recurrent layers between their projections, each in one native call for all rows of a step.

A token's result depends neither on how its sequence was cut into steps nor on the other rows.
"""

from __future__ import annotations

from ctypes import byref
from typing import Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import check_matrix, float_vector, pointer
from paged_sdk.kernels.native.structures import WEIGHT_DTYPES
from paged_sdk.kernels.native.structures_recurrent import GatedDelta, Mamba2, RecurrentTokens, ShortConv
from paged_sdk.kernels.row_drafts import RowDrafts

__all__ = ["NativeGatedDelta", "NativeMamba2", "NativeRecurrentRows", "NativeShortConv"]

_WIDTH: Final = 16
_MOST_TAPS: Final = 8
_MOST_DIM: Final = 256
_MOST_STATE: Final = _MOST_DIM**2
_STATE_ROWS: Final = 4
_Args = TypeVar("_Args", GatedDelta, Mamba2)


class NativeRecurrentRows:
    """Holds a step's rows in the kernels' form, and the threads that compute them.

    :param slots: ``[num_rows]`` int64, contiguous: the slot of each row's state
    :param is_new: ``[num_rows]`` bool, contiguous: whether the state before the row is zero
    :param lengths: number of tokens of each row, at least 1
    :param drafts: the rows' drafts; None: there are none
    :ivar num_drafts: most drafts of a row, of this step or of those that are replayed
    """

    def __init__(
        self,
        workspace: Workspace,
        slots: Tensor,
        is_new: Tensor,
        lengths: tuple[int, ...],
        drafts: RowDrafts | None = None,
    ) -> None:
        self.workspace = workspace
        self.num_tokens: int = sum(lengths)
        self.num_drafts: int = 0
        self._kept = slots, is_new, np.cumsum((0, *lengths), dtype=np.int64)
        self._drafts = drafts
        self.args: RecurrentTokens = RecurrentTokens(
            slots=slots.data_ptr(),
            is_new=is_new.data_ptr(),
            first_tokens=self._kept[2].ctypes.data,
            num_rows=len(lengths),
        )
        if drafts is not None:
            self.num_drafts = drafts.most
            counts = drafts.counts
            guessed = np.empty((workspace.num_threads, _MOST_STATE), dtype=np.float32)
            self._counts = counts, guessed
            self.args.num_replayed, self.args.num_earlier, self.args.num_drafts = (each.ctypes.data for each in counts)
            self.args.guessed = guessed.ctypes.data

    def check_drafts(self, most: int, workspace: Workspace) -> None:
        """Check that there is room for the rows' drafts.

        :param most: for how many drafts of a row states have room
        :param workspace: whose threads compute the rows
        :raises ConfigError: there is not
        """
        if self.num_drafts > most:
            raise ConfigError.of("rows", f"{self.num_drafts} drafts", f"rows of at most {most} drafts")
        if workspace.num_threads > self.workspace.num_threads:
            found = f"of {self.workspace.num_threads} threads"
            raise ConfigError.of("rows", found, f"rows with drafts of {workspace.num_threads} threads")

    def part(self, tokens: Tensor) -> NativeRecurrentRows:
        """Select some of the step's tokens, of which each row has the first ones or the last ones, or none.

        :param tokens: ``[num_tokens]`` bool: the selected tokens
        """
        slots, is_new, first_tokens = self._kept
        before = np.concatenate(([0], np.cumsum(tokens.numpy())))[first_tokens]
        lengths = np.diff(before)
        has_any = torch.from_numpy(lengths > 0)
        has_first = tokens[torch.from_numpy(first_tokens[:-1])]
        drafts = self._drafts
        if drafts is not None:
            has_last = tokens[torch.from_numpy(first_tokens[1:] - 1)]
            part = drafts.part(has_any.tolist(), begins=has_first.tolist(), ends=has_last.tolist())
            drafts = part if part.most else None
        return NativeRecurrentRows(
            self.workspace,
            slots[has_any],
            (is_new & has_first)[has_any],
            tuple(lengths[lengths > 0].tolist()),
            drafts,
        )


class NativeShortConv:
    """Computes a causal convolution of each channel by itself, with the gates before and after it and its activation.

    :param weight: ``[channels, kernel_size]``
    :param bias: ``[channels]`` or None
    :param silu: whether SiLU follows the convolution
    :ivar channels: number of channels
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, silu: bool) -> None:
        self.channels: int = weight.shape[0]
        self._taps = weight.shape[1]
        self._weight = weight.to(torch.float32).mT.contiguous()
        self._bias = float_vector("bias", bias, self.channels)
        self._silu = silu

    @staticmethod
    def serves(weight: Tensor) -> bool:
        """Return whether the kernel has this size and dtype."""
        channels, taps = weight.shape
        return weight.dtype in WEIGHT_DTYPES and channels % _WIDTH == 0 and taps <= _MOST_TAPS

    def most_drafts(self, pool: Tensor) -> int:
        """Return for how many drafts of a row a pool has room."""
        return pool.shape[1] - self._taps + 1

    def describe(self, pool: Tensor) -> ShortConv:
        """Fill the C structure, apart from what a step gives; this object and the pool must outlive it.

        :param pool: as in :meth:`forward`, in any dtype
        :raises ConfigError: the pool does not fit
        """
        most_drafts = self.most_drafts(pool)
        _check_pool(pool, (self._taps - 1 + max(most_drafts, 0), self.channels), tuple(WEIGHT_DTYPES))
        return ShortConv(
            weight=self._weight.data_ptr(),
            bias=pointer(self._bias),
            pool=pool.data_ptr(),
            channels=self.channels,
            taps=self._taps,
            silu=self._silu,
            pool_dtype=WEIGHT_DTYPES[pool.dtype],
            most_drafts=most_drafts,
        )

    def forward(
        self, x: Tensor, pool: Tensor, rows: NativeRecurrentRows, gates: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Compute ``gates[1] * conv(gates[0] * x)``, and keep each sequence's last inputs.

        :param x: ``[num_tokens, channels]`` float32, bfloat16 or float16, as are the gates
        :param pool: ``[num_slots, kernel_size - 1 + most_drafts, channels]`` of the same dtype, contiguous, changed in
            place
        :returns: ``[num_tokens, channels]``, contiguous
        :raises ConfigError: shapes, dtypes or strides do not fit
        """
        inputs: tuple[Tensor, ...] = (x,) if gates is None else (x, *gates)
        if len({each.stride() for each in inputs}) > 1:
            inputs = tuple(each.contiguous() for each in inputs)
        for each in inputs:
            check_matrix("x", each, (rows.num_tokens, self.channels), (pool.dtype,))
        out = torch.empty(x.shape, dtype=x.dtype)
        args = self.describe(pool)
        _set_rows(args, rows)
        args.x, args.x_stride = inputs[0].data_ptr(), inputs[0].stride(0)
        args.out, args.out_stride = out.data_ptr(), self.channels
        args.dtype, args.num_threads = WEIGHT_DTYPES[x.dtype], rows.workspace.num_threads
        if gates is not None:
            args.gate_in, args.gate_out = (each.data_ptr() for each in inputs[1:])
        library = rows.workspace.library
        library.functions.paged_short_conv(library.level, byref(args))
        return out


class NativeGatedDelta:
    """Computes the gated delta rule, and its output's norm and gates.

    :param num_key_heads: heads of queries, and of keys
    :param rate: ``[num_value_heads]``: each head's rate of decay
    :param step_bias: ``[num_value_heads]``: added to decays before softplus
    :param norm_weight: ``[value_dim]``: of the RMSNorm of each head's output
    :ivar channels: width of queries, keys and values
    :ivar width: width of the output, and of the gates
    :ivar num_rates: number of write strengths and decays
    """

    def __init__(
        self,
        num_key_heads: int,
        key_dim: int,
        *,
        rate: Tensor,
        step_bias: Tensor,
        norm_weight: Tensor,
        norm_eps: float,
    ) -> None:
        heads, dim = len(rate), len(norm_weight)
        self._state = heads, key_dim, dim
        self.width: int = heads * dim
        self.channels: int = 2 * num_key_heads * key_dim + self.width
        self.num_rates: int = 2 * heads
        self._rate, self._step_bias = float_vector("rate", rate, heads), float_vector("step_bias", step_bias, heads)
        self._norm_weight = float_vector("norm_weight", norm_weight, dim)
        self._args = GatedDelta(
            rate=pointer(self._rate),
            step_bias=pointer(self._step_bias),
            norm_weight=pointer(self._norm_weight),
            norm_eps=norm_eps,
            key_heads=num_key_heads,
            value_heads=heads,
            key_dim=key_dim,
            value_dim=dim,
        )

    @staticmethod
    def serves(dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
        """Return whether the kernel has these sizes and this dtype."""
        return dtype in WEIGHT_DTYPES and all(dim % _WIDTH == 0 and dim <= _MOST_DIM for dim in (key_dim, value_dim))

    @property
    def input_width(self) -> int:
        """Return the width of queries, keys, values and gates."""
        return self.channels + self.width

    def describe(self, pool: Tensor, kept: Tensor) -> GatedDelta:
        """Fill the C structure, apart from what a step gives; this object and the tensors must outlive it.

        :param pool: as in :meth:`forward`, as is ``kept``
        :raises ConfigError: they do not fit
        """
        return _with_states(self._args, pool, self._state, kept, self.channels + self.num_rates)

    def forward(
        self, inputs: Tensor, rates: Tensor, gates: Tensor, pool: Tensor, kept: Tensor, rows: NativeRecurrentRows
    ) -> Tensor:
        """Apply the rule to the tokens of each sequence, and keep the states.

        :param inputs: ``[num_tokens, channels]`` float32, bfloat16 or float16: queries, keys and values
        :param rates: ``[num_tokens, 2 * num_value_heads]`` of the same dtype: write strengths before the sigmoid, and
            decays before step_bias and softplus
        :param gates: ``[num_tokens, num_value_heads * value_dim]`` of the same dtype, before SiLU
        :param pool: ``[num_slots, num_value_heads, key_dim, value_dim]`` float32, contiguous, changed in place
        :param kept: ``[num_slots, most_drafts, channels + num_rates]`` float32, contiguous, changed in place: the
            inputs and rates of drafts
        :returns: like ``gates``, contiguous
        :raises ConfigError: shapes, dtypes or strides do not fit
        """
        tokens, own = rows.num_tokens, (inputs.dtype,)
        check_matrix("inputs", inputs, (tokens, self.channels))
        check_matrix("rates", rates, (tokens, self.num_rates), own)
        check_matrix("gates", gates, (tokens, self.width), own)
        out = torch.empty(gates.shape, dtype=gates.dtype)
        args, library = self.describe(pool, kept), rows.workspace.library
        _set_rows(args, rows)
        args.inputs, args.inputs_stride = inputs.data_ptr(), inputs.stride(0)
        args.rates, args.rates_stride = rates.data_ptr(), rates.stride(0)
        args.gates, args.gates_stride = gates.data_ptr(), gates.stride(0)
        args.out = out.data_ptr()
        args.dtype, args.num_threads = WEIGHT_DTYPES[inputs.dtype], rows.workspace.num_threads
        library.functions.paged_gated_delta(library.level, byref(args))
        return out


class NativeMamba2:
    """Computes Mamba-2's selective state space, and its output's skip connection, gates and norm.

    :param state_size: size of B and C, of which each of ``num_groups`` groups of heads has its own
    :param rate: ``[num_heads]``: each head's rate of decay
    :param step_bias: ``[num_heads]``: added to step sizes before softplus
    :param skip: ``[num_heads]``: multiplies inputs that are added to the output
    :param norm_weight: ``[num_heads * head_dim]``: of the RMSNorm of each group's output; None: no norm
    :param gate_first: whether the norm is of the gated output
    :ivar channels: width of inputs, B and C
    :ivar width: width of the output, and of the gates
    """

    num_rates: Final = 0  # step sizes are among the inputs

    def __init__(
        self,
        head_dim: int,
        state_size: int,
        num_groups: int,
        *,
        rate: Tensor,
        step_bias: Tensor,
        skip: Tensor,
        norm_weight: Tensor | None,
        norm_eps: float,
        gate_first: bool,
    ) -> None:
        heads = len(rate)
        self._state = heads, state_size, head_dim
        self.width: int = heads * head_dim
        self.channels: int = self.width + 2 * num_groups * state_size
        self._rate, self._step_bias = float_vector("rate", rate, heads), float_vector("step_bias", step_bias, heads)
        self._skip = float_vector("skip", skip, heads)
        self._norm_weight = float_vector("norm_weight", norm_weight, self.width)
        self._args = Mamba2(
            rate=pointer(self._rate),
            step_bias=pointer(self._step_bias),
            skip=pointer(self._skip),
            norm_weight=pointer(self._norm_weight),
            norm_eps=norm_eps,
            heads=heads,
            head_dim=head_dim,
            groups=num_groups,
            state_size=state_size,
            norm_size=head_dim if norm_weight is None else self.width // num_groups,
            gate_first=gate_first,
        )

    @staticmethod
    def serves(dtype: torch.dtype, head_dim: int, state_size: int) -> bool:
        """Return whether the kernel has these sizes and this dtype."""
        fits = head_dim % _WIDTH == 0 and state_size % _STATE_ROWS == 0 and max(head_dim, state_size) <= _MOST_DIM
        return dtype in WEIGHT_DTYPES and fits

    @property
    def input_width(self) -> int:
        """Return the width of gates, inputs, B, C and step sizes."""
        return self.width + self.channels + self._state[0]

    def describe(self, pool: Tensor, kept: Tensor) -> Mamba2:
        """Fill the C structure, apart from what a step gives; this object and the tensors must outlive it.

        :param pool: as in :meth:`forward`, as is ``kept``
        :raises ConfigError: they do not fit
        """
        return _with_states(self._args, pool, self._state, kept, self.channels + self._state[0])

    def forward(
        self, inputs: Tensor, steps: Tensor, gates: Tensor, pool: Tensor, kept: Tensor, rows: NativeRecurrentRows
    ) -> Tensor:
        """Take the states of the sequences through their tokens, and keep them.

        :param inputs: ``[num_tokens, channels]`` float32, bfloat16 or float16: inputs, B and C
        :param steps: ``[num_tokens, num_heads]`` of the same dtype: step sizes before step_bias and softplus
        :param gates: ``[num_tokens, num_heads * head_dim]`` of the same dtype, before SiLU
        :param pool: ``[num_slots, num_heads, state_size, head_dim]`` float32, contiguous, changed in place
        :param kept: ``[num_slots, most_drafts, channels + num_heads]`` float32, contiguous, changed in place: the
            inputs and steps of drafts
        :returns: like ``gates``, contiguous
        :raises ConfigError: shapes, dtypes or strides do not fit
        """
        tokens, own = rows.num_tokens, (inputs.dtype,)
        check_matrix("inputs", inputs, (tokens, self.channels))
        check_matrix("steps", steps, (tokens, self._state[0]), own)
        check_matrix("gates", gates, (tokens, self.width), own)
        read, out = (torch.empty(gates.shape, dtype=dtype) for dtype in (torch.float32, gates.dtype))
        args, library = self.describe(pool, kept), rows.workspace.library
        _set_rows(args, rows)
        args.inputs, args.inputs_stride = inputs.data_ptr(), inputs.stride(0)
        args.steps, args.steps_stride = steps.data_ptr(), steps.stride(0)
        args.gates, args.gates_stride = gates.data_ptr(), gates.stride(0)
        args.read, args.out = read.data_ptr(), out.data_ptr()
        args.dtype, args.num_threads = WEIGHT_DTYPES[inputs.dtype], rows.workspace.num_threads
        library.functions.paged_mamba2(library.level, byref(args))
        return out


def _with_states(args: _Args, pool: Tensor, shape: tuple[int, ...], kept: Tensor, width: int) -> _Args:
    """Return a copy of arguments with the states of a layer, and the inputs of drafts beside them."""
    _check_pool(pool, shape, (torch.float32,))
    most_drafts = kept.shape[1]
    _check_pool(kept, (most_drafts, width), (torch.float32,), name="kept")
    copied = type(args).from_buffer_copy(args)
    copied.pool, copied.kept, copied.most_drafts = pool.data_ptr(), kept.data_ptr(), most_drafts
    return copied


def _set_rows(args: ShortConv | GatedDelta | Mamba2, rows: NativeRecurrentRows) -> None:
    """Set the rows of a step.

    :raises ConfigError: one has more drafts than there is room for
    """
    rows.check_drafts(args.most_drafts, rows.workspace)
    args.rows = rows.args


def _check_pool(pool: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], name: str = "pool") -> None:
    if pool.shape[1:] != shape or pool.dtype not in dtypes or not pool.is_contiguous():
        found, known = f"{pool.dtype} {tuple(pool.shape)}", " or ".join(map(str, dtypes))
        raise ConfigError.of(name, found, f"contiguous {known} [num_slots, {', '.join(map(str, shape))}]")
