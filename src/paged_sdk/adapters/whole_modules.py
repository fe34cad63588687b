"""Fit an adapter's modules that were trained as a whole (PEFT's ``modules_to_save``) to a model's ranking layers, and
its updates of their matrices.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paged_sdk.adapters.adapter import Adapter, ModuleUpdate, plain_name
from paged_sdk.errors import AdapterError, shown

__all__ = ["fit_whole", "of_ranking"]


def of_ranking(adapter: Adapter, own: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the adapter's updates of matrices of ranking layers, as their names by the names in the adapter.

    Since these layers compute texts, not tokens, an adapter that applies to some tokens has none.
    """
    names = {} if adapter.invocation else {plain_name(name): name for name, tensor in own.items() if tensor.dim() == 2}
    found = {module: names.get(f"{plain_name(module)}.weight") for module in adapter.modules}
    return {module: name for module, name in found.items() if name is not None}


def fit_whole(adapter: Adapter, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapter's tensors by the model's names, as the model holds its own: same device and dtype.

    :param own: the tensors of the model's ranking layers, which are the only ones that an adapter may replace
    :raises AdapterError: the adapter replaces another module, or a part of a module, or a tensor's shape is another
    """
    names = {plain_name(name): name for name in own}
    found: dict[str, Tensor] = {}
    for tensor, values in adapter.whole.items():
        name = names.get(plain_name(tensor))
        if name is None:
            allowed = f"of which the model has {', '.join(own)}" if own else "of which the model has none"
            raise AdapterError(
                f"{adapter.path}: tensor {shown(tensor)} is of a module that was trained as a whole, which only layers "
                f"that rank texts may be, {allowed}{adapter.made_for}",
                path=adapter.path,
                tensor=tensor,
            )
        if values.shape != own[name].shape:
            raise AdapterError(
                f"{adapter.path}: tensor {shown(tensor)} has shape {list(values.shape)}, the model's has "
                f"{list(own[name].shape)}{adapter.made_for}",
                path=adapter.path,
                tensor=tensor,
                value=tuple(values.shape),
            )
        found[name] = values.to(own[name], copy=True)
    missing = next((name for name in own if name not in found and adapter.is_whole(name.rpartition(".")[0])), None)
    if missing is not None:
        raise AdapterError(
            f"{adapter.path} lacks tensor {shown(missing)}, of a module that its settings name as trained as a whole"
            f"{adapter.made_for}",
            path=adapter.path,
            tensor=missing,
        )
    for module, name in of_ranking(adapter, own).items():
        found[name] = _updated(adapter, adapter.modules[module], own[name])
    return found


def _updated(adapter: Adapter, update: ModuleUpdate, weight: Tensor) -> Tensor:
    """Return the sum of a matrix and its update."""
    shape = (update.up.shape[0], update.down.shape[1])
    if shape != weight.shape or update.looks_up:
        raise AdapterError(
            f"{adapter.path}: tensor {shown(update.tensor)} updates a matrix of shape {list(shape)}, the model's has "
            f"{list(weight.shape)}{adapter.made_for}",
            path=adapter.path,
            tensor=update.tensor,
            value=shape,
        )
    up, down = (side.to(weight.device, torch.float32) for side in (update.up, update.down))
    whole = torch.addmm(weight.float(), up, down, alpha=update.scale)
    if update.magnitude is not None:
        whole *= (update.magnitude.to(whole) / torch.linalg.vector_norm(whole, dim=1))[:, None]
    return whole.to(weight.dtype)
