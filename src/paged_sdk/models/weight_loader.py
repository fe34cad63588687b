"""Taking a model's tensors out of a checkpoint: shapes are checked, and matrices become linear layers, in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from paged_sdk.errors import CheckpointError
from paged_sdk.kernels.gguf_blocks import BlockMatrix
from paged_sdk.kernels.repack import repack
from paged_sdk.kernels.triton_blocks import TRITON_BLOCK_FORMATS
from paged_sdk.layers.embedding import BlockEmbedding, DenseEmbedding, Embedding, TritonBlockEmbedding
from paged_sdk.logs import get_logger
from paged_sdk.quant.dense import DenseLinear
from paged_sdk.quant.dense_experts import DenseExperts
from paged_sdk.quant.experts import Experts
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.policy import LinearPolicy
from paged_sdk.weights.source import WeightSource

__all__ = ["WeightLoader"]

_log = get_logger(__name__)


@frozen
class _Projections:
    """Matrices of a layer's experts that have the same input.

    :ivar stacked: what the tensor of them all is called, where the checkpoint has one
    :ivar names: what they are called otherwise, by expert
    :ivar heights: rows of each of an expert's matrices
    """

    stacked: str
    names: list[list[str]]
    heights: tuple[int, ...] = field(kw_only=True)
    cols: int = field(kw_only=True)

    @property
    def all_names(self) -> list[str]:
        return [name for names in self.names for name in names]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the tensor of them all."""
        return len(self.names), sum(self.heights), self.cols


