"""Load a layer's experts from any of the layouts that checkpoints have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.native.ranks import ColumnJoin
from paged_sdk.kernels.quantized.grouped_matrix import every_other_row
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix
from paged_sdk.models.sharded import ColumnParallelExperts, RowParallelExperts, widths_of
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.parallel.shard import Shard
from paged_sdk.quant.experts import ExpertExtras, Experts
from paged_sdk.quant.policy import ExpertStack, NamedMatrix
from paged_sdk.weights.expert_stacks import are_transposed

__all__ = ["ExpertTensors", "load_experts"]


@frozen(kw_only=True)
class ExpertTensors:
    """Describes a layer's experts, and their names in a checkpoint.

    :ivar block: prefix of the tensors of each expert, which its number follows
    :ivar stacked: the tensors of all experts that a checkpoint may have instead: gate and up (or up alone), and down
    :ivar gate: name of an expert's gate, without ``.weight``; None: experts have no gates
    :ivar up: name of an expert's first matrix, beside its gate; ``down`` likewise of its last
    :ivar alternates: whether a tensor for all experts has gate and up interleaved, row by row
    :ivar swiglu: alpha and limit of experts with biases (:class:`~paged_sdk.quant.experts.ExpertExtras`); None: no
        biases
    :ivar activation: of the gates, without ``swiglu``; or of up, without gates
    """

    block: str
    stacked: tuple[str, str]
    gate: str | None
    up: str
    down: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    alternates: bool = False
    swiglu: tuple[float, float] | None = None
    activation: KernelActivation = "silu"

    @property
    def gate_up(self) -> tuple[str, ...]:
        """Return the names of the matrices that read an expert's input."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    def of_each(self, *names: str) -> Iterator[list[str]]:
        """Return the full names of some tensors, for each expert."""
        for expert in range(self.num_experts):
            yield [f"{self.block}.{expert}.{name}" for name in names]


@frozen(kw_only=True)
class _Part:
    """Describes a rank's part of every expert.

    :ivar neurons: the rows of gate and up; None: all
    :ivar outputs: the rows of down; None: all
    :ivar cols: returns a shard's columns of down; None: all
    :ivar join: gathers the neurons of all ranks; None: ranks do not gather
    :ivar widths: with ``join``, the number of outputs of each rank
    """

    neurons: slice | None = None
    outputs: slice | None = None
    cols: Callable[[Shard], slice] | None = None
    join: ColumnJoin | None = None
    widths: Tensor | None = None

    @classmethod
    def of(cls, loader: WeightLoader, experts: ExpertTensors) -> _Part:
        """Choose the part: if possible, ranks gather columns; otherwise they hold columns of down and sum outputs.

        Gathering needs divisions into multiples of 32 rows, which kernels compute together.
        """
        shard, group, size = loader.shard, loader.group, experts.intermediate_size
        if shard.is_whole:
            return cls()
        if loader.joins and group is not None and group.shared is not None:
            every = shard.every(shard.size)
            neurons, outputs = (
                [own for each in every if (own := each.expert_rows(count)) is not None]
                for count in (size, experts.hidden_size)
            )
            if len(neurons) == len(outputs) == len(every):
                join = ColumnJoin(group.shared, widths_of(neurons))
                own_neurons, own_outputs = (parts[shard.rank] for parts in (neurons, outputs))
                return cls(neurons=own_neurons, outputs=own_outputs, join=join, widths=widths_of(outputs))
            loader.note(
                f"Experts' outputs are added up: {size} neurons and {experts.hidden_size} outputs cannot be divided "
                f"among {len(every)} ranks by 32."
            )
        return cls(neurons=shard.neurons(size), cols=lambda shard: shard.neurons(size))

    def extras(
        self, gate_bias: Tensor, up_bias: Tensor, down_bias: Tensor, swiglu: tuple[float, float], shard: Shard
    ) -> ExpertExtras:
        """Return the rank's part of biases, ``[num_experts, neurons or outputs]``; in sums, rank 0 adds down's bias."""
        neurons, outputs = (slice(None) if rows is None else rows for rows in (self.neurons, self.outputs))
        adds_up = self.cols is not None and not shard.is_first
        return ExpertExtras(
            gate_bias=gate_bias[:, neurons].contiguous(),
            up_bias=up_bias[:, neurons].contiguous(),
            down_bias=torch.zeros_like(down_bias) if adds_up else down_bias[:, outputs].contiguous(),
            alpha=swiglu[0],
            limit=swiglu[1],
        )


def load_experts(loader: WeightLoader, experts: ExpertTensors) -> Experts:
    """Load a layer's experts. Until this returns, the layer's experts may be in memory twice.

    :raises CheckpointError: a tensor is missing or has another shape
    :raises ConfigError: ranks cannot divide the columns
    """
    part = _Part.of(loader, experts)
    alternates = experts.alternates and f"{experts.block}.0.{experts.down}.weight" not in loader
    made = (_alternating if alternates else _one_after_the_other)(loader, experts, part)
    if loader.group is None:
        return made
    if part.join is not None and part.widths is not None:
        return ColumnParallelExperts(made, loader.group, inputs=part.join.widths, outputs=part.widths)
    return RowParallelExperts(made, loader.group)


