"""Show a checkpoint's tensors under the names and shapes of a transformers class."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from paged_sdk.errors import CheckpointError, shown
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.weights.source import WeightSource

__all__ = ["RenamedSource"]


class RenamedSource:
    """Shows a checkpoint under the names of a model's parameters, by transformers' conversion rules.

    Matrices that are only renamed are passed on as stored. Tensors that the rules convert, such as a stack of a layer's
    experts from one matrix per expert, are made on request. Several threads may ask at once.

    :param transposed: the model's names of matrices with a row per input, as in ``Conv1D``
    """

    def __init__(self, source: WeightSource, model: PreTrainedModel, transposed: Collection[str]) -> None:
        self._source = source
        self._model = model
        self._transposed = frozenset(transposed)
        self._names: dict[str, str] = {}
        self._made: dict[str, _Recipe] = {}
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        own = model.state_dict()
        prefix = model.base_model_prefix
        for name in sorted(source.names(), key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, own)
            if target not in own and name in own:
                target, pattern = name, None
            if pattern is None:
                self._names[target] = name
            else:
                self._add(of_pattern[pattern], target, pattern, name)

    def names(self) -> Collection[str]:
        """Return the names of all tensors, as the model calls them."""
        return [*self._names, *self._made]

    def __contains__(self, name: object) -> bool:
        return name in self._names or name in self._made

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor; see :meth:`WeightSource.shape`."""
        made = self._converted(name, keep=True) if name in self._made else None
        shape = self._source.shape(self._stored(name)) if made is None else tuple(made.shape)
        return shape[::-1] if name in self._transposed else shape

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return one tensor; see :meth:`WeightSource.tensor`."""
        if name not in self._made:
            return self._source.tensor(self._stored(name), dtype, device)
        return self._converted(name, keep=False).to(dtype=dtype, device=device)

    def matrix(self, name: str) -> StoredMatrix:
        """Return one matrix; see :meth:`WeightSource.matrix`."""
        if name in self._made or name in self._transposed:
            values = self.tensor(name, torch.float32, torch.device("cpu")).flatten(0, -2)
            return DenseMatrix(values.T.contiguous() if name in self._transposed else values)
        return self._source.matrix(self._stored(name))

    def close(self) -> None:
        """Close the checkpoint."""
        self._source.close()

    def _stored(self, name: str) -> str:
        if name not in self._names:
            raise CheckpointError(f"there is no tensor for {shown(name)}")
        return self._names[name]

    def _add(self, rule: WeightConverter, target: str, pattern: str, name: str) -> None:
        """Record that one or more of the model's tensors are made from this tensor."""
        recipe = self._made.get(target)
        if recipe is None:
            recipe = _Recipe(rule, target)
            first, *_ = rule.target_patterns
            for each in rule.target_patterns:
                self._made[target.replace(first, each)] = recipe
        recipe.ingredients.append((pattern, name))

    def _converted(self, name: str, *, keep: bool) -> Tensor:
        """Return a tensor made by the rules.

        :param keep: whether to keep it for the next call
        """
        recipe = self._made[name]
        with recipe.lock:
            if name not in recipe.ready:
                try:
                    recipe.make(self._source, self._model)
                except CheckpointError:
                    raise
                except Exception as error:  # the rules raise anything for tensors that do not fit
                    problem = f"{shown(name)} cannot be made of what the checkpoint has: {error}"
                    raise CheckpointError(problem) from error
            if name not in recipe.ready:
                raise CheckpointError(f"the rules for {shown(name)} make no such tensor")
            return recipe.ready[name] if keep else recipe.ready.pop(name)


@define(eq=False)
class _Recipe:
    """Describes from which of the checkpoint's tensors a rule makes some of the model's.

    :ivar rule: transformers' rule
    :ivar target: name of the first tensor that is made
    :ivar ingredients: the rule's pattern and the name of each tensor that is read
    :ivar ready: tensors that were made and not given out yet, by name
    :ivar lock: held while tensors are made or given out: otherwise threads that load two tensors of the recipe would
        each make both, and keep what the other has got already
    """

    rule: WeightConverter
    target: str
    ingredients: list[tuple[str, str]] = field(factory=list)
    ready: dict[str, Tensor] = field(factory=dict)
    lock: threading.Lock = field(factory=threading.Lock)

    def make(self, source: WeightSource, model: PreTrainedModel) -> None:
        """Make all tensors of the recipe; they are then in :attr:`ready`.

        :param model: the model, whose parameters have the resulting shapes
        """
        rule = copy.deepcopy(self.rule)
        cpu = torch.device("cpu")
        for pattern, name in self.ingredients:
            read: Any = partial(source.tensor, name, torch.float32, cpu)  # rules accept functions instead of tensors
            rule.add_tensor(self.target, name, pattern, read)
        made = rule.convert(self.target, model=model, config=model.config)
        self.ready.update((name, each[0] if isinstance(each, list) else each) for name, each in made.items())
