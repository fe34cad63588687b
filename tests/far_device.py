"""Devices that are the CPU in disguise: for tests of what is on several devices, on machines that have one.

A tensor there holds a tensor of the CPU, computes what that computes, and says that it is on the other device. As on a
real one, an operation raises that is given tensors of several devices, and nothing there has an address that the CPU's
kernels could read.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from paged_sdk import GgufModelBuilder, Model, TextModelBuilder, TextSpeculativeBuilder, VisionModelBuilder
from paged_sdk.build import loaded_model
from paged_sdk.build.assembly import load_parts
from paged_sdk.build.device_setup import prepare_thread
from paged_sdk.build.parts import ModelParts
from paged_sdk.config.env import read_environment
from paged_sdk.scheduler.proposer import Proposer

__all__ = ["FAR", "FARTHER", "AnyBuilder", "far_model", "far_parts", "far_tensors", "let_choose_far"]

FAR: Final = torch.device("meta:0")
"""Of all devices that torch knows, it takes tensors of this one as they come: those of others want libraries first."""
FARTHER: Final = torch.device("meta:1")

AnyBuilder: TypeAlias = GgufModelBuilder | TextModelBuilder | TextSpeculativeBuilder | VisionModelBuilder


class FarTensor(Tensor):
    """Holds a tensor of the CPU, and says that it is on another device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> FarTensor:
        make: Any = Tensor._make_wrapper_subclass
        strides, offset = held.stride(), held.storage_offset()
        with torch.inference_mode(False):  # torch refuses views of other tensors there that are of that mode
            made: FarTensor = make(
                cls, held.shape, strides=strides, storage_offset=offset, dtype=held.dtype, device=device
            )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _computed(func, args, kwargs or {})


class _FarTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the tensors that are held."""
    name = func._schema.name
    if name == "aten::_has_compatible_shallow_copy_type":  # modules ask it before they change their parameters' data
        return False
    wanted = next((each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.device)), None)
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    if any(each.device.type == FAR.type and not isinstance(each, FarTensor) for each in tensors):
        # torch.tensor() makes one itself where it is told that device.
        raise RuntimeError(f"{name}: a tensor on {FAR} holds nothing")
    # torch lets single numbers of the CPU be operands on any device.
    places = {each.device for each in tensors if each.dim() or isinstance(each, FarTensor)}
    if len(places) > 1 and name != "aten::copy_":
        raise RuntimeError(f"{name}: expected all tensors to be on one device, found {sorted(map(str, places))}")
    place = args[0].device if name == "aten::copy_" else wanted or next(iter(places), torch.device("cpu"))
    if place.type == FAR.type:
        place = torch.device(FAR.type, place.index or 0)
    owners = {id(each.held): each for each in tensors if isinstance(each, FarTensor) and each.device == place}
    held_args, held_kwargs = tree_map_only(FarTensor, lambda each: each.held, (args, kwargs))
    if wanted is not None:
        held_args, held_kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (held_args, held_kwargs))
    result = func(*held_args, **held_kwargs)
    if name in ("aten::_to_copy", "aten::to") and places != {place}:
        result = result.clone()  # a device has memory of its own
    if place.type == "cpu":
        return result

    def claimed(each: Tensor) -> FarTensor:
        own = owners.get(id(each))  # of operations in place
        return FarTensor(each, place) if own is None else own

    return tree_map_only(Tensor, claimed, result)


def far_tensors() -> AbstractContextManager[object]:
    """Return what lets a thread make tensors on other devices, and copy tensors to them."""
    make: Any = _FarTensors
    mode: AbstractContextManager[object] = make()
    return mode


def let_choose_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let settings name the other devices, and ``cpu:0`` as if it were another than ``cpu``; let a model's threads make
    tensors on them.
    """

    def prepare(device: torch.device, num_threads: int | None) -> None:
        prepare_thread(device, num_threads)
        if threading.current_thread().name != "paged-sdk-images":  # encoders stay on the CPU
            far_tensors().__enter__()  # until the thread ends

    def without_far_tensors(*args: Any) -> Any:
        with disable_modes():  # transformers has uses of its own for that device when it makes an encoder
            return load_vision(*args)

    disable_modes: Any = _python_dispatch._disable_current_modes
    load_vision = loaded_model._vision
    monkeypatch.setattr(loaded_model, "_vision", without_far_tensors)
    monkeypatch.setattr("paged_sdk.build.placement.choose_device", torch.device)
    monkeypatch.setattr("paged_sdk.build.assembly.prepare_thread", prepare)


def far_parts(builder: AnyBuilder, proposer: Proposer | None = None) -> ModelParts:
    """Load a model, parts of which may be on the other devices."""
    with far_tensors():
        return load_parts(builder.source, builder.settings, read_environment({}), proposer=proposer)


def far_model(builder: AnyBuilder, proposer: Proposer | None = None) -> Model:
    """Build a model, parts of which may be on the other devices."""
    return Model(far_parts(builder, proposer))
