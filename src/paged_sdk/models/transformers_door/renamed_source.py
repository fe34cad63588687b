"""Show a checkpoint's tensors under the names and shapes of a transformers class."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from paged_sdk.errors import CheckpointError, shown
from paged_sdk.kernels.quantized.stacked_matrix import StackedMatrix
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix
from paged_sdk.weights.source import WeightSource

__all__ = ["RenamedSource"]


class RenamedSource:
    """Shows a checkpoint under the names of a model's parameters, by transformers' conversion rules.

    Matrices that are only renamed are passed on as stored, and so are those that only stand one after the other in the
    model's tensor, such as a stack of a layer's experts. What the rules change otherwise is made on request. Several
    threads may ask at once.

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
        self._stacks = {
            target: stack for target, recipe in self._made.items() if (stack := recipe.stack(source)) is not None
        }

    def names(self) -> Collection[str]:
        """Return the names of all tensors, as the model calls them."""
        return [*self._names, *self._made]

    def __contains__(self, name: object) -> bool:
        return name in self._names or name in self._made

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor; see :meth:`WeightSource.shape`."""
        if name in self._stacks:
            shape = self._stacks[name].shape(self._source)
        else:
            made = self._converted(name, keep=True) if name in self._made else None
            shape = self._source.shape(self._stored(name)) if made is None else tuple(made.shape)
        return shape[::-1] if name in self._transposed else shape

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return one tensor; see :meth:`WeightSource.tensor`."""
        if (stack := self._stacks.get(name)) is not None:
            return stack.matrix(self._source).decoded(dtype).view(stack.shape(self._source)).to(device)
        if name not in self._made:
            return self._source.tensor(self._stored(name), dtype, device)
        return self._converted(name, keep=False).to(dtype=dtype, device=device)

    def matrix(self, name: str) -> StoredMatrix:
        """Return one matrix; see :meth:`WeightSource.matrix`."""
        if name in self._stacks and name not in self._transposed:
            return self._stacks[name].matrix(self._source)
        if name in self._made or name in self._transposed:
            values = self.tensor(name, torch.float32, torch.device("cpu")).flatten(0, -2)
            return DenseMatrix(values.T.contiguous() if name in self._transposed else values)
        return self._source.matrix(self._stored(name))

    def stored_name(self, name: str) -> str:
        """Return the checkpoint's name of the tensor that one is read from; of what is made of several, the model's."""
        recipe = self._made.get(name)
        if recipe is None:
            return self._names.get(name, name)
        return recipe.ingredients[0][1] if len(recipe.ingredients) == 1 else name

    def stored_names(self, name: str) -> Sequence[Sequence[str]] | None:
        """Return the checkpoint's names of the matrices that a tensor's rows lie in, for each matrix of a tensor with
        three dimensions; None: they do not lie in matrices of their own.
        """
        stack = self._stacks.get(name)
        return None if stack is None else stack.names

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

    def stack(self, source: WeightSource) -> _Stack | None:
        """Return where the rows of the only tensor that the rule makes lie; None: they are not rows of matrices."""
        match self.rule.operations:
            case [MergeModulelist(dim=0)]:
                is_stacked = True
            case [MergeModulelist(dim=0), Concatenate(dim=1)]:
                is_stacked = True
            case [Concatenate(dim=0)]:
                is_stacked = False
            case _:
                return None
        lists = [[name for pattern, name in self.ingredients if pattern == each] for each in self.rule.source_patterns]
        groups = [names for names in lists if names]
        is_one = len(self.rule.target_patterns) == 1
        if not is_one or len({len(names) for names in groups}) != 1 or len(source.shape(groups[0][0])) != 2:
            return None
        of_each = list(zip(*groups, strict=True))
        return _Stack(of_each if is_stacked else [[name for names in groups for name in names]], is_stacked)

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


@frozen
class _Stack:
    """Describes a tensor whose rows lie in several of the checkpoint's matrices.

    :ivar names: for each matrix of the tensor, the names of the matrices that have its rows, in order
    :ivar is_stacked: whether the tensor has three dimensions, the first of which counts its matrices
    """

    names: Sequence[Sequence[str]]
    is_stacked: bool

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        """Return the tensor's shape.

        :raises CheckpointError: the matrices do not fit each other
        """
        shapes = {tuple(source.shape(name) for name in names) for names in self.names}
        widths = {shape[1:] for of_one in shapes for shape in of_one}
        if len(shapes) != 1 or len(widths) != 1 or len(*widths) != 1:
            first, *_, last = [name for names in self.names for name in names]
            raise CheckpointError(f"the tensors {shown(first)} to {shown(last)} do not make one: their shapes differ")
        ((of_one,), ((width,),)) = shapes, widths
        rows = sum(height for height, _ in of_one)
        return (len(self.names), rows, width) if self.is_stacked else (rows, width)

    def matrix(self, source: WeightSource) -> StackedMatrix:
        """Return the tensor's rows."""
        return StackedMatrix([source.matrix(name) for names in self.names for name in names])
