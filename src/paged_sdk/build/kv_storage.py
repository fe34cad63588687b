"""Chooses a model's KV storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paged_sdk.attention.backend import AttentionSetup, KvStorage
from paged_sdk.attention.choice import CANDIDATES, choose_storage
from paged_sdk.attention.divided import divided_storage
from paged_sdk.attention.no_attention import NoAttention
from paged_sdk.attention.recurrent import stateful_storage
from paged_sdk.build.kv_statistics import measure_kv
from paged_sdk.build.loaded_model import LoadedModel
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.config.rope import RopeKind
from paged_sdk.kernels.attention_inputs import Precision
from paged_sdk.kernels.kv_basis import KvBasis
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.placement import working_on
from paged_sdk.logs import get_logger
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.key_offsets import key_offsets

__all__ = ["make_storage"]

_log = get_logger(__name__)


def make_storage(
    loaded: LoadedModel,
    config: EngineConfig,
    workspace: Workspace | None,
    check_cancelled: Callable[[], None] = lambda: None,
) -> KvStorage:
    """Choose the KV storage of a model; each layer's KV is on the layer's device. Of a divided model, all ranks must
    call this at the same time.

    :param check_cancelled: called from time to time while the model runs; an exception that it raises stops the work
    """
    placement, shape = loaded.placement, loaded.model.config
    if not shape.attention_layers:
        native = workspace if placement.embedding.type == "cpu" else None
        return _states(KvStorage(make=lambda _: NoAttention(native)), loaded, config, workspace)
    key_offsets, bases = _of_keys(loaded, config, workspace, check_cancelled)
    setup = AttentionSetup(
        model=shape.of_layers(shape.attention_layers),
        engine=config,
        dtype=loaded.dtype,
        device=placement.embedding,
        workspace=workspace,
        has_bidirectional=shape.bidirectional or (loaded.vision is not None and loaded.vision.is_bidirectional),
        precision=_precision(loaded.settings, loaded.dtype, is_quantized=loaded.is_quantized),
        decompresses=not loaded.settings.batch_invariance,
        key_offsets=key_offsets,
        bases=bases,
    )
    candidates = (*loaded.backends, *CANDIDATES)
    if shape.recurrent_layers or len(shape.attention_layers) < shape.num_layers:
        return _states(choose_storage(setup, candidates), loaded, config, workspace)
    if placement.is_one_device:
        return choose_storage(setup, candidates)
    storages: dict[torch.device, KvStorage] = {}
    for device in dict.fromkeys(placement.layers):
        _log.info("Layers on %s:", device)
        with working_on(device):
            storages[device] = choose_storage(setup.of_layers(placement.layers_on(device), device), candidates)
    return divided_storage(placement, storages)


def _states(attending: KvStorage, loaded: LoadedModel, config: EngineConfig, workspace: Workspace | None) -> KvStorage:
    """Put the states of recurrent layers, if there are any, beside the KV of the layers with attention, which the
    storage numbers from 0; all are on one device: see check_stateful.
    """
    return stateful_storage(
        attending,
        loaded.model.config,
        num_slots=config.num_state_slots,
        num_drafts=config.drafts_per_state,
        dtype=loaded.dtype,
        device=loaded.placement.embedding,
        workspace=workspace,
    )


def _of_keys(
    loaded: LoadedModel, config: EngineConfig, workspace: Workspace | None, check_cancelled: Callable[[], None]
) -> tuple[Sequence[Tensor], Sequence[KvBasis]]:
    """Return the offsets and bases of the keys of each layer with attention; empty where there are none.

    On the CPU they are measured. Elsewhere FP8 has the offsets that the keys' bias gives, if there is one: with offsets
    Triton's kernels take 1.1 to 1.4 times the instructions. With LongRoPE it has these on the CPU, too: keys of long
    texts are rotated in another way than what is measured, so that subtracting it made errors of six of seven prompts
    of a tiny model larger. Keys that are the values, too, have none, nor have those that are normalized after their
    rotation: what these have in common is no rotated vector.
    """
    model = loaded.model
    if config.cache_type is PagedCacheType.AUTO or not isinstance(model, DecoderModel) or model.config.values_are_keys:
        return (), ()
    is_eight_bit = config.cache_type is PagedCacheType.F8E4M3
    is_longrope = any(rope.kind is RopeKind.LONGROPE for rope in model.config.ropes)
    if (
        any(device.type != "cpu" for device in model.placement.devices)
        or (is_eight_bit and is_longrope)
        or model.config.qk_norm_after_rope
    ):
        return key_offsets(model, loaded.max_model_len), ()
    start = time.monotonic()
    # torch's threads would compete with those of the native kernels for the CPUs.
    num_threads = loaded.settings.num_threads if workspace is None else 1
    measured = measure_kv(model, loaded.max_model_len, num_threads=num_threads, check_cancelled=check_cancelled)
    _log.info("Keys measured for %s in %.2f s.", config.cache_type.value, time.monotonic() - start)
    if is_eight_bit:
        return measured.key_offsets, ()
    return measured.offsets_in_bases, measured.bases


def _precision(settings: BuildSettings, dtype: torch.dtype, *, is_quantized: bool) -> Precision:
    """Choose the number format of attention's products on the CPU, to match that of the model's matrices."""
    if settings.batch_invariance or dtype is not torch.bfloat16:
        return Precision.FLOAT32
    return Precision.INT8 if is_quantized else Precision.BFLOAT16
