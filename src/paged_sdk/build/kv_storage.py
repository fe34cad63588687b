"""Chooses a model's KV storage."""

from __future__ import annotations

import torch

from paged_sdk.attention.backend import AttentionSetup, KvStorage
from paged_sdk.attention.choice import CANDIDATES, choose_storage
from paged_sdk.attention.divided import divided_storage
from paged_sdk.attention.recurrent import stateful_storage
from paged_sdk.build.loaded_model import LoadedModel
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.kernels.attention_inputs import Precision
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.placement import working_on
from paged_sdk.logs import get_logger
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.key_offsets import key_offsets

__all__ = ["make_storage"]

_log = get_logger(__name__)


def make_storage(loaded: LoadedModel, config: EngineConfig, workspace: Workspace | None) -> KvStorage:
    """Choose the KV storage of a model; each layer's KV is on the layer's device."""
    placement = loaded.placement
    setup = AttentionSetup(
        model=loaded.model.config,
        engine=config,
        dtype=loaded.dtype,
        device=placement.embedding,
        workspace=workspace,
        has_bidirectional=loaded.model.config.bidirectional
        or (loaded.vision is not None and loaded.vision.is_bidirectional),
        precision=_precision(loaded.settings, loaded.dtype, is_quantized=loaded.is_quantized),
        key_offsets=(
            key_offsets(loaded.model, loaded.max_model_len)
            if config.cache_type is PagedCacheType.F8E4M3 and isinstance(loaded.model, DecoderModel)
            else ()
        ),
    )
    candidates = (*loaded.backends, *CANDIDATES)
    shape = setup.model
    if shape.recurrent_layers:  # on one device: see check_stateful
        inner = choose_storage(setup.of_layers(shape.attention_layers, setup.device), candidates)
        return stateful_storage(inner, shape, num_slots=config.num_state_slots, dtype=setup.dtype, device=setup.device)
    if placement.is_one_device:
        return choose_storage(setup, candidates)
    storages: dict[torch.device, KvStorage] = {}
    for device in dict.fromkeys(placement.layers):
        _log.info("Layers on %s:", device)
        with working_on(device):
            storages[device] = choose_storage(setup.of_layers(placement.layers_on(device), device), candidates)
    return divided_storage(placement, storages)


def _precision(settings: BuildSettings, dtype: torch.dtype, *, is_quantized: bool) -> Precision:
    """Choose the number format of attention's products on the CPU, to match that of the model's matrices."""
    if settings.batch_invariance or dtype is not torch.bfloat16:
        return Precision.FLOAT32
    return Precision.INT8 if is_quantized else Precision.BFLOAT16
