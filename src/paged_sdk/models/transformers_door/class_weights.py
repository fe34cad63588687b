"""Load the weights of a class of transformers, with matrices in this package's weight forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paged_sdk.errors import CheckpointError, shown
from paged_sdk.models.checkpoint_layout import have_same_values
from paged_sdk.models.loading_threads import loading_threads
from paged_sdk.models.transformers_door.experts import OwnExperts, load_own_experts
from paged_sdk.models.transformers_door.modules import CurrentStep, OwnEmbedding, OwnLinear
from paged_sdk.models.transformers_door.probe import Findings
from paged_sdk.models.transformers_door.renamed_source import RenamedSource
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.embedding import Embedding

__all__ = ["ClassWeights", "OwnParts", "sees_tokens"]


def sees_tokens(name: str) -> bool:
    """Return whether a linear layer's rows are the tokens of a step, and not those routed to an expert."""
    return ".experts." not in f".{name}"


def _holds_experts(name: str, module: nn.Module) -> bool:
    """Return whether a module has the matrices of several experts as parameters."""
    is_named_so = "expert" in f"{name}.{type(module).__name__}".lower()
    return is_named_so and any(parameter.dim() > 2 for parameter in module.parameters(recurse=False))


def _output_projection(model: Any) -> nn.Module | None:
    """Return the output projection; None if the class does not tell."""
    found: nn.Module | None = model.get_output_embeddings()
    return found


@frozen(eq=False)
class OwnParts:
    """Holds the parts of a model whose weights are in this package's forms.

    :ivar embedding: the token embeddings; None: the class's own
    :ivar linears: linear layers by the class's names
    :ivar experts: modules of experts, likewise
    """

    embedding: OwnEmbedding | None
    linears: Mapping[str, OwnLinear]
    experts: Mapping[str, nn.Module]


