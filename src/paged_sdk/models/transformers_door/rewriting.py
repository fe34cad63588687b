"""Make modules of transformers' classes call its interfaces for attention and experts, where this package says how."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

from torch import nn
from transformers import PreTrainedModel

from paged_sdk.models.transformers_door import rewritten

__all__ = ["rewrite"]


def rewrite(model: PreTrainedModel) -> None:
    """Replace the classes of a model's modules by the subclasses in the file of its ``model_type``, if there is one."""
    name = f"{rewritten.__name__}.{str(model.config.model_type).replace('-', '_')}"
    if not name.rpartition(".")[2].isidentifier() or find_spec(name) is None:
        return
    classes: Mapping[type[nn.Module], type[nn.Module]] = import_module(name).REWRITTEN
    for module in model.modules():
        module.__class__ = classes.get(type(module), type(module))
