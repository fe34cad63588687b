"""Triton launches on the current device: an op makes its tensors' device that for the launch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode, fake_tensor

pytest.importorskip("triton")

from paged_sdk.kernels import activation, fallback, fused_moe, kv_cache, norm, rotary, sampling
from paged_sdk.kernels.attention_inputs import LayerCache
from paged_sdk.kernels.triton import availability

DEVICE: Final = torch.device("cuda", 1)


def halves(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.float16, device=DEVICE)


def floats(*shape: int) -> Tensor:
    return torch.empty(*shape, device=DEVICE)


def slots() -> Tensor:
    return torch.zeros(3, dtype=torch.int64, device=DEVICE)


def cache() -> LayerCache:
    return LayerCache(halves(2, 16, 1, 64), halves(2, 16, 1, 64))


def rotate_and_cache() -> None:
    query, key, value = halves(3, 2, 64), halves(3, 1, 64), halves(3, 1, 64)
    rotary.rotate_and_cache(query, key, value, floats(3, 32), floats(3, 32), cache(), slots())


def reshape_and_cache() -> object:
    pages = cache()
    op: Any = kv_cache._reshape_and_cache
    return op._init_fn(halves(3, 1, 64), halves(3, 1, 64), pages.key, pages.value, slots(), None, None)


def route() -> object:
    op: Any = fused_moe._route
    return op._init_fn(halves(3, 8), 2, renormalize=True)


OPS: Final[dict[str, tuple[str, Callable[[], object]]]] = {
    "rms_norm": ("norm", lambda: norm.rms_norm(halves(3, 64), halves(64), 1e-5)),
    "add_rms_norm": ("norm", lambda: norm.add_rms_norm(halves(3, 64), halves(3, 64), halves(64), 1e-5)),
    "gated_activation": ("activation", lambda: activation.gated_activation(halves(3, 64))),
    "argmax": ("sampling", lambda: sampling.argmax(floats(3, 64))),
    "route": ("routing", route),
    "rotate_and_cache": ("rotary", rotate_and_cache),
    "reshape_and_cache": ("kv_cache", reshape_and_cache),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_launches_on_its_tensors_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, call = OPS[name]
    current, launched = [torch.device("cuda", 0)], []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor.device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(availability, "why_not", lambda device: None)
    kernels = importlib.import_module(f"paged_sdk.kernels.triton.{file}")
    monkeypatch.setattr(kernels, name, lambda *_, **__: launched.append(current[-1]))
    # Where there is a GPU, torch makes a tensor on the device of the first fake one, and there may be but one device.
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda *_: None)
    with FakeTensorMode():
        call()
    assert launched == [DEVICE]
    assert current == [torch.device("cuda", 0)]


def test_float64_is_not_launched() -> None:
    assert fallback.why_not_triton(torch.zeros(1, dtype=torch.float64)) == "Triton kernels serve no float64"