class ClassWeights:
    """Loads a checkpoint into one model.

    :ivar experts: the experts that this package computes, once they are loaded
    """

    def __init__(
        self,
        model: PreTrainedModel,
        loader: WeightLoader,
        source: RenamedSource,
        step: CurrentStep,
        findings: Findings,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._model = model
        self._loader = loader
        self._source = source
        self._step = step
        self._findings = findings
        self._read = findings.read
        # Unused by text, mostly the image encoder, which is not quantized.
        self._unused = {name for name in findings.unused if sees_tokens(name)}
        self._dtype = dtype
        self._device = device
        self._embedding: OwnEmbedding | None = None
        self._linears: dict[str, OwnLinear] = {}
        self._experts: dict[str, nn.Module] = {}
        self.experts: dict[nn.Module, OwnExperts] = {}
        self._head = next((name for name, module in model.named_modules() if module is _output_projection(model)), None)
        # Checkpoints may have either name of a tied parameter.
        self._tied: dict[str, str] = dict(model.all_tied_weights_keys)
        self._in_float32 = tuple(model._get_dtype_plan(dtype))

    def run(self, num_threads: int) -> None:
        """Load everything; the embeddings first, because the output projection may share them.

        :param num_threads: number of linear layers loaded at once
        """
        modules = dict(self._model.named_modules())
        table = self._load_embedding(modules)
        with loading_threads(num_threads) as pool:
            pending = [
                (name, pool.submit(self._linear, name, module, table))
                for name, module in modules.items()
                if type(module) in (nn.Linear, Conv1D) and not self._stays(name, module)
            ]
            experts = [
                (name, module, pool.submit(self._own_experts, name, module))
                for name, module in modules.items()
                if name in self._findings.experts and self._are_own(name, module)
            ]
            for name, linear in pending:
                self._linears[name] = linear.result()
                self._model.set_submodule(name, self._linears[name])
            for name, module, own in experts:
                self._experts[name], self.experts[module] = module, own.result()
        for name, module in list(self._model.named_modules()):
            for own, parameter in list(module.named_parameters(recurse=False)):
                self._parameter(module, f"{name}.{own}".lstrip("."), own, parameter)
            for own, buffer in list(module.named_buffers(recurse=False)):
                self._buffer(module, f"{name}.{own}".lstrip("."), own, buffer)
        for name, module in self._model.named_modules():
            if _holds_experts(name, module):
                what = f"Experts are kept in {self._dtype}, and multiplied by torch"
                self._loader.note(f"{what}: {type(module).__name__} computes them in a way of its own.")
        self._loader.close()

    @property
    def parts(self) -> OwnParts:
        """Return what was loaded into this package's forms."""
        return OwnParts(self._embedding, self._linears, self._experts)

    def replace(
        self,
        parts: OwnParts,
        experts: MutableMapping[nn.Module, OwnExperts],
        numbers: Iterable[int],
        on_replaced: Callable[[int], None],
        num_threads: int,
    ) -> None:
        """Load some parts of another model of this class, layer by layer and matrix by matrix.

        :param parts: the other model's
        :param experts: the other model's, to be updated
        :param numbers: numbers of layers; the number of layers stands for what is in none
        :param on_replaced: called with each number just before a matrix of it is dropped
        """
        modules = dict(self._model.named_modules())

        def replace(number: int) -> None:
            table = None
            if number == self._findings.config.num_layers and parts.embedding is not None:
                table = self._load_embedding(modules)
                assert table is not None, "it has been loaded before"
                on_replaced(number)
                parts.embedding.embedding = table[1]
            for name, linear in parts.linears.items():
                if self._number_of(name) == number:
                    made = self._linear(name, modules[name], table)
                    on_replaced(number)
                    linear.take(made)
            for name, module in parts.experts.items():
                if self._number_of(name) == number:
                    own = self._own_experts(name, modules[name]).of(module)
                    on_replaced(number)
                    experts[module] = own

        with loading_threads(num_threads) as pool:
            for pending in [pool.submit(replace, number) for number in numbers]:
                pending.result()
        self._loader.close()

    def _number_of(self, name: str) -> int:
        """Return the number of the layer that a module is in, or the number of layers if it is in none."""
        count = self._findings.config.num_layers
        found = (at for at, block in enumerate(self._findings.blocks) if block and name.startswith(f"{block}."))
        return next(found, count)

    def _own_experts(self, name: str, module: nn.Module) -> OwnExperts:
        return load_own_experts(name, module, self._loader, self._source, self._dtype)

    def _stays(self, name: str, module: Any) -> bool:
        """Return whether a linear layer is not replaced: text does not use it, or it computes ranks, or the class reads
        its weight directly or keeps it in another dtype.
        """
        return (
            name in self._read
            or name in self._unused
            or self._is_of_ranker(name)
            or module.weight.dtype != self._dtype
            or self._stays_float32(name)
        )

    def _are_own(self, name: str, module: nn.Module) -> bool:
        """Return whether this package computes experts: those whose matrices have the model's dtype."""
        matrices = [own for own, parameter in module.named_parameters(recurse=False) if parameter.dim() > 2]
        return all(
            getattr(module, own).dtype == self._dtype and not self._stays_float32(f"{name}.{own}") for own in matrices
        )

    def _is_of_ranker(self, name: str) -> bool:
        """Return whether a layer is part of the ranking layers, whose rows are texts, not tokens."""
        return self._findings.is_ranker and (not name.startswith(f"{self._findings.body}.") or ".pooler." in f"{name}.")

    def _load_embedding(self, modules: Mapping[str, nn.Module]) -> tuple[str, Embedding] | None:
        """Load the token embeddings; return their name and form, or None if the class has another kind of embedding."""
        table = self._model.get_input_embeddings()
        name = next((name for name, module in modules.items() if module is table), None)
        if name is None or name in self._read or type(table) is not nn.Embedding:
            return None
        rows, columns = table.weight.shape
        stored = self._name_of(f"{name}.weight")
        embedding = self._loader.embedding(stored, vocab_size=rows, hidden_size=columns, scale=None)
        self._embedding = own = OwnEmbedding(embedding)
        for each in [each for each, module in self._model.named_modules(remove_duplicate=False) if module is table]:
            self._model.set_submodule(each, own)
        return f"{name}.weight", embedding

    def _linear(self, name: str, module: Any, table: tuple[str, Embedding] | None) -> OwnLinear:
        weight = f"{name}.weight"
        if table is not None and self._tied.get(weight, weight) == table[0] and not self._has_own(weight, table[0]):
            linear = self._loader.tied_head(name, table[1], vocab_size=module.weight.shape[0])
            has_bias = module.bias is not None
            bias = self._loader.tensor(self._name_of(f"{name}.bias"), linear.out_features) if has_bias else None
            return OwnLinear(linear, self._step, bias)
        rows, columns = module.weight.shape[::-1] if type(module) is Conv1D else module.weight.shape
        linear = self._loader.linear(
            [self._name_of(weight).removesuffix(".weight")],
            in_features=columns,
            out_features=(rows,),
            bias=module.bias is not None,
            is_head=name == self._head,
        )
        is_of_tokens = sees_tokens(name) and name not in self._findings.shared
        return OwnLinear(linear, self._step if is_of_tokens else None)

    def _has_own(self, name: str, table: str) -> bool:
        """Return whether the checkpoint holds different values for a matrix that the class ties to the embeddings."""
        there = name in self._source and table in self._source
        return there and not have_same_values(self._source, name, table)

    def _parameter(self, module: nn.Module, name: str, own: str, parameter: nn.Parameter) -> None:
        dtype = torch.float32 if self._stays_float32(name) else parameter.dtype
        values = self._values(self._name_of(name), parameter, dtype)
        setattr(module, own, nn.Parameter(values, requires_grad=False))

    def _buffer(self, module: nn.Module, name: str, own: str, buffer: Tensor) -> None:
        if name in self._source and own not in module._non_persistent_buffers_set:
            buffer = self._values(name, buffer, buffer.dtype)
        if buffer.is_meta:
            raise CheckpointError(f"there is no tensor {shown(name)}")
        setattr(module, own, buffer.to(self._device))

    def _values(self, name: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Load a tensor in a dtype, which may have more bits than the model's."""
        return self._loader.tensor(name, *like.shape, in_float32=dtype != self._dtype).to(dtype)

    def _name_of(self, name: str) -> str:
        """Return the checkpoint's name of a parameter: its own name, or that of a parameter tied to it."""
        if name in self._source:
            return name
        others = [self._tied.get(name), *(each for each, source in self._tied.items() if source == name)]
        return next((each for each in others if each is not None and each in self._source), name)

    def _stays_float32(self, name: str) -> bool:
        return any(part in name for part in self._in_float32)
