"""Fit an adapter's modules that were trained as a whole (PEFT's ``modules_to_save``) to a model's ranking layers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from paged_sdk.adapters.adapter import Adapter, plain_name
from paged_sdk.errors import AdapterError, shown

__all__ = ["fit_whole"]


def fit_whole(adapter: Adapter, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapter's tensors by the model's names, as the model holds its own: same device and dtype.

    :param own: the tensors of the model's ranking layers, which are the only ones that an adapter may replace
    :raises AdapterError: the adapter replaces another module, or one of another shape, or a part of a module
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
    return found
