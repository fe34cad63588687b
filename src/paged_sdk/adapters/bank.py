"""Fit LoRA adapters to a model, and keep the loaded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.adapters.adapter import Adapter, ModuleUpdate, plain_name
from paged_sdk.adapters.gguf import read_gguf
from paged_sdk.adapters.peft import read_peft
from paged_sdk.adapters.whole_modules import fit_whole, of_ranking
from paged_sdk.errors import AdapterError, ModelClosedError, shown
from paged_sdk.kernels.lora import AdaptedRows, Lora, LoraPart, LoraWeights
from paged_sdk.kernels.lora_slots import AdapterSlots
from paged_sdk.kernels.native.lora import NativeLora
from paged_sdk.parallel.group import Message
from paged_sdk.parallel.messages import ADAPTER, NO_ADAPTER
from paged_sdk.quant.adapted import AdaptableShape
from paged_sdk.quant.linear import Linear
from paged_sdk.types.adapter import AdapterUse
from paged_sdk.types.step import StepRow

__all__ = ["AdapterBank", "FittedAdapter"]


@frozen(eq=False)
class FittedAdapter:
    """Holds an adapter in the form in which a model computes it.

    :ivar digest: hash of the adapter's content
    :ivar path: absolute path of the adapter
    :ivar invocation: see :class:`~paged_sdk.adapters.adapter.Adapter`
    :ivar rank: the largest rank of its updates
    :ivar num_bytes: memory of its matrices in bytes
    """

    lora: Lora
    digest: bytes
    path: str
    invocation: tuple[int, ...] = ()
    rank: int = 0
    num_bytes: int = 0

    def use(self, number: int, name: str) -> AdapterUse:
        """Return the value by which requests refer to the adapter.

        :param number: the adapter's number in the bank
        :param name: the caller's name for the adapter
        """
        return AdapterUse(number, name, self.digest, self.invocation, self.rank, self.num_bytes)


class AdapterBank:
    """Holds a model's adapters by number. Any thread may read adapters; only the engine's thread adds and removes them,
    between two steps.

    :param linears: the model's linear layers that adapters may change
    :param dtype: dtype of the model's activations, and of the adapters' matrices
    :param device: device of the embeddings, where a step's tokens are
    :param linear_of: returns the present linear layer of a name (requantization replaces layers)
    :param layers: for each decoder layer, the names of its linear layers by the native decoder's numbers
    :param head: name of the output projection; empty: adapters cannot change it. ``embedding`` likewise
    :param head_dim: size of a query or key head; 0: GGUF adapters with interleaved heads are refused
    :param whole: the tensors of the ranking layers, which adapters may replace
    :param fused: the spans of layers that native calls compute
    :param resolve: returns the directory of a path or hub id, after downloading it if needed
    :param send_message: sends a message to the other ranks; None: there are none, or this is not rank 0
    """

    def __init__(
        self,
        linears: Sequence[AdaptableShape],
        *,
        dtype: torch.dtype,
        device: torch.device,
        linear_of: Callable[[str], Linear],
        layers: Sequence[Mapping[int, str]] = (),
        head: str = "",
        embedding: str = "",
        head_dim: int = 0,
        whole: Mapping[str, Tensor] = MappingProxyType({}),
        fused: Sequence[range] = (),
        resolve: Callable[[str], Path] = Path,
        send_message: Callable[[Message], None] | None = None,
    ) -> None:
        self._layers = layers
        self._head = head
        self._embedding = embedding
        self._head_dim = head_dim
        self._whole = whole
        self._fused = tuple(fused)
        self._linears = {plain_name(module): linear for linear in linears for module in linear.modules}
        self._dtype = dtype
        self._device = device
        self._resolve = resolve
        self._send_message = send_message
        self._linear_of: Callable[[str], Linear] | None = linear_of
        self._loras: dict[int, Lora] = {}
        self._slots: AdapterSlots | None = None
        self._next_number = 0

    # From any thread

    def read(self, path: str) -> FittedAdapter:
        """Read an adapter and fit it to the model.

        :param path: a directory, a GGUF file, or a hub id
        :raises AdapterError: the adapter cannot be read, or was made for another model
        """
        found = self._resolve(path)
        with _one_thread():
            adapter = read_gguf(found) if found.suffix == ".gguf" else read_peft(found)
            lora = self._formed(self.fit(adapter))
            return FittedAdapter(
                lora,
                adapter.digest,
                str(found.absolute()),
                adapter.invocation,
                rank=max((update.down.shape[0] for update in adapter.modules.values()), default=0),
                num_bytes=sum(
                    update.num_elements * self._dtype_of(self._linears[plain_name(name)]).itemsize
                    for name, update in adapter.modules.items()
                    if plain_name(name) in self._linears
                )
                + sum(tensor.nbytes for tensor in lora.whole.values()),
            )

    def fit(self, adapter: Adapter) -> Lora:
        """Combine an adapter's updates per linear layer of the model.

        :raises AdapterError: the adapter changes a module that the model lacks, or a matrix of another shape
        """
        updates: dict[str, dict[str, ModuleUpdate]] = {}
        of_texts = of_ranking(adapter, self._whole)
        for name, update in adapter.modules.items():
            if name in of_texts:
                continue
            linear = self._linears.get(plain_name(name))
            if linear is None or update.looks_up != (linear.name == self._embedding):
                kinds = sorted({module.rpartition(".")[2] for module in self._linears})
                raise AdapterError(
                    f"{adapter.path}: tensor {shown(update.tensor)} is of a module that the model does not have, or "
                    f"that cannot be adapted{adapter.made_for}; its layers have {', '.join(kinds)}",
                    path=adapter.path,
                    tensor=update.tensor,
                    value=name,
                )
            module = next(each for each in linear.modules if plain_name(each) == plain_name(name))
            self._check(adapter, update, linear, module)
            updates.setdefault(linear.name, {})[module] = update
        if adapter.is_target is not None:
            self._check_complete(adapter, updates, adapter.is_target)
        by_name = {linear.name: linear for linear in self._linears.values()}
        self._check_copies(adapter)
        joined = {name: self._joined(by_name[name], own) for name, own in updates.items()}
        head, embedding = joined.pop(self._head, None), joined.pop(self._embedding, None)
        return Lora(joined, head=head, embedding=embedding, whole=fit_whole(adapter, self._whole))

    # On the engine's thread

    def add(self, lora: Lora) -> int:
        """Add an adapter on this rank, and return its number, which is never reused."""
        number = self._next_number
        self._next_number += 1
        self._loras[number] = self._formed(lora)
        if self._slots is not None:
            self._slots.put(number, self._loras[number])
        return number

    def take(self, fitted: FittedAdapter) -> int:
        """Add an adapter on all ranks, and return its number."""
        number = self.add(fitted.lora)
        if self._send_message is not None:
            self._send_message((ADAPTER, number, fitted.path))
        return number

    def remove(self, number: int) -> None:
        """Remove an adapter that no row uses any more, on all ranks; does nothing after :meth:`close`."""
        known = self._loras.pop(number, None) is not None
        if known and self._send_message is not None:
            self._send_message((NO_ADAPTER, number))
        if self._slots is not None:
            self._slots.drop(number)

    def make_slots(self, num_rows: int) -> AdapterSlots:
        """Make the table in which recorded steps find present and future adapters. It replaces an earlier table, with
        which no more steps may be recorded.

        :param num_rows: tokens of the largest recorded step
        """
        layers = {
            linear.name: tuple(linear.modules.values())
            for linear in self._linears.values()
            if linear.name not in (self._head, self._embedding)
        }
        self._slots = AdapterSlots(layers, num_rows=num_rows, device=self._device)
        for number, lora in self._loras.items():
            self._slots.put(number, lora)
        return self._slots

    def hold(self, fused: Sequence[range]) -> None:
        """Convert all adapters for the way in which steps are computed from now on.

        :param fused: the spans of layers that native calls compute
        """
        self._fused = tuple(fused)
        self._loras = {number: self._formed(lora) for number, lora in self._loras.items()}

    def close(self) -> None:
        """Release the adapters and the model; no more steps may be made."""
        self._loras, self._slots, self._linear_of, self._send_message = {}, None, None, None

    def whole(self, number: int) -> Mapping[str, Tensor]:
        """Return the tensors by which an adapter replaces those of the ranking layers."""
        return self._loras[number].whole

    def rows(self, rows: Sequence[StepRow]) -> AdaptedRows | None:
        """Return the adapter of each token of a step; None if no row has an adapter."""
        if all(row.adapter is None for row in rows):
            return None
        loras = [None if row.adapter is None else self._loras[row.adapter] for row in rows]
        before = [min(max(row.adapter_start - row.start, 0), row.num_new_tokens) for row in rows]
        return AdaptedRows.of(loras, [row.num_new_tokens for row in rows], before, self._device)

    def _formed(self, lora: Lora) -> Lora:
        """Return an adapter with the updates of fused spans in their native form."""
        if tuple(lora.native) == self._fused:
            return lora
        by_layer, native = dict(lora.by_layer), {}
        for layers, before in lora.native.items():
            assert isinstance(before, NativeLora)
            for names, weights in zip(self._layers[layers.start : layers.stop], before.weights(), strict=True):
                by_layer.update({names[number]: own for number, own in weights.items()})
        for layers in self._fused:
            native[layers] = NativeLora(
                [
                    {number: by_layer.pop(name) for number, name in names.items() if name in by_layer}
                    for names in self._layers[layers.start : layers.stop]
                ]
            )
        return evolve(lora, by_layer=by_layer, native=native)

    def _check(self, adapter: Adapter, update: ModuleUpdate, linear: AdaptableShape, module: str) -> None:
        """Check that the model's matrix can take an update.

        :raises AdapterError: the shape differs, or the form of the update is not supported there
        """
        if update.in_pairs and not self._head_dim:
            raise AdapterError(
                f"{adapter.path}: tensor {shown(update.tensor)} is of a llama, which the model is not",
                path=adapter.path,
                tensor=update.tensor,
            )
        if update.magnitude is not None and not linear.has_whole_rows:
            raise AdapterError(
                f"{adapter.path}: tensor {shown(update.tensor)} has magnitudes (DoRA) of rows that ranks divide",
                path=adapter.path,
                tensor=update.tensor,
            )
        expected, found = linear.shape_of(module), (update.up.shape[0], update.down.shape[1])
        if found != expected:
            raise AdapterError(
                f"{adapter.path}: tensor {shown(update.tensor)} updates a matrix of shape {list(found)}, the model's "
                f"has {list(expected)}{adapter.made_for}",
                path=adapter.path,
                tensor=update.tensor,
                value=found,
            )

    def _check_complete(
        self, adapter: Adapter, updates: dict[str, dict[str, ModuleUpdate]], is_target: Callable[[str], bool]
    ) -> None:
        """Check that the adapter has an update of each module that its settings list as a target."""
        for linear in set(self._linears.values()):
            for module in linear.modules:
                if is_target(module) and module not in updates.get(linear.name, {}):
                    missing = f"base_model.model.{module}.lora_A.weight"
                    raise AdapterError(
                        f"{adapter.path} lacks tensor {shown(missing)}, of a module that its settings name"
                        f"{adapter.made_for}",
                        path=adapter.path,
                        tensor=missing,
                    )

    def _check_copies(self, adapter: Adapter) -> None:
        """Check the shapes of base matrices in the adapter's file: a base with a larger vocabulary is another model."""
        for module, shape in adapter.copies.items():
            linear = self._linears.get(plain_name(module))
            own: tuple[int, ...] = ()
            if linear is not None and module in adapter.modules:
                own = linear.shape_of(next(each for each in linear.modules if plain_name(each) == plain_name(module)))
                own = own[::-1] if linear.name == self._embedding else own
            if shape != own:
                tensor = f"{module}.base_layer.weight"
                raise AdapterError(
                    f"{adapter.path}: tensor {shown(tensor)} of shape {list(shape)} repeats a matrix of another base"
                    f"{adapter.made_for}",
                    path=adapter.path,
                    tensor=tensor,
                    value=shape,
                )

    def _joined(self, linear: AdaptableShape, updates: dict[str, ModuleUpdate]) -> LoraWeights:
        if linear.order is not None:
            updates = {module: _with_rows(update, linear.order) for module, update in updates.items()}
        updates = {module: _with_rows(update, linear.rows.get(module)) for module, update in updates.items()}
        if linear.cols is not None:
            cols = linear.cols
            updates = {module: evolve(update, down=update.down[:, cols]) for module, update in updates.items()}
        dtype = self._dtype_of(linear)
        downs, parts, first = [], [], 0
        all_gains = self._gains(linear, updates)
        for module, rows in linear.modules.items():
            update = updates.get(module)
            if update is None:
                continue
            rank = len(update.down)
            # In float32 or wider, so that up is not rounded before it is scaled.
            up = (update.up.to(torch.promote_types(self._dtype, torch.float32)) * update.scale).T
            gains = all_gains.get(module)
            if gains is not None:
                up = up * gains[0].cpu()
            if update.in_pairs:
                up = torch.unflatten(up, 1, (-1, self._head_dim // 2, 2)).transpose(-1, -2).flatten(1)
            up = up.to(device=linear.device, dtype=dtype).contiguous()
            parts.append(LoraPart(rows, slice(first, first + rank), up, gains))
            downs.append(update.down.to(device=linear.device, dtype=dtype))
            first += rank
        return LoraWeights(torch.cat(downs), tuple(parts))

    def _dtype_of(self, linear: AdaptableShape) -> torch.dtype:
        """Return the dtype of a layer's updates.

        On the CPU, torch multiplies those of embeddings and output projection. They are float32 or wider, like the sums
        of the native kernels: in bfloat16, logits changed by 0.003 with the number of rows in a step.
        """
        is_end = linear.name in (self._head, self._embedding) and linear.device.type == "cpu"
        return torch.promote_types(self._dtype, torch.float32) if is_end else self._dtype

    def _gains(self, linear: AdaptableShape, updates: dict[str, ModuleUpdate]) -> dict[str, Tensor]:
        """Return :attr:`LoraPart.gains` of each update with a magnitude, on the layer's device.

        A row's factor is its magnitude divided by the norm of the base's row plus the update. A quantized base's rows
        are those that it decodes to.
        """
        updates = {module: update for module, update in updates.items() if update.magnitude is not None}
        if not updates:
            return {}
        gains = {
            module: torch.empty(2, len(update.up), device=linear.device, dtype=torch.float32)
            for module, update in updates.items()
        }
        sides = {
            module: tuple(side.to(device=linear.device, dtype=torch.float32) for side in (update.up, update.down))
            for module, update in updates.items()
        }
        linear_of = self._linear_of
        if linear_of is None:
            raise ModelClosedError("the model is closed: build another one")
        for part in linear_of(linear.name).decoded(linear.device):
            for module, update in updates.items():
                rows, (up, down) = linear.modules[module], sides[module]
                first = max(rows.start, part.first)
                last = min(rows.stop, part.first + len(part.weight))
                if first >= last:
                    continue
                own, here = slice(first - rows.start, last - rows.start), slice(first - part.first, last - part.first)
                whole = torch.addmm(part.weight[here], up[own], down, alpha=update.scale)
                assert update.magnitude is not None
                factor = update.magnitude[own].to(gains[module]) / torch.linalg.vector_norm(whole, dim=1)
                gains[module][0, own] = factor
                # The base's output includes its bias, which must not be scaled.
                gains[module][1, own] = (1 - factor) * part.bias[here]
        return gains


def _with_rows(update: ModuleUpdate, rows: Tensor | None) -> ModuleUpdate:
    """Return an update of the given rows of its matrix; None: all rows."""
    if rows is None:
        return update
    magnitude = update.magnitude
    return evolve(update, up=update.up[rows], magnitude=None if magnitude is None else magnitude[rows])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run this thread's torch operations on one thread: torch's pool would spin-wait on CPUs that the engine uses."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
