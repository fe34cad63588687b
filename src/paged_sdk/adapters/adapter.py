"""Hold a LoRA adapter as read from a file, before it is fitted to a model."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from hashlib import sha256

import torch
from attrs import field, frozen
from torch import Tensor

from paged_sdk.errors import shown

__all__ = ["Adapter", "ModuleUpdate", "plain_name"]


@frozen(eq=False)
class ModuleUpdate:
    """Holds the update of one matrix: ``scale * up @ down`` is added to it. With magnitudes, each row of the sum is
    then scaled to its magnitude (DoRA; Liu et al., 2024, arXiv 2402.09353).

    :ivar tensor: name of a tensor that the update comes from, for error messages
    :ivar down: ``[rank, columns of the matrix]``
    :ivar up: ``[rows of the matrix, rank]``
    :ivar magnitude: ``[rows of the matrix]``, the L2 norms of the rows of the sum; None: rows are not scaled
    :ivar looks_up: whether the matrix is the token embedding, transposed: ``down`` is ``[rank, tokens]``
    :ivar in_pairs: whether each head's rows are interleaved as in GGUF's llama, so that rotary pairs are neighbours
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
        """Return the number of elements of all tensors."""
        return sum(tensor.numel() for tensor in (self.down, self.up, self.magnitude) if tensor is not None)


@frozen(eq=False)
class Adapter:
    """Holds the updates of a model's matrices.

    :ivar path: where the adapter was read
    :ivar base: name of the base model that the file states; empty if none
    :ivar modules: updates by the matrices' names in the base's checkpoint, without ``.weight``
    :ivar copies: shapes of unchanged base matrices that the file contains too, by name
    :ivar is_target: returns whether the adapter's settings list a module as a target; None: they list no names
    :ivar invocation: tokens from whose last occurrence in a prompt on the adapter applies (activated LoRA); empty: it
        applies to all tokens
    :ivar whole: tensors of modules that were trained as a whole, by their names in the base's checkpoint
    :ivar is_whole: returns whether the adapter's settings say so of a module, or of one around it
    :ivar digest: hash of everything that outputs depend on
    """

    path: str
    base: str
    modules: Mapping[str, ModuleUpdate]
    is_target: Callable[[str], bool] | None = None
    invocation: tuple[int, ...] = ()
    copies: Mapping[str, tuple[int, ...]] = field(factory=dict)
    whole: Mapping[str, Tensor] = field(factory=dict)
    is_whole: Callable[[str], bool] = lambda module: False
    digest: bytes = field(init=False)

    @property
    def made_for(self) -> str:
        """Return the end of error messages that names the base; empty if the file does not state it."""
        return f": the adapter was made for {shown(self.base)}" if self.base else ""

    @digest.default
    def _make_digest(self) -> bytes:
        digest = sha256()
        for name, update in sorted(self.modules.items()):
            encoded = name.encode()
            digest.update(struct.pack("<Q??d", len(encoded), update.in_pairs, update.looks_up, update.scale) + encoded)
            for tensor in (update.down, update.up, *(() if update.magnitude is None else (update.magnitude,))):
                for part in _content(tensor):
                    digest.update(part)
        for name, tensor in sorted(self.whole.items()):
            encoded = name.encode()
            digest.update(struct.pack("<Q", len(encoded)) + encoded)
            for part in _content(tensor):
                digest.update(part)
        return digest.digest()


def _content(tensor: Tensor) -> tuple[bytes, memoryview]:
    """Return a tensor's shape and dtype, and its values."""
    kind = str(tensor.dtype).encode()
    described = struct.pack(f"<QQ{tensor.dim()}Q", len(kind), tensor.dim(), *tensor.shape) + kind
    return described, tensor.contiguous().view(torch.uint8).numpy().data


def plain_name(module: str) -> str:
    """Return a module's name without the prefixes of enclosing modules, which differ between model classes."""
    parts = module.split(".")
    while parts and parts[0] in ("model", "language_model", "transformer", "backbone", "bert", "roberta"):
        del parts[0]
    return ".".join(parts)
