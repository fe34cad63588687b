"""Load a checkpoint into a class of transformers, with matrices in this package's weight forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.errors import CheckpointError, shown
from paged_sdk.kernels.placement import Placement
from paged_sdk.logs import get_logger
from paged_sdk.models.checkpoint_layout import have_same_values
from paged_sdk.models.loading_threads import loading_threads
from paged_sdk.models.transformers_door.experts import OwnExperts, load_own_experts
from paged_sdk.models.transformers_door.model import TransformersModel
from paged_sdk.models.transformers_door.modules import Body, CurrentStep, OwnEmbedding, OwnLinear
from paged_sdk.models.transformers_door.probe import Findings, probe
from paged_sdk.models.transformers_door.renamed_source import RenamedSource
from paged_sdk.models.transformers_door.row_check import check_rows
from paged_sdk.models.transformers_door.seam import attach
from paged_sdk.models.transformers_door.skeleton import make_skeleton
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.parallel.group import Group
from paged_sdk.quant.embedding import Embedding
from paged_sdk.quant.policy import DENSE, WeightPolicy
from paged_sdk.weights.source import WeightSource

__all__ = ["TransformersDoor", "open_door"]

_log = get_logger(__name__)


class TransformersDoor:
    """Describes a model of transformers whose weights are not loaded yet."""

    def __init__(self, model: PreTrainedModel, findings: Findings) -> None:
        self._model = model
        self._findings = findings

    @property
    def config(self) -> DecoderConfig:
        """Return the model's shape, as the engine sees it."""
        return self._findings.config

    @property
    def has_experts(self) -> bool:
        """Return whether layers have experts that follow transformers' interface for them."""
        return bool(self._findings.experts)

    def tensor_names(self, source: WeightSource) -> None:
        """Return None: only the class knows its tensor names."""

    def load(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        placement: Placement,
        policy: WeightPolicy = DENSE,
        on_progress: Callable[[int, int], None] | None = None,
        num_threads: int = 1,
        group: Group | None = None,
    ) -> TransformersModel:
        """Load the weights, once per model, and check that tokens interact only in attention.

        :param source: the weights; stays open
        :param dtype: dtype of weights, activations, keys and values
        :param placement: must have a single device
        :param policy: chooses the form of each matrix
        :param on_progress: see :func:`~paged_sdk.models.loading.load_model`
        :param group: must be None: classes of transformers are not divided among ranks
        :raises CheckpointError: a tensor is missing or has another shape than the class expects
        :raises UnsupportedArchitectureError: rows of a step would affect each other
        """
        assert group is None
        model, step, device = self._model, CurrentStep(), placement.embedding
        transposed = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
        renamed = RenamedSource(source, model, transposed)
        loader = WeightLoader(renamed, policy, dtype=dtype, device=device, prefixes=("",), on_progress=on_progress)
        loading = _Loading(model, loader, renamed, step, self._findings, dtype=dtype, device=device)
        loading.run(num_threads)
        body = Body(model.get_submodule(self._findings.body))
        if self._findings.body:
            model.set_submodule(self._findings.body, body)
        is_encoder = not self._findings.body or self._findings.is_ranker
        seam = attach(model)
        seam.experts.update(loading.experts)
        made = TransformersModel(
            body if is_encoder else model,
            body,
            seam,
            step,
            self._findings.layers,
            self.config,
            dtype=dtype,
            device=device,
            adaptable=[shape for shape in loader.adaptable if self._is_adaptable(shape.name)],
            blocks=self._blocks(),
            first_position=self._findings.first_position,
            ranker=model if self._findings.is_ranker else None,
        )
        check_rows(made)
        return made

    def _blocks(self) -> list[str]:
        """Return the names of the layers' modules inside the wrapped body; empty if unknown or unneeded."""
        if not hasattr(self._model, "get_image_features") or "" in self._findings.blocks:
            return []
        body = self._findings.body
        return [f"{body}.layers{name.removeprefix(body)}" for name in self._findings.blocks]

    def _is_adaptable(self, name: str) -> bool:
        # Layers after the body get only the rows whose logits are read, not a step's tokens.
        return (
            _sees_tokens(name)
            and name not in self._findings.shared
            and name.startswith(f"{self._findings.body}." if self._findings.body else "")
        )


