"""Chooses an engine's attention backend: the first in a list, fastest first, that can serve its setup."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import torch
from attrs import frozen

from paged_sdk.attention.backend import AttentionSetup, KvStorage
from paged_sdk.attention.contiguous import ContiguousBackend
from paged_sdk.attention.native_paged import native_storage, why_not_native
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.kernels.paged_attention import why_not_triton
from paged_sdk.logs import get_logger

__all__ = ["CANDIDATES", "Candidate", "choose_storage"]

_log = get_logger(__name__)


@frozen(kw_only=True)
class Candidate:
    """Describes an attention backend that may be chosen.

    :ivar name: for the log
    :ivar paged: whether the backend keeps KV in blocks
    :ivar device_type: the type of device that the backend runs on; None: any
    :ivar why_not: returns why the backend cannot serve a setup, or None if it can
    :ivar storage: makes the storage, for a setup for which ``why_not`` returns None
    """

    name: str
    paged: bool
    device_type: str | None
    why_not: Callable[[AttentionSetup], str | None]
    storage: Callable[[AttentionSetup], KvStorage]


def _nothing_against(setup: AttentionSetup) -> str | None:
    return None


def _why_not_triton(setup: AttentionSetup) -> str | None:
    model = setup.model
    if setup.has_bidirectional:
        return "its tokens, or those of its images, attend in both directions"
    if model.relative_biases:
        return "they have no relative biases"
    heads = (torch.empty(0, model.num_heads, size, dtype=setup.dtype, device=setup.device) for size in model.head_dims)
    reasons = (why_not_triton(each, key_only=model.key_only) for each in heads)
    return next((reason for reason in reasons if reason is not None), None)


def _triton_storage(setup: AttentionSetup) -> KvStorage:
    from paged_sdk.attention.triton_paged import triton_storage  # Triton is not installed everywhere

    return triton_storage(setup)


def _paged_storage(setup: AttentionSetup) -> KvStorage:
    return KvStorage(make=partial(PagedBackend, setup.model, setup.pool))


def _contiguous_storage(setup: AttentionSetup) -> KvStorage:
    return KvStorage(make=lambda _: ContiguousBackend(setup.model, dtype=setup.dtype, device=setup.device))


CANDIDATES: Final = (
    Candidate(name="native CPU kernels", paged=True, device_type="cpu", why_not=why_not_native, storage=native_storage),
    Candidate(name="Triton kernels", paged=True, device_type="cuda", why_not=_why_not_triton, storage=_triton_storage),
    Candidate(name="torch", paged=True, device_type=None, why_not=_nothing_against, storage=_paged_storage),
    Candidate(
        name="torch, contiguous", paged=False, device_type=None, why_not=_nothing_against, storage=_contiguous_storage
    ),
)
"""All backends, fastest first."""


def choose_storage(setup: AttentionSetup, candidates: Iterable[Candidate] = CANDIDATES) -> KvStorage:
    """Return the storage of the fastest backend that can serve a setup. Log its name and why faster ones cannot."""
    reasons: list[str] = []
    for candidate in candidates:
        if candidate.paged is not setup.engine.paged or candidate.device_type not in (None, setup.device.type):
            continue
        reason = candidate.why_not(setup)
        if reason is None:
            _log.info("Attention: %s%s.", candidate.name, f" ({'; '.join(reasons)})" if reasons else "")
            return candidate.storage(setup)
        reasons.append(f"{candidate.name}: {reason}")
    raise AssertionError("the last candidates serve everything")