class WeightLoader:
    """Loads tensors one by one, straight to the device, so that the peak is the model and its largest tensor.

    :param policy: which form matrices take
    :param prefixes: of the tensors that belong to the model, for progress and the log
    :param on_progress: called with tensors loaded and tensors in all
    """

    def __init__(
        self,
        source: WeightSource,
        policy: LinearPolicy,
        *,
        dtype: torch.dtype,
        device: torch.device,
        prefixes: tuple[str, ...],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._source = source
        self._policy = policy
        self._dtype = dtype
        self._device = device
        self._unused = {name for name in source.names() if name.startswith(prefixes)}
        self._total = len(self._unused)
        self._on_progress = on_progress
        self._has_decoded_experts = False

    def __contains__(self, name: object) -> bool:
        """Whether the checkpoint has such a tensor."""
        return name in self._source

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor of the model's dtype.

        :raises CheckpointError: it is missing or has another shape
        """
        tensor = self._source.tensor(name, self._dtype, self._device)
        self._check_shape(name, tuple(tensor.shape), shape)
        self._loaded(name)
        return tensor

    def linear(
        self,
        names: Sequence[str],
        *,
        in_features: int,
        out_features: Sequence[int],
        bias: bool = False,
        is_head: bool = False,
    ) -> Linear:
        """One linear layer from the matrices of one or more, whose outputs it gives one after the other.

        One product of many rows costs less than several of few: q, k and v are merged, and gate and up.

        :param names: without ``.weight`` and ``.bias``
        :param out_features: of each; with a single name, its parts, which the checkpoint has merged already
        :param is_head: the output projection, which is asked for a few rows only
        :raises CheckpointError: a tensor is missing or has another shape
        """
        heights = tuple(out_features) if len(names) > 1 else (sum(out_features),)
        parts = list(zip(names, heights, strict=True))
        merged_bias = self._merge([(f"{name}.bias", (height,)) for name, height in parts]) if bias else None
        matrices: list[BlockMatrix | None] = []
        for name, height in parts:
            matrix = self._block_matrix(f"{name}.weight", (height, in_features), is_head=is_head)
            matrices += [None] if matrix is None else matrix.split(out_features if len(names) == 1 else (height,))
        biases = [None] * len(matrices) if merged_bias is None else torch.split(merged_bias, list(out_features))
        quantized = self._policy.quantized(matrices, biases, is_head=is_head)
        if quantized is not None:
            self._loaded(*(f"{name}.weight" for name in names))
            return quantized
        return DenseLinear(
            self._merge([(f"{name}.weight", (height, in_features)) for name, height in parts]), merged_bias
        )

    def experts(
        self,
        block: str,
        names: tuple[str, str, str],
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
    ) -> Experts:
        """A layer's experts. No more than one layer's are in memory twice while they are put together.

        :param block: what their tensors are below: ``gate_up_proj`` and ``down_proj`` of all, or by number each one's
        :param names: of each one's gate, up and down, without ``.weight``
        :raises CheckpointError: a tensor is missing or has another shape
        """
        *gate_up_names, down_name = names
        gate_up = _Projections(
            f"{block}.gate_up_proj",
            [[f"{block}.{expert}.{name}.weight" for name in gate_up_names] for expert in range(num_experts)],
            heights=(intermediate_size, intermediate_size),
            cols=hidden_size,
        )
        down = _Projections(
            f"{block}.down_proj",
            [[f"{block}.{expert}.{down_name}.weight"] for expert in range(num_experts)],
            heights=(hidden_size,),
            cols=intermediate_size,
        )
        stacks = [stack for part in (gate_up, down) for stack in self._expert_blocks(part)]
        match [stack for stack in stacks if stack is not None]:
            case [gate, up, down_stack]:
                quantized = self._policy.experts(gate, up, down_stack, num_experts=num_experts)
            case _:
                quantized = None
        if quantized is not None:
            self._loaded(*(name for part in (gate_up, down) for name in (part.stacked, *part.all_names)))
            return quantized
        self._has_decoded_experts |= self._policy.isq is not None or any(stack is not None for stack in stacks)
        return DenseExperts(self._decoded_experts(gate_up), self._decoded_experts(down))

    def _expert_blocks(self, part: _Projections) -> list[BlockMatrix | None]:
        """For each name of an expert, the matrices of all experts in blocks; None: they stay dense."""
        if part.stacked not in self._source:
            named = [
                [
                    self._block_matrix(name, (rows, part.cols), is_head=False)
                    for name, rows in zip(names, part.heights, strict=True)
                ]
                for names in part.names
            ]
            return [_stacked(matrices) for matrices in zip(*named, strict=True)]
        if self._policy.isq is None:
            return [None] * len(part.heights)
        weights = self._source.tensor(part.stacked, torch.float32, self._device)
        self._check_shape(part.stacked, tuple(weights.shape), part.shape)
        in_blocks = self._policy.in_situ(weights.flatten(0, 1), is_head=False)
        if in_blocks is None:
            return [None] * len(part.heights)
        of_experts = in_blocks.split(part.heights * len(part.names))
        return [_stacked(of_experts[i :: len(part.heights)]) for i in range(len(part.heights))]

    def _decoded_experts(self, part: _Projections) -> Tensor:
        """``[num_experts, sum of heights, cols]`` of the model's dtype, each matrix decoded into its place."""
        if part.stacked in self._source:
            return self.tensor(part.stacked, *part.shape)
        shapes = [(rows, part.cols) for rows in part.heights] * len(part.names)
        return self._merge(list(zip(part.all_names, shapes, strict=True))).view(part.shape)

    def embedding(self, name: str, *, vocab_size: int, hidden_size: int, scale: float | None) -> Embedding:
        """The token embeddings. Rows of a quantized matrix are decoded as they are looked up, but for the types that
        cannot be repacked for CUDA.

        :raises CheckpointError: the tensor is missing or has another shape
        """
        matrix = self._source.block_matrix(name) if name in self._source and self._policy.keep_blocks else None
        if matrix is None:
            return DenseEmbedding(self.tensor(name, vocab_size, hidden_size), scale=scale)
        self._check_shape(name, matrix.shape, (vocab_size, hidden_size))
        self._loaded(name)
        on_device = BlockMatrix(matrix.tensor_type, matrix.blocks.to(self._device))
        if self._device.type == "cpu":
            return BlockEmbedding(on_device, dtype=self._dtype, scale=scale)
        if matrix.tensor_type in TRITON_BLOCK_FORMATS:
            return TritonBlockEmbedding(repack(on_device), dtype=self._dtype, scale=scale)
        return DenseEmbedding(on_device.decoded(self._dtype), scale=scale)

    def tied_head(self, embedding: Embedding) -> Linear:
        """The output projection of a model that uses its embeddings for it."""
        if isinstance(embedding, TritonBlockEmbedding):
            from paged_sdk.quant.triton_block import TritonBlockLinear

            return TritonBlockLinear([embedding.matrix], [None], device=self._device)
        if isinstance(embedding, BlockEmbedding):
            head = self._policy.quantized([embedding.matrix], [None], is_head=True)
            assert head is not None  # every type of blocks has a form on the CPU
            return head
        assert isinstance(embedding, DenseEmbedding)
        weight = embedding.weight
        in_blocks = self._policy.in_situ(weight.float(), is_head=True) if self._policy.isq else None
        return self._policy.quantized([in_blocks], [None], is_head=True) or DenseLinear(weight)

    def _block_matrix(self, name: str, shape: tuple[int, int], *, is_head: bool) -> BlockMatrix | None:
        """A matrix in blocks, stored so or quantized now; None: it is to stay dense."""
        if name not in self._source:
            return None
        if self._policy.isq is not None:
            weight = self._source.tensor(name, torch.float32, self._device)
            self._check_shape(name, tuple(weight.shape), shape)
            return self._policy.in_situ(weight, is_head=is_head)
        matrix = self._source.block_matrix(name) if self._policy.keep_blocks else None
        if matrix is not None:
            self._check_shape(name, matrix.shape, shape)
        return matrix

    def close(self) -> None:
        """Say what of the checkpoint is not used, and that loading is done."""
        if self._has_decoded_experts:
            _log.info("Experts are kept in %s: only the other matrices are quantized.", self._dtype)
        for name in sorted(self._unused):
            _log.debug("tensor %s of the checkpoint is not used", name)
        self._report(self._total)

    def _merge(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        (name, shape), *others = parts
        part = self.tensor(name, *shape)  # before room is made for all: it confirms what the config says
        if not others:
            return part
        merged = part.new_empty((sum(shape[0] for _, shape in parts), *shape[1:]))
        merged[: shape[0]] = part
        first = shape[0]
        for name, shape in others:
            merged[first : first + shape[0]] = self.tensor(name, *shape)
            first += shape[0]
        return merged

    def _check_shape(self, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if found != expected:
            raise CheckpointError(f"tensor {name!r} has shape {list(found)}: expected {list(expected)}")

    def _loaded(self, *names: str) -> None:
        self._unused.difference_update(names)
        self._report(self._total - len(self._unused))

    def _report(self, done: int) -> None:
        if self._on_progress is not None:
            self._on_progress(done, self._total)


def _stacked(matrices: Sequence[BlockMatrix | None]) -> BlockMatrix | None:
    """Matrices one below the other; None: one is dense, or not all are of one type."""
    blocks = [matrix for matrix in matrices if matrix is not None]
    if len(blocks) < len(matrices) or len({matrix.tensor_type for matrix in blocks}) != 1:
        return None
    return BlockMatrix(blocks[0].tensor_type, torch.cat([matrix.blocks for matrix in blocks]))