def open_door(config: Mapping[str, Any], dtype: torch.dtype, *, images: bool = False) -> TransformersDoor:
    """Prepare a model without a family to run by a class of transformers, and check all that needs no weights.

    :param config: config.json's content
    :param dtype: dtype of weights and activations
    :param images: whether the model must accept images
    :raises UnsupportedArchitectureError: transformers has no such class, or the class needs attention that this package
        does not compute
    """
    model = make_skeleton(config, dtype, images=images)
    findings = probe(model)
    _log.info("%s has no decoder here: transformers' %s runs it.", findings.config.model_type, type(model).__name__)
    return TransformersDoor(model, findings)


def _sees_tokens(name: str) -> bool:
    """Return whether a linear layer's rows are the tokens of a step, and not those routed to an expert."""
    return "experts." not in name


def _holds_experts(name: str, module: nn.Module) -> bool:
    """Return whether a module has the matrices of several experts as parameters."""
    is_named_so = "expert" in f"{name}.{type(module).__name__}".lower()
    return is_named_so and any(parameter.dim() > 2 for parameter in module.parameters(recurse=False))


def _output_projection(model: Any) -> nn.Module | None:
    """Return the output projection; None if the class does not tell."""
    found: nn.Module | None = model.get_output_embeddings()
    return found


class _Loading:
    """Loads a checkpoint into one model."""

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
        self._unused = {name for name in findings.unused if _sees_tokens(name)}
        self._dtype = dtype
        self._device = device
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
        table = self._embedding(modules)
        with loading_threads(num_threads) as pool:
            pending = [
                (name, pool.submit(self._linear, name, module, table))
                for name, module in modules.items()
                if type(module) in (nn.Linear, Conv1D) and not self._stays(name, module)
            ]
            experts = [
                (module, pool.submit(load_own_experts, name, module, self._loader, self._source, self._dtype))
                for name, module in modules.items()
                if name in self._findings.experts and self._are_own(name, module)
            ]
            for name, linear in pending:
                self._model.set_submodule(name, linear.result())
            self.experts.update((module, own.result()) for module, own in experts)
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

    def _embedding(self, modules: Mapping[str, nn.Module]) -> tuple[str, Embedding] | None:
        """Load the token embeddings; return their name and form, or None if the class has another kind of embedding."""
        table = self._model.get_input_embeddings()
        name = next((name for name, module in modules.items() if module is table), None)
        if name is None or name in self._read or type(table) is not nn.Embedding:
            return None
        rows, columns = table.weight.shape
        stored = self._name_of(f"{name}.weight")
        embedding = self._loader.embedding(stored, vocab_size=rows, hidden_size=columns, scale=None)
        own = OwnEmbedding(embedding)
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
        is_of_tokens = _sees_tokens(name) and name not in self._findings.shared
        return OwnLinear(linear, self._step if is_of_tokens else None)

    def _has_own(self, name: str, table: str) -> bool:
        """Return whether the checkpoint holds different values for a matrix that the class ties to the embeddings."""
        there = name in self._source and table in self._source
        return there and not have_same_values(self._source, name, table)

    def _parameter(self, module: nn.Module, name: str, own: str, parameter: nn.Parameter) -> None:
        stored = self._name_of(name)
        dtype = torch.float32 if self._stays_float32(name) else parameter.dtype
        values = self._loader.tensor(stored, *parameter.shape).to(dtype)
        setattr(module, own, nn.Parameter(values, requires_grad=False))

    def _buffer(self, module: nn.Module, name: str, own: str, buffer: Tensor) -> None:
        if name in self._source and own not in module._non_persistent_buffers_set:
            buffer = self._loader.tensor(name, *buffer.shape).to(buffer.dtype)
        if buffer.is_meta:
            raise CheckpointError(f"there is no tensor {shown(name)}")
        setattr(module, own, buffer.to(self._device))

    def _name_of(self, name: str) -> str:
        """Return the checkpoint's name of a parameter: its own name, or that of a parameter tied to it."""
        if name in self._source:
            return name
        others = [self._tied.get(name), *(each for each, source in self._tied.items() if source == name)]
        return next((each for each in others if each is not None and each in self._source), name)

    def _stays_float32(self, name: str) -> bool:
        return any(part in name for part in self._in_float32)
