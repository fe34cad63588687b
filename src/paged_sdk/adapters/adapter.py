"""Hold an adapter as a file has it, before it is fitted to a model."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from hashlib import sha256

import torch
from attrs import field, frozen
from torch import Tensor

__all__ = ["Adapter", "ModuleUpdate"]


@frozen(eq=False)
class ModuleUpdate:
    """Holds the update of one matrix: ``scale * up @ down`` is added to it. With magnitudes, each row of the sum is
    brought to its own (DoRA; Liu et al., 2024, arXiv 2402.09353).

    :ivar tensor: the name of a tensor that it comes from, for messages
    :ivar down: ``[rank, columns of the matrix]``
    :ivar up: ``[rows of the matrix, rank]``
    :ivar magnitude: ``[rows of the matrix]``, the lengths of the rows of the sum; None: they stay what they are
    :ivar looks_up: whether it is the token embeddings', whose columns are tokens: ``down`` is ``[rank, tokens]``
    :ivar in_pairs: whether the rows of each head lie as GGUF's llama has them: neighbours are rotated together
    """

    tensor: str
    down: Tensor
    up: Tensor
    scale: float
    in_pairs: bool = False
    magnitude: Tensor | None = None
    looks_up: bool = False

    @property
    def num_elements(self) -> int:
        """Return how many numbers it consists of."""
        return sum(tensor.numel() for tensor in (self.down, self.up, self.magnitude) if tensor is not None)


@frozen(eq=False)
class Adapter:
    """Holds the updates of a model's matrices.

    :ivar path: where it was read
    :ivar base: the model that it was made for, in its maker's words; empty: they are silent
    :ivar modules: the updates by the names that the matrices have in the base's checkpoint, without ``.weight``
    :ivar copies: of the base's own matrices, which the adapter repeats, by their names: their shapes
    :ivar is_target: whether the adapter's settings name a module as one that it changes; None: they cannot tell
    :ivar invocation: the tokens from whose last occurrence in a prompt on it changes anything (activated LoRA); empty:
        it changes all
    :ivar digest: of everything that a text through it depends on
    """

    path: str
    base: str
    modules: Mapping[str, ModuleUpdate]
    is_target: Callable[[str], bool] | None = None
    invocation: tuple[int, ...] = ()
    copies: Mapping[str, tuple[int, ...]] = field(factory=dict)
    digest: bytes = field(init=False)

    @digest.default
    def _make_digest(self) -> bytes:
        digest = sha256()
        for name, update in sorted(self.modules.items()):
            encoded = name.encode()
            digest.update(struct.pack("<Q??d", len(encoded), update.in_pairs, update.looks_up, update.scale) + encoded)
            tensors = (update.down, update.up, *(() if update.magnitude is None else (update.magnitude,)))
            for tensor in tensors:
                kind = str(tensor.dtype).encode()
                digest.update(struct.pack(f"<QQ{tensor.dim()}Q", len(kind), tensor.dim(), *tensor.shape) + kind)
                digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return digest.digest()
