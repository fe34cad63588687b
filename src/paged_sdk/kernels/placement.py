"""Map the parts of a model to devices, and copy tensors between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
from attrs import frozen
from torch import Tensor

__all__ = ["LayerSpan", "Placement", "moved_to", "working_on"]


@frozen
class LayerSpan:
    """Names consecutive layers on one device.

    :ivar layers: the numbers of the layers
    """

    device: torch.device
    layers: range


@frozen(kw_only=True)
class Placement:
    """Maps each part of a model to a device.

    :ivar embedding: device of the token embeddings and of a step's tokens and positions
    :ivar layers: device of each layer and its KV; the final norm is on the last layer's device
    :ivar head: device of the output projection and the logits
    """

    embedding: torch.device
    layers: tuple[torch.device, ...]
    head: torch.device

    @classmethod
    def on(cls, device: torch.device, num_layers: int) -> Placement:
        """Place a whole model on one device."""
        return cls(embedding=device, layers=(device,) * num_layers, head=device)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Return the distinct devices in the order in which a step uses them."""
        return tuple(dict.fromkeys((self.embedding, *self.layers, self.head)))

    @property
    def is_one_device(self) -> bool:
        """Return whether the whole model is on one device."""
        return len(self.devices) == 1

    @property
    def spans(self) -> tuple[LayerSpan, ...]:
        """Return the layers as maximal spans of consecutive layers on one device."""
        numbered = groupby(enumerate(self.layers), key=lambda pair: pair[1])
        found = [(device, [number for number, _ in group]) for device, group in numbered]
        return tuple(LayerSpan(device, range(numbers[0], numbers[-1] + 1)) for device, numbers in found)

    def layers_on(self, device: torch.device) -> tuple[int, ...]:
        """Return the numbers of the layers on a device."""
        return tuple(number for number, own in enumerate(self.layers) if own == device)

    def __str__(self) -> str:
        """Describe the placement for the log."""
        if self.is_one_device:
            return str(self.embedding)
        spans = (f"layers {span.layers.start}-{span.layers.stop} on {span.device}" for span in self.spans)
        return f"embeddings on {self.embedding}, {', '.join(spans)}, output projection on {self.head}"


def moved_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, without a copy if it is there already.

    Between CUDA devices the host does not wait: work launched later on either device runs after the copy.
    """
    return tensor.to(device, non_blocking=tensor.is_cuda and device.type == "cuda")


@contextmanager
def working_on(device: torch.device) -> Iterator[None]:
    """Make a CUDA device the thread's current one within the block, since Triton launches kernels there."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield
