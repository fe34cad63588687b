"""Taking a model's tensors out of a checkpoint: shapes are checked, and matrices become linear layers, in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paged_sdk.errors import CheckpointError
from paged_sdk.kernels.gguf_blocks import BlockMatrix
from paged_sdk.kernels.repacked import REPACKED_FORMATS, repack
from paged_sdk.layers.embedding import BlockEmbedding, DenseEmbedding, Embedding, RepackedEmbedding
from paged_sdk.logs import get_logger
from paged_sdk.quant.dense import DenseLinear
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.policy import LinearPolicy
from paged_sdk.weights.source import WeightSource

__all__ = ["WeightLoader"]

_log = get_logger(__name__)


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
        quantised = self._policy.quantised(matrices, biases, is_head=is_head)
        if quantised is not None:
            self._loaded(*(f"{name}.weight" for name in names))
            return quantised
        return DenseLinear(
            self._merge([(f"{name}.weight", (height, in_features)) for name, height in parts]), merged_bias
        )

    def experts(
        self, stacked: str, names: Sequence[Sequence[str]], *, in_features: int, out_features: Sequence[int]
    ) -> Tensor:
        """The matrices of a layer's experts, each decoded into its place.

        :param stacked: what the tensor of them all is called, where the checkpoint has one
        :param names: per expert, without ``.weight``: the matrices whose outputs it gives one after the other
        :param out_features: of each name
        :returns: ``[num_experts, sum of out_features, in_features]`` of the model's dtype
        :raises CheckpointError: a tensor is missing or has another shape
        """
        num_experts, height = len(names), sum(out_features)
        if stacked in self._source:
            return self.tensor(stacked, num_experts, height, in_features)
        parts = [(f"{name}.weight", rows) for expert in names for name, rows in zip(expert, out_features, strict=True)]
        in_blocks = self._policy.keep_blocks and self._source.block_matrix(parts[0][0]) is not None
        self._has_decoded_experts |= in_blocks or self._policy.isq is not None
        return self._merge([(name, (rows, in_features)) for name, rows in parts]).view(num_experts, height, in_features)

    def embedding(self, name: str, *, vocab_size: int, hidden_size: int, scale: float | None) -> Embedding:
        """The token embeddings. Rows of a quantised matrix are decoded as they are looked up, but for the types that
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
        if matrix.tensor_type in REPACKED_FORMATS:
            return RepackedEmbedding(repack(on_device), dtype=self._dtype, scale=scale)
        return DenseEmbedding(on_device.decoded(self._dtype), scale=scale)

    def tied_head(self, embedding: Embedding) -> Linear:
        """The output projection of a model that uses its embeddings for it."""
        if isinstance(embedding, RepackedEmbedding):
            from paged_sdk.quant.repacked import RepackedLinear

            return RepackedLinear([embedding.matrix], [None], device=self._device)
        if isinstance(embedding, BlockEmbedding):
            head = self._policy.quantised([embedding.matrix], [None], is_head=True)
            assert head is not None  # every type of blocks has a form on the CPU
            return head
        assert isinstance(embedding, DenseEmbedding)
        weight = embedding.weight
        in_blocks = self._policy.in_situ(weight.float(), is_head=True) if self._policy.isq else None
        return self._policy.quantised([in_blocks], [None], is_head=True) or DenseLinear(weight)

    def _block_matrix(self, name: str, shape: tuple[int, int], *, is_head: bool) -> BlockMatrix | None:
        """A matrix in blocks, stored so or quantised now; None: it is to stay in plain numbers."""
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
            _log.info("Experts are kept in %s: only the other matrices are quantised.", self._dtype)
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