def _one_after_the_other(loader: WeightLoader, experts: ExpertTensors, part: _Part) -> Experts:
    hidden, size = experts.hidden_size, experts.intermediate_size
    transposed = _are_transposed(loader, experts)
    gate_up = _stack(
        loader,
        experts.stacked[0],
        [[f"{name}.weight" for name in names] for names in experts.of_each(*experts.gate_up)],
        (size, hidden),
        lambda named: loader.part(named, part.neurons, None),
        transposed=transposed,
    )
    down = _stack(
        loader,
        experts.stacked[1],
        [[f"{name}.weight"] for (name,) in experts.of_each(experts.down)],
        (hidden, size),
        lambda named: loader.part(named, part.outputs, part.cols),
        transposed=transposed,
    )
    extras = None
    if experts.swiglu is not None:
        assert experts.gate is not None, "SwiGLU has a gate"
        gate_bias, up_bias, down_bias = (
            torch.stack([loader.tensor(f"{each}.bias", outputs) for (each,) in experts.of_each(name)])
            for name, outputs in ((experts.gate, size), (experts.up, size), (experts.down, hidden))
        )
        extras = part.extras(gate_bias, up_bias, down_bias, experts.swiglu, loader.shard)
    return loader.experts(gate_up, down, extras=extras, join=part.join, activation=experts.activation)


def _stack(
    loader: WeightLoader,
    stacked: str,
    names: Sequence[Sequence[str]],
    shape: tuple[int, int],
    part: Callable[[NamedMatrix], NamedMatrix],
    *,
    transposed: bool,
) -> ExpertStack:
    """Read the experts' matrices that share an input, from one tensor or from one tensor per matrix.

    :param stacked: name of a tensor with all matrices, used if the checkpoint has it
    :param names: for each expert, the names of its matrices, used otherwise
    :param shape: shape of each matrix
    :param part: returns this rank's part of a matrix
    :param transposed: whether the tensor with all matrices has them transposed
    """
    if stacked not in loader:
        return ExpertStack(matrices=[[part(loader.matrix(name, *shape)) for name in own] for own in names])
    (rows, cols), count = shape, len(names[0])
    if transposed:
        each = _each(loader, stacked, len(names), rows * count, cols, transposed=True)
        return ExpertStack(matrices=[list(map(part, of_expert.split([rows] * count))) for of_expert in each])
    whole = loader.matrix(stacked, len(names), rows * count, cols)
    of_experts = whole.split([rows * count] * len(names))
    matrices = [list(map(part, of_expert.split([rows] * count))) for of_expert in of_experts]
    return ExpertStack(matrices=matrices, whole=whole.matrix if loader.shard.is_whole else None)


def _alternating(loader: WeightLoader, experts: ExpertTensors, part: _Part) -> Experts:
    """Load experts whose gate and up are interleaved row by row in one tensor, which may be transposed."""
    names = experts.stacked
    count, hidden, size = experts.num_experts, experts.hidden_size, experts.intermediate_size
    transposed = _are_transposed(loader, experts)
    pairs = _each(loader, names[0], count, 2 * size, hidden, transposed=transposed)
    downs = _each(loader, names[1], count, hidden, size, transposed=transposed)
    gate_up = [
        [
            loader.part(
                NamedMatrix(each.name, every_other_row(each.matrix, turn), (*each.index, turn)), part.neurons, None
            )
            for turn in (0, 1)
        ]
        for each in pairs
    ]
    down = [[loader.part(each, part.outputs, part.cols)] for each in downs]
    extras = None
    if experts.swiglu is not None:
        biases = loader.tensor(f"{names[0]}_bias", count, 2 * size)
        down_bias = loader.tensor(f"{names[1]}_bias", count, hidden)
        extras = part.extras(biases[:, 0::2], biases[:, 1::2], down_bias, experts.swiglu, loader.shard)
    stacks = ExpertStack(matrices=gate_up), ExpertStack(matrices=down)
    return loader.experts(*stacks, extras=extras, join=part.join, activation=experts.activation)


def _are_transposed(loader: WeightLoader, experts: ExpertTensors) -> bool:
    """Return whether the checkpoint has tensors with all experts, whose matrices are transposed."""
    if not all(name in loader for name in experts.stacked):
        return False
    return are_transposed(
        *map(loader.shape, experts.stacked),
        hidden_size=experts.hidden_size,
        intermediate_size=experts.intermediate_size,
        is_gated=experts.gate is not None,
    )


def _each(
    loader: WeightLoader, name: str, num_experts: int, rows: int, cols: int, *, transposed: bool
) -> list[NamedMatrix]:
    """Read the experts' matrices from a tensor that holds all of them."""
    if not transposed:
        return loader.matrix(name, num_experts, rows, cols).split([rows] * num_experts)
    values = loader.values(name, num_experts, cols, rows).mT
    return [NamedMatrix(name, DenseMatrix(each.contiguous()), (expert,)) for expert, each in enumerate(values)]
