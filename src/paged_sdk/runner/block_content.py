"""Copies the content of KV blocks out of the pool, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import field, frozen
from torch import Tensor

from paged_sdk.kernels.placement import working_on
from paged_sdk.kernels.transfer import HostCopies

__all__ = ["BlockContent", "BlockCopies", "BlockMemory"]


@frozen(eq=False)
class BlockMemory:
    """Holds the content of some blocks in host memory.

    :ivar tensors: one ``[num_blocks, bytes]`` uint8 per tensor of the pool, contiguous
    """

    tensors: Sequence[Tensor]
    # A block of 60 tensors has its pieces in 20 us by arrays, in 300 by tensors.
    _arrays: Sequence[npt.NDArray[np.uint8]] = field(init=False)

    @_arrays.default
    def _as_arrays(self) -> Sequence[npt.NDArray[np.uint8]]:
        return [tensor.numpy() for tensor in self.tensors]

    @classmethod
    def empty(cls, num_blocks: int, sizes: Sequence[int]) -> BlockMemory:
        """Allocate memory for some blocks.

        :param sizes: bytes of a block in each tensor of the pool
        :raises RuntimeError: there is not enough memory
        """
        return cls([torch.empty(num_blocks, size, dtype=torch.uint8) for size in sizes])

    @property
    def num_bytes(self) -> int:
        """Return the size of all blocks."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def pieces(self, place: int) -> list[memoryview]:
        """Return the memory of one block, by its place among these."""
        return [array[place].data for array in self._arrays]


@frozen(eq=False)
class BlockCopies:
    """Holds the content of some blocks on its way to host memory.

    :ivar copies: of each device
    :ivar order: for each tensor of the pool, its place among the devices' tensors
    """

    copies: Sequence[HostCopies | Sequence[Tensor]]
    order: Sequence[int]

    def wait(self) -> BlockMemory:
        """Wait for the devices, with the GIL released. Call this once."""
        tensors: list[Tensor] = []
        for copies in self.copies:
            tensors += copies.wait() if isinstance(copies, HostCopies) else copies
        return BlockMemory([tensors[place] for place in self.order])


class BlockContent:
    """Copies whole blocks, in all layers of a pool.

    :param tensors: the pool's tensors, each with the block as its first dimension
    :ivar sizes: bytes of a block in each tensor
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.view(tensor.shape[0], -1).view(torch.uint8) for tensor in tensors]
        self.sizes: Sequence[int] = tuple(tensor.shape[1] for tensor in self._tensors)
        self._by_device: dict[torch.device, list[int]] = {}
        for place, tensor in enumerate(tensors):
            self._by_device.setdefault(tensor.device, []).append(place)
        places = [place for own in self._by_device.values() for place in own]
        self._order = sorted(range(len(places)), key=places.__getitem__)

    def copy_out(self, block_ids: Sequence[int]) -> BlockCopies:
        """Begin to copy blocks to host memory. Later steps may overwrite the blocks: the device copies first."""
        copies: list[HostCopies | Sequence[Tensor]] = []
        for device, places in self._by_device.items():
            with torch.inference_mode(), working_on(device):
                ids = torch.tensor(block_ids, device=device)
                taken = [self._tensors[place].index_select(0, ids) for place in places]
                copies.append(taken if device.type == "cpu" else HostCopies(*taken))
        return BlockCopies(copies, self._order)

    def copy_in(self, block_ids: Sequence[int], memory: BlockMemory, places: Sequence[int]) -> None:
        """Fill blocks of the pool.

        :param places: for each of ``block_ids``, the place of its content in ``memory``
        """
        first = places[0]
        in_order = list(places) == list(range(first, first + len(places)))
        taken = slice(first, first + len(places)) if in_order else torch.tensor(places)
        for device, own in self._by_device.items():
            with torch.inference_mode(), working_on(device):
                ids = torch.tensor(block_ids, device=device)
                for place in own:
                    target, content = self._tensors[place], memory.tensors[place][taken]
                    if target.shape[1] % 8 == 0:  # torch copies element by element: six times as fast
                        target, content = target.view(torch.int64), content.view(torch.int64)
                    target.index_copy_(0, ids, content.to(device))
