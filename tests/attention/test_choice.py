"""Which backend an engine gets, and what the log says about it."""

from __future__ import annotations

import logging

import pytest
import torch
from attrs import evolve
from naive_attention import CPU, shape

from native_weights import needs_library, workspace
from paged_sdk.attention.backend import AttentionSetup, KvStorage
from paged_sdk.attention.choice import CANDIDATES, Candidate, choose_storage
from paged_sdk.attention.contiguous import ContiguousBackend
from paged_sdk.attention.native_paged import NativePagedBackend
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.config.engine import EngineConfig

SETUP = AttentionSetup(model=shape(), engine=EngineConfig(), dtype=torch.float32, device=CPU)
META = evolve(SETUP, device=torch.device("meta"))


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="paged_sdk")


def nobody_asks(setup: AttentionSetup) -> str | None:
    raise AssertionError("a backend for other devices was asked")


@needs_library
def test_the_cpu_has_native_kernels(caplog: pytest.LogCaptureFixture) -> None:
    backend = choose_storage(evolve(SETUP, workspace=workspace())).make(2)
    assert isinstance(backend, NativePagedBackend)
    assert backend.native_pages is not None
    assert backend.decode_backend is None
    assert "Attention: native CPU kernels." in caplog.messages


def test_torch_serves_what_no_kernel_does(caplog: pytest.LogCaptureFixture) -> None:
    backend = choose_storage(SETUP).make(2)
    assert type(backend) is PagedBackend
    assert backend.native_pages is None
    assert backend.decode_backend is None
    assert caplog.messages == ["Attention: torch (native CPU kernels: they are absent)."]


def test_contiguous_storage_has_no_blocks(caplog: pytest.LogCaptureFixture) -> None:
    backend = choose_storage(evolve(SETUP, engine=EngineConfig(paged=False))).make(0)
    assert isinstance(backend, ContiguousBackend)
    assert caplog.messages == ["Attention: torch, contiguous."]


def test_a_new_backend_is_one_entry(caplog: pytest.LogCaptureFixture) -> None:
    """The first that has nothing against a setup serves; those for other devices, or without blocks, are not asked."""
    storage = KvStorage(
        make=lambda num_blocks: ContiguousBackend(shape(), dtype=torch.float32, device=CPU), scratch={CPU: 7}
    )
    others = [
        Candidate(name="a", paged=True, device_type="cuda", why_not=nobody_asks, storage=lambda setup: storage),
        Candidate(name="b", paged=False, device_type=None, why_not=nobody_asks, storage=lambda setup: storage),
        Candidate(name="c", paged=True, device_type="meta", why_not=lambda setup: "not", storage=lambda setup: storage),
        Candidate(name="d", paged=True, device_type=None, why_not=lambda setup: "no", storage=lambda setup: storage),
        Candidate(name="toy", paged=True, device_type="meta", why_not=lambda setup: None, storage=lambda _: storage),
    ]
    assert choose_storage(META, [*others, *CANDIDATES]) is storage
    assert caplog.messages == ["Attention: toy (c: not; d: no)."]
