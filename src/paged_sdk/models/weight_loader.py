"""Taking a model's tensors out of a checkpoint: shapes are checked, and matrices become linear layers, in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paged_sdk.errors import CheckpointError
from paged_sdk.logs import get_logger
from paged_sdk.quant.dense import DenseLinear
from paged_sdk.quant.linear import Linear
from paged_sdk.weights.source import WeightSource

__all__ = ["WeightLoader"]

_log = get_logger(__name__)


class WeightLoader:
    """Loads tensors one by one, straight to the device, so that the peak is the model and its largest tensor.

    :param prefixes: of the tensors that belong to the model, for progress and the log
    :param on_progress: called with tensors loaded and tensors in all
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        prefixes: tuple[str, ...],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device
        self._unused = {name for name in source.names() if name.startswith(prefixes)}
        self._total = len(self._unused)
        self._on_progress = on_progress

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor of the model's dtype.

        :raises CheckpointError: it is missing or has another shape
        """
        tensor = self._source.tensor(name, self._dtype, self._device)
        if tensor.shape != shape:
            raise CheckpointError(f"tensor {name!r} has shape {list(tensor.shape)}: expected {list(shape)}")
        self._unused.discard(name)
        self._report(self._total - len(self._unused))
        return tensor

    def linear(
        self, names: Sequence[str], *, in_features: int, out_features: Sequence[int], bias: bool = False
    ) -> Linear:
        """One linear layer from the matrices of one or more, whose outputs it gives one after the other.

        One product of many rows costs less than several of few: q, k and v are merged, and gate and up.

        :param names: without ``.weight`` and ``.bias``
        :param out_features: of each; with a single name, its parts, which the checkpoint has merged already
        :raises CheckpointError: a tensor is missing or has another shape
        """
        heights = out_features if len(names) > 1 else (sum(out_features),)
        parts = list(zip(names, heights, strict=True))
        weight = self._merge([(f"{name}.weight", (height, in_features)) for name, height in parts])
        return DenseLinear(
            weight, self._merge([(f"{name}.bias", (height,)) for name, height in parts]) if bias else None
        )

    def close(self) -> None:
        """Say what of the checkpoint is not used, and that loading is done."""
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

    def _report(self, done: int) -> None:
        if self._on_progress is not None:
            self._on_progress(done, self._total)
