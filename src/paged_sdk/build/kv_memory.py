"""KV memory for one engine: its book-keeping, its storage, and the fastest attention that can serve that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.attention.contiguous import ContiguousBackend
from paged_sdk.attention.native_paged import NativePagedBackend, why_not_native
from paged_sdk.attention.paged import PagedBackend
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.engine import EngineConfig
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.paged_attention import why_not_triton
from paged_sdk.kv.contiguous import SequenceKvManager
from paged_sdk.kv.manager import KvManager
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.logs import get_logger

__all__ = ["KvStorage", "choose_storage", "make_kv_manager"]

_log = get_logger(__name__)


@frozen(kw_only=True)
class KvStorage:
    """How keys and values are to be kept.

    :ivar make: the storage of so many blocks; contiguous storage grows as it needs to
    :ivar scratch: bytes that long contexts may take for a moment, beyond what short ones do
    """

    make: Callable[[int], AttentionBackend]
    scratch: int = 0


def make_kv_manager(config: EngineConfig) -> KvManager:
    """The book-keeping."""
    kind = "block-level, PagedAttention" if config.paged else "sequence-level, non-paged attention"
    _log.info("Prefix caching %s (%s).", "enabled" if config.prefix_cache_n else "disabled", kind)
    if not config.paged:
        return SequenceKvManager(
            max_sequence_tokens=config.max_model_len, max_num_seqs=config.max_num_seqs, num_kept=config.prefix_cache_n
        )
    return KvCacheManager(
        config.num_blocks,
        config.block_size,
        prefix_caching=config.prefix_cache_n > 0,
        sliding_window=config.sliding_window,
    )


def choose_storage(
    config: EngineConfig,
    model: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    workspace: Workspace | None,
    exact: bool,
    key_offsets: Sequence[Tensor] = (),
) -> KvStorage:
    """The storage, with the fastest attention that can serve it; the log says which.

    :param workspace: of the native CPU kernels; None: they are absent
    :param exact: float32 arithmetic for every token on the CPU
    :param key_offsets: per layer, what FP8 keys are stored without (:mod:`paged_sdk.models.key_offsets`)
    """
    if not config.paged:
        return KvStorage(make=lambda num_blocks: ContiguousBackend(model, dtype=dtype, device=device))
    settings = PoolSettings(
        block_size=config.block_size, dtype=dtype, device=device, cache_type=config.cache_type, key_offsets=key_offsets
    )
    if device.type == "cpu":
        reason = "they are absent" if workspace is None else why_not_native(model, dtype)
        if workspace is not None and reason is None:
            _log.info("Attention: native CPU kernels.")
            return KvStorage(make=partial(NativePagedBackend, model, settings, workspace=workspace, exact=exact))
        _log.info("Attention: torch (native CPU kernels: %s).", reason)
    else:
        reason = why_not_triton(torch.empty(0, model.num_heads, model.head_dim, dtype=dtype, device=device))
        if reason is None:
            return _triton_storage(config, model, settings)
        _log.info("Attention: torch (%s).", reason)
    return KvStorage(make=partial(PagedBackend, model, settings))


def _triton_storage(config: EngineConfig, model: DecoderConfig, settings: PoolSettings) -> KvStorage:
    from paged_sdk.attention.triton_paged import TritonPagedBackend, choose_prefills

    prefills = choose_prefills(model, settings)
    for window, choice in prefills.items():
        of_what = "prompts" if window is None else f"prompts in windows of {window} tokens"
        _log.info("Attention: Triton kernels; %s: %s.", of_what, choice)
    return KvStorage(
        make=partial(
            TritonPagedBackend,
            model,
            settings,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            prefills=prefills,
        ),
        scratch=max(choice.most_gathered_bytes for choice in prefills.values()),
    )
