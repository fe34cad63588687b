"""Say which device each part of a model is on, and carry tensors from one to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
from attrs import frozen
from torch import Tensor

__all__ = ["LayerSpan", "Placement", "carried", "working_on"]


@frozen
class LayerSpan:
    """Names layers that follow one another on one device.

    :ivar layers: their numbers
    """

    device: torch.device
    layers: range


@frozen(kw_only=True)
class Placement:
    """Says which device each part of a model is on.

    :ivar embedding: the token embeddings, and what a step begins with: its tokens and positions
    :ivar layers: each layer with its KV, in order; the last norm is with the last of them
    :ivar head: the output projection, and the logits
    """

    embedding: torch.device
    layers: tuple[torch.device, ...]
    head: torch.device

    @classmethod
    def on(cls, device: torch.device, num_layers: int) -> Placement:
        """Put all of a model on one device."""
        return cls(embedding=device, layers=(device,) * num_layers, head=device)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Return all devices, each once, in the order in which a step comes to them."""
        return tuple(dict.fromkeys((self.embedding, *self.layers, self.head)))

    @property
    def is_one_device(self) -> bool:
        """Say whether everything is on the same device."""
        return len(self.devices) == 1

    @property
    def spans(self) -> tuple[LayerSpan, ...]:
        """Return the layers, as few spans as they make."""
        numbered = groupby(enumerate(self.layers), key=lambda pair: pair[1])
        found = [(device, [number for number, _ in group]) for device, group in numbered]
        return tuple(LayerSpan(device, range(numbers[0], numbers[-1] + 1)) for device, numbers in found)

    def layers_on(self, device: torch.device) -> tuple[int, ...]:
        """Return the numbers of the layers on a device."""
        return tuple(number for number, own in enumerate(self.layers) if own == device)

    def __str__(self) -> str:
        """Return it as a log line has it."""
        if self.is_one_device:
            return str(self.embedding)
        spans = (f"layers {span.layers.start}-{span.layers.stop} on {span.device}" for span in self.spans)
        return f"embeddings on {self.embedding}, {', '.join(spans)}, output projection on {self.head}"


def carried(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device: itself, where it is there already.

    Between CUDA devices the host does not wait: what is launched later on either comes after the copy.
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
