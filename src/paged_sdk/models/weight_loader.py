"""Load a model's tensors from a checkpoint: checks shapes, cuts out a rank's shard, and makes linear layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from copy import copy

import torch
from torch import Tensor

from paged_sdk.config.isq import IsqType
from paged_sdk.config.latent_attention import LatentAttentionConfig
from paged_sdk.errors import ConfigError, UnsupportedQuantizationError, shown
from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.latent_heads import LatentHeads
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.ranks import ColumnJoin
from paged_sdk.kernels.quantized.gguf_blocks import BlockMatrix
from paged_sdk.kernels.quantized.reordered_matrix import JoinedMatrix
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.logs import get_logger
from paged_sdk.models.adaptable_shape import outputs_of, rows_of
from paged_sdk.models.sharded import ColumnParallelLinear, RowParallelLinear
from paged_sdk.parallel.group import Group
from paged_sdk.parallel.shard import SETTING, WHOLE, Shard
from paged_sdk.quant.adapted import AdaptableLinear, AdaptableShape
from paged_sdk.quant.dense_experts import DenseExperts
from paged_sdk.quant.embedding import Embedding
from paged_sdk.quant.experts import ExpertExtras, Experts
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.policy import DENSE, ExpertStack, NamedMatrix, Role, WeightPolicy
from paged_sdk.weights.source import WeightSource, malformed

__all__ = ["WeightLoader"]

_log = get_logger(__name__)


class WeightLoader:
    """Loads tensors one by one, directly to the device, so that peak memory is the model plus its largest tensor.
    Several threads may load at once.

    :param policy: chooses the form of each matrix
    :param prefixes: prefixes of the model's tensor names, for progress and the log
    :param stored_name: returns the checkpoint's name of a matrix, if ``source`` shows it under another one; topologies
        select that name
    :param on_progress: called with the number of tensors loaded and the number of all tensors
    :ivar shard: the part of the model to load
    :ivar group: the ranks that the model is divided among; None: the model is not divided
    :ivar adaptable: the linear layers loaded so far that adapters may change
    """

    def __init__(
        self,
        source: WeightSource,
        policy: WeightPolicy,
        *,
        dtype: torch.dtype,
        device: torch.device,
        prefixes: tuple[str, ...],
        stored_name: Callable[[str], str] = lambda name: name,
        on_progress: Callable[[int, int], None] | None = None,
        shard: Shard = WHOLE,
        group: Group | None = None,
    ) -> None:
        self._source = source
        self._policy = policy
        self._stored_name = stored_name
        self._dtype = dtype
        self._device = device
        self._unused = {name for name in source.names() if name.startswith(prefixes)}
        self._total = len(self._unused)
        self._on_progress = on_progress
        self._notes: dict[str, None] = {}
        self._narrow: dict[tuple[IsqType, str], list[int]] = {}
        self.shard = shard
        self.group = group
        self.adaptable: list[AdaptableShape] = []
        self._lock = threading.Lock()

    def at(self, device: torch.device) -> WeightLoader:
        """Return a loader to another device, which shares progress and :attr:`adaptable` with this one."""
        if device == self._device:
            return self
        other = copy(self)
        other._device = device
        return other

    def decoding(self) -> WeightLoader:
        """Return a loader that decodes matrices, and shares progress and :attr:`adaptable` with this one."""
        other = copy(self)
        other._policy = DENSE
        return other

    def __contains__(self, name: object) -> bool:
        """Return whether the checkpoint has such a tensor."""
        return name in self._source

    @property
    def joins(self) -> bool:
        """Return whether ranks gather columns instead of summing partial results. For float64 they sum."""
        return self.group is not None and self.group.joins and self._dtype is not torch.float64

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one of the checkpoint's tensors."""
        return self._source.shape(name)

    def values(self, name: str, *shape: int) -> Tensor:
        """Read one tensor in the model's dtype to host memory, for further processing.

        :raises CheckpointError: the tensor is missing or has another shape
        """
        self._check_shape(name, shape)
        return self._source.tensor(name, self._dtype, torch.device("cpu"))

    def tensor(self, name: str, *shape: int, in_float32: bool = False) -> Tensor:
        """Load one tensor in the model's dtype.

        :param in_float32: load it in float32 if the model's dtype has fewer bits
        :raises CheckpointError: the tensor is missing or has another shape
        """
        self._check_shape(name, shape)
        dtype = torch.promote_types(self._dtype, torch.float32) if in_float32 else self._dtype
        tensor = self._source.tensor(name, dtype, self._device)
        self.loaded(name)
        return tensor

    def integers(self, name: str, *shape: int) -> Tensor:
        """Load one tensor of integers as int64 to host memory.

        :raises CheckpointError: the tensor is missing or has another shape
        """
        self._check_shape(name, shape)
        tensor = self._source.tensor(name, torch.int64, torch.device("cpu"))
        self.loaded(name)
        return tensor

    def latent_heads(self, name: str, num_heads: int, shape: LatentAttentionConfig) -> LatentHeads:
        """Load the projections between latent vectors and the shard's heads. The log says what they are stored as if
        the model's matrices are quantized.

        :param name: the name of ``[num_heads * (nope_dim + value_dim), rank]``: of each head the projection of keys,
            then that of values
        :param num_heads: heads of the whole model
        :raises CheckpointError: the tensor is missing or has another shape
        """
        height = shape.nope_dim + shape.value_dim
        named = self.part(self.matrix(name, num_heads * height, shape.rank), self.shard.of_heads(height), None)
        heads = self._policy.latent_heads(named, shape, dtype=self._dtype, device=self._device)
        if self._policy.is_quantized_on(self._device, named):
            self.note(f"Projections of latent vectors are kept in {heads.format}, whatever other matrices are kept in.")
        self.loaded(name)
        return heads

    def ones(self, *shape: int) -> Tensor:
        """Return a tensor of ones in place of one that the checkpoint lacks."""
        return torch.ones(shape, dtype=self._dtype, device=self._device)

    def linear(
        self,
        names: Sequence[str],
        *,
        in_features: int,
        out_features: Sequence[int],
        bias: bool = False,
        without_bias: Collection[str] = (),
        is_head: bool = False,
        order: Tensor | None = None,
        rows: Sequence[slice] | None = None,
        cols: Callable[[Shard], slice] | None = None,
    ) -> Linear:
        """Load one linear layer from one or more matrices, whose outputs are concatenated.

        q, k and v are merged, as are gate and up: one large product is faster than several small ones.

        :param names: the matrices' names without ``.weight`` and ``.bias``
        :param without_bias: those of ``names`` that have no bias though ``bias`` says that there are biases
        :param out_features: the rows of each matrix; with a single name, the rows of each part of a fused matrix
        :param is_head: whether this is the output projection, which multiplies few rows
        :param order: permutation of a single matrix's rows; None: rows stay in order
        :param rows: the shard's rows of each part; None: all
        :param cols: returns a shard's columns of the input, for a row-parallel layer; None: all columns. The shard gets
            these columns of the weight, and ranks sum their results; if ranks gather columns, it gets some rows of the
            weight instead, with all columns
        :raises CheckpointError: a tensor is missing or has another shape
        :raises ConfigError: the columns cannot be divided among the ranks
        """
        (height,) = out_features if cols is not None else (0,)
        joined = None if cols is None else self._joined(height, cols)
        if joined is not None:
            rows, cols = (joined[1][self.shard.rank],), None
        cut = None if cols is None or self.shard.is_whole else cols(self.shard)
        own_rows = None if rows is None or self.shard.is_whole else list(rows)
        if order is not None:
            return self._reordered(names, order, in_features, out_features, own_rows, bias=bias)
        is_one = len(names) == 1
        heights = (sum(out_features),) if is_one else tuple(out_features)
        wanted = list(zip(names, heights, strict=True))
        stored = [self.matrix(f"{name}.weight", height, in_features) for name, height in wanted]
        matrices = stored[0].split(out_features) if is_one else stored
        biases: Sequence[Tensor | None] = [None] * len(matrices)
        if bias and (cut is None or self.shard.is_first):
            whole_biases = [
                None if name in without_bias else self.tensor(f"{name}.bias", height) for name, height in wanted
            ]
            of_all = whole_biases[0] if is_one else None
            biases = whole_biases if of_all is None else torch.split(of_all, list(out_features))
        is_cut = own_rows is not None or cut is not None
        if own_rows is not None:
            biases = [None if each is None else each[own] for each, own in zip(biases, own_rows, strict=True)]
        if is_cut:
            taken = own_rows or [slice(0, each.matrix.shape[0]) for each in matrices]
            matrices = [self.part(each, own, cols) for each, own in zip(matrices, taken, strict=True)]
        role = Role.HEAD if is_head else Role.LINEAR
        self._note_narrow(stored, role)
        linear = self._policy.linear(
            matrices,
            biases,
            role,
            dtype=self._dtype,
            device=self._device,
            whole=stored[0].matrix if is_one and not is_cut else None,
        )
        self.loaded(*(f"{name}.weight" for name in names))
        if is_head:  # not wrapped for adapters: the model adds their updates to the logits of all ranks
            self._add_adaptable(self._head_shape(names[0], sum(out_features), in_features))
            return linear
        shape = AdaptableShape(
            outputs_of(names, [each.matrix.shape[0] for each in matrices]),
            linear.in_features,
            self._device,
            whole={} if self.shard.is_whole else {name: (height, in_features) for name, height in wanted},
            rows={} if own_rows is None else rows_of(names, out_features, own_rows),
            cols=cut,
            has_whole_rows=cut is None,
        )
        self._add_adaptable(shape)
        if self.group is not None and joined is not None:
            return ColumnParallelLinear(linear, shape.name, self.group, inputs=joined[0], outputs=joined[1])
        if self.group is not None and cut is not None:
            return RowParallelLinear(linear, shape.name, self.group)
        return AdaptableLinear(linear, shape.name)

    def _joined(self, height: int, cols: Callable[[Shard], slice]) -> tuple[list[slice], list[slice]] | None:
        """Return each rank's columns of the input and rows of the matrix, if ranks gather columns; otherwise None."""
        if not self.joins:
            return None
        every = self.shard.every(self.shard.size)
        outputs = [own for own in (shard.outputs(height) for shard in every) if own is not None]
        return ([cols(shard) for shard in every], outputs) if len(outputs) == len(every) else None

    def _head_shape(self, name: str, vocab_size: int, hidden_size: int) -> AdaptableShape:
        """Describe the output projection to adapters; each rank has their undivided updates of it."""
        outputs = {name: slice(0, vocab_size)}
        return AdaptableShape(outputs, hidden_size, self._device, has_whole_rows=self.group is None)

    def _add_adaptable(self, shape: AdaptableShape) -> None:
        with self._lock:
            self.adaptable.append(shape)

    def part(self, named: NamedMatrix, rows: slice | None, cols: Callable[[Shard], slice] | None) -> NamedMatrix:
        """Return the shard's part of a matrix.

        :raises ConfigError: the columns cannot be divided among the ranks without cutting quantization blocks
        """
        if self.shard.is_whole:
            return named
        try:
            return named.part(rows, None if cols is None else cols(self.shard))
        except UnsupportedQuantizationError as error:
            assert cols is not None, "rows lie apart"
            good = [1, *(size for size in range(2, self.shard.size) if _can_be_divided(named, cols, self.shard, size))]
            fitting = ", ".join(map(str, good))
            allowed = f"one of {fitting}: for {self.shard.size}, {named.name} would be cut amid blocks ({error})"
            raise ConfigError.of(SETTING, self.shard.size, allowed) from error

    def _reordered(
        self,
        names: Sequence[str],
        order: Tensor,
        in_features: int,
        out_features: Sequence[int],
        rows: Sequence[slice] | None,
        *,
        bias: bool,
    ) -> AdaptableLinear:
        """Load one linear layer from a permutation of a single matrix's rows: see :meth:`linear`."""
        (name,) = names
        tensor_name, height = f"{name}.weight", sum(out_features)
        self._check_shape(tensor_name, (height, in_features))
        if rows is not None:
            own = [part[kept] for part, kept in zip(torch.split(order, list(out_features)), rows, strict=True)]
            order, out_features = torch.cat(own), list(map(len, own))
        parts = self._parts_in_order(tensor_name, order, out_features)
        biases: Sequence[Tensor | None] = [None] * len(out_features)
        if bias:
            bias_rows = self.tensor(f"{name}.bias", height)[order.to(self._device)]
            biases = torch.split(bias_rows, list(out_features))
        cut = "" if rows is None else str(list(rows))
        matrices = [NamedMatrix(tensor_name, part, (number,), cut) for number, part in enumerate(parts)]
        self._note_narrow(matrices[:1], Role.LINEAR)
        linear = self._policy.linear(matrices, biases, Role.LINEAR, dtype=self._dtype, device=self._device)
        self.loaded(tensor_name)
        shape = AdaptableShape(
            {name: slice(0, len(order))},
            in_features,
            self._device,
            order,
            {} if self.shard.is_whole else {name: (height, in_features)},
        )
        self._add_adaptable(shape)
        return AdaptableLinear(linear, shape.name)

    def _parts_in_order(self, name: str, order: Tensor, heights: Sequence[int]) -> list[StoredMatrix]:
        """Return a permutation of a matrix's rows, in parts of some numbers of rows; quantized rows are not decoded."""
        stored = self._source.matrix(name)
        if isinstance(stored, JoinedMatrix) and (parts := stored.whole_parts(order, heights)) is not None:
            return parts
        matrix: StoredMatrix
        if isinstance(stored, BlockMatrix):
            matrix = BlockMatrix(stored.tensor_type, stored.blocks[order])
        else:
            matrix = DenseMatrix(self.values(name, *stored.shape)[order])
        return [each.matrix for each in NamedMatrix(name, matrix).split(heights)]

    @property
    def workspace(self) -> Workspace | None:
        """Return the workspace of the native kernels; None without them, and on other devices than the CPU."""
        return self._policy.workspace if self._device.type == "cpu" else None

    def experts(
        self,
        gate_up: ExpertStack,
        down: ExpertStack,
        *,
        extras: ExpertExtras | None,
        join: ColumnJoin | None,
        activation: KernelActivation = "silu",
    ) -> Experts:
        """Make a layer's experts from matrices that have been read.

        :param extras: see :meth:`WeightPolicy.experts <paged_sdk.quant.policy.WeightPolicy.experts>`; ``join`` and
            ``activation`` likewise
        """
        experts = self._policy.experts(
            gate_up, down, dtype=self._dtype, device=self._device, extras=extras, join=join, activation=activation
        )
        matrices = [each for stack in (gate_up, down) for of_expert in stack.matrices for each in of_expert]
        if not isinstance(experts, DenseExperts):
            self._note_narrow(matrices, Role.EXPERTS)
        elif any(self._policy.is_quantized(each, Role.EXPERTS) for each in matrices):
            self.note(f"Experts are kept in {self._dtype}: only the other matrices are quantized.")
        self.loaded(*(each.name for each in matrices))
        return experts

    def expert_linears(self, experts: Sequence[Sequence[NamedMatrix]]) -> list[Linear]:
        """Make a linear layer for each expert of a layer, from matrices that have been read and share an input."""
        none = [None] * max(map(len, experts))
        made = [
            self._policy.linear(each, none, Role.EXPERTS, dtype=self._dtype, device=self._device) for each in experts
        ]
        matrices = [each for of_expert in experts for each in of_expert]
        self._note_narrow(matrices, Role.EXPERTS)
        self.loaded(*(each.name for each in matrices))
        return made

    def embedding(self, name: str, *, vocab_size: int, hidden_size: int, scale: float | None) -> Embedding:
        """Load the token embeddings.

        :raises CheckpointError: the tensor is missing or has another shape
        """
        table = self._tokens(self.matrix(name, vocab_size, hidden_size))
        self._note_narrow([table], Role.EMBEDDING)
        embedding = self._policy.embedding(table, scale=scale, dtype=self._dtype, device=self._device)
        self.loaded(name)
        return embedding

    def tied_head(self, name: str, embedding: Embedding, *, vocab_size: int) -> Linear:
        """Build an output projection that is tied to the embeddings.

        :param name: name of the projection, without ``.weight``
        :param vocab_size: size of the whole vocabulary, of which a shard has a part
        """
        linear = self._policy.tied_head(f"{name}.weight", embedding, dtype=self._dtype, device=self._device)
        self._add_adaptable(self._head_shape(name, vocab_size, linear.in_features))
        return linear

    def untied_head(self, name: str, table: str, *, vocab_size: int, hidden_size: int) -> Linear:
        """Load a separate output projection from the embeddings' tensor, for tied embeddings on another device.

        :param table: name of the embeddings' tensor
        :raises CheckpointError: the tensor is missing or has another shape
        """
        matrix = self.matrix(table, vocab_size, hidden_size).matrix
        named = [NamedMatrix(f"{name}.weight", matrix)]
        linear = self._policy.linear(named, [None], Role.HEAD, dtype=self._dtype, device=self._device)
        self._add_adaptable(AdaptableShape({name: slice(0, vocab_size)}, hidden_size, self._device))
        return linear

    def _tokens(self, table: NamedMatrix) -> NamedMatrix:
        """Return the shard's part of a matrix with a row per token."""
        return self.part(table, self.shard.tokens(table.matrix.shape[0]), None)

    def close(self) -> None:
        """Log the collected notes and the checkpoint's unused tensors, and report completion."""
        for text in self._notes:
            _log.info("%s", text)
        for (isq, taken), cols in self._narrow.items():
            widths = " and ".join(map(str, sorted(set(cols))))
            many = "1 matrix takes" if len(cols) == 1 else f"{len(cols)} matrices take"
            _log.info("%s %s: rows of %s do not fit %s.", many, taken, widths, isq.value)
        for name in sorted(self._unused):
            _log.debug("tensor %s of the checkpoint is not used", name)
        self._report(self._total)

    def note(self, text: str) -> None:
        """Log a sentence when loading is complete, once, however often it is noted."""
        with self._lock:
            self._notes.setdefault(text)

    def _note_narrow(self, matrices: Sequence[NamedMatrix], role: Role) -> None:
        """Note for the log the matrices whose rows do not fit their type's blocks, and which take another type."""
        with self._lock:
            for each in matrices:
                if (types := self._policy.narrow(each, role)) is not None:
                    self._narrow.setdefault(types, []).append(each.matrix.shape[1])

    def matrix(self, name: str, *shape: int) -> NamedMatrix:
        """Read a matrix as stored, and check its shape. A stack of matrices is returned as one, with concatenated rows.

        :raises CheckpointError: the tensor is missing or has another shape
        """
        self._check_shape(name, shape)
        stored = self._stored_name(name)
        # Several matrices may be parts of one that is stored.
        return NamedMatrix(stored, self._source.matrix(name), cut="" if stored == name else name)

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        found = self._source.shape(name)
        if found != expected:
            what = f"tensor {shown(name)} has shape {list(found)}: expected {list(expected)}"
            raise malformed(self._source, name, what)

    def loaded(self, *names: str) -> None:
        """Report that some tensors are in use."""
        with self._lock:  # so that the reported number never decreases
            self._unused.difference_update(names)
            self._report(self._total - len(self._unused))

    def _report(self, done: int) -> None:
        if self._on_progress is not None:
            self._on_progress(done, self._total)


def _can_be_divided(named: NamedMatrix, cols: Callable[[Shard], slice], shard: Shard, size: int) -> bool:
    """Return whether a matrix's columns can be divided among ``size`` ranks, tried on its first row."""
    row = named.part(slice(0, 1), None)
    try:
        for each in shard.every(size):
            row.part(None, cols(each))
    except (ConfigError, UnsupportedQuantizationError):
        return False
    return True
