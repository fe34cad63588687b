"""Computes the memory that a model would take from the headers of its files, without reading weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import torch
from attrs import evolve

from paged_sdk.build.assistant_fit import check_assistant
from paged_sdk.build.kv_cache_type import check_cache_type
from paged_sdk.build.kv_memory import block_layout, size_pool, size_pools
from paged_sdk.build.loaded_model import place
from paged_sdk.build.location import encoder_file, model_path
from paged_sdk.build.placement import PlacedNames, choose_devices, common_dtype
from paged_sdk.build.ranks.ranks import place_ranks
from paged_sdk.build.sizing import resolve_draft, resolve_engine_config, resolve_max_model_len
from paged_sdk.build.stateful import check_stateful, fit_kept_states, refuse_ranks, states_of, with_states
from paged_sdk.build.weight_form import encoder_policy, weight_policy
from paged_sdk.config.build import BuildSettings, ModelSource
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import DRAFT_MODEL, read_environment
from paged_sdk.config.isq import IsqFamily, IsqType
from paged_sdk.config.latent_attention import LatentAttentionConfig
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.library import Workspace, load
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, tensor_type_of
from paged_sdk.models.any_model import plan_model
from paged_sdk.parallel.shard import SETTING, shape_of_ranks, shard_of
from paged_sdk.quant.isq import blocks_for
from paged_sdk.quant.policy import DENSE, NamedMatrix, Role, WeightPolicy
from paged_sdk.types.memory_plan import MemoryPlan
from paged_sdk.weights.checkpoint import open_checkpoint
from paged_sdk.weights.mmproj.source import Mmproj
from paged_sdk.weights.source import WeightSource

__all__ = ["compute_plan", "weight_bits"]

GROUP: Final = 64
"""Columns that share a scale in HQQ, AFQ and level types."""


def compute_plan(source: ModelSource, settings: BuildSettings) -> MemoryPlan:
    """Implement :func:`~paged_sdk.build.memory_plan.plan_memory`."""
    environment = read_environment()
    draft = resolve_draft(settings, environment)
    if draft is not None:
        setting = "draft" if settings.draft is not None else DRAFT_MODEL
        raise ConfigError.of(setting, draft.model.location, "none: plans do not include the memory of a draft model")
    devices = choose_devices(settings)
    path = model_path(source, settings)
    dtype = common_dtype(settings.dtype, devices)
    checkpoint = open_checkpoint(path)
    encoder: Mmproj | None = None
    try:
        plan = plan_model(checkpoint.config, dtype, images=settings.images is not None)
        check_assistant(plan.config, path)
        max_model_len = resolve_max_model_len(settings, plan.config)
        file = encoder_file(source, settings, path)
        if file is not None:
            encoder = file.open(checkpoint.config, path)
        names = () if encoder is None else encoder.names()
        placed = place(settings.topology, devices[0], plan, checkpoint, names)
        library = load() if any(device.type == "cpu" for device in devices) else None
        workspace = None if library is None else Workspace(library, num_threads=1)
        policy = weight_policy(checkpoint, settings, environment, dtype, placed, workspace, None)
        of_encoder = None if settings.images is None else encoder_policy(policy, settings.topology)
        weights = _bytes_by_device(checkpoint.source, policy, of_encoder, placed, dtype, plan.config.latent)
        if encoder is not None:
            weights[devices[0]] = weights.get(devices[0], 0) + encoder.num_elements * dtype.itemsize
    finally:
        checkpoint.source.close()
        if encoder is not None:
            encoder.close()
    config = resolve_engine_config(
        plan.config, settings, environment, devices=placed.placement.devices, max_model_len=max_model_len
    )
    check_stateful(plan.config, settings, environment, placed.placement)
    has_decoder = placed.tensor_names is not None
    check_cache_type(plan.config, settings, environment, placed.placement, has_decoder=has_decoder)
    placements = place_ranks(settings)
    if len(placements) > 1:
        refuse_ranks(plan.config, SETTING, len(placements))
    shape = shape_of_ranks(plan.config, len(placements))  # total over all ranks
    used = placed.placement.devices
    if len(placements) > 1 and devices[0].type == "cuda":  # each rank has its own memory
        used = tuple(torch.device(placement.device or devices[0]) for placement in placements)
        config = _with_smallest_pool(config, plan.config, used, dtype, sum(weights.values()))
    else:
        config = fit_kept_states(config, plan.config, dtype, device=devices[0], taken=weights.get(devices[0], 0))
        taken = with_states(weights, plan.config, config, dtype, device=devices[0])
        config = size_pools(config, [(shape, placed.placement)], dtype=dtype, activations=taken)
    layout = block_layout(config, [shape], dtype)
    tokens = config.num_blocks * config.block_size if config.paged else max_model_len
    bytes_per_token = layout.block_bytes / layout.block_size
    return MemoryPlan(
        model=path.stem if path.is_file() else path.name,
        model_type=checkpoint.model_type,
        architecture=plan.config.model_type,
        devices=tuple(map(str, used)),
        dtype=str(dtype).removeprefix("torch."),
        isq=None if policy.isq is None else policy.isq.value,
        weight_bytes=sum(weights.values()),
        paged=config.paged,
        cache_type=config.cache_type.value,
        block_size=config.block_size,
        bytes_per_token=bytes_per_token,
        num_blocks=config.num_blocks if config.paged else 0,
        kv_bytes=int(tokens * bytes_per_token),
        kv_tokens=tokens,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        state_bytes=states_of(plan.config, config, dtype),
    )


def _with_smallest_pool(
    config: EngineConfig, shape: DecoderConfig, devices: Sequence[torch.device], dtype: torch.dtype, weight_bytes: int
) -> EngineConfig:
    """Fill in the number of blocks that every rank of a divided model can hold.

    :param shape: shape of the whole model
    :param weight_bytes: size of all weights
    """
    size = len(devices)
    parts = [shard_of(shape, rank, size).local(shape) for rank in range(size)]
    sized = [
        size_pool(config, [part], dtype=dtype, device=device, activations=weight_bytes // size)
        for part, device in zip(parts, devices, strict=True)
    ]
    return evolve(config, num_blocks=min(each.num_blocks for each in sized))


def _bytes_by_device(
    source: WeightSource,
    policy: WeightPolicy,
    of_encoder: WeightPolicy | None,
    placed: PlacedNames,
    dtype: torch.dtype,
    latent: LatentAttentionConfig | None,
) -> dict[torch.device, int]:
    """Return the size of the weights on each device, in bytes, without layers that predict further tokens.

    :param of_encoder: for the checkpoint's image encoder; None: it is not loaded
    :param latent: the model's latent attention, if it has any
    """
    found: dict[torch.device, int] = {}
    own, placement = placed.tensor_names, placed.placement
    roles = {} if own is None else {own.table: Role.EMBEDDING, f"{own.head}.weight": Role.HEAD}
    for name in source.names():
        layer = None if own is None else own.layer_of(name)
        is_of_encoder = own is not None and own.is_encoders(name)
        if (layer is not None and layer >= len(placement.layers)) or (is_of_encoder and of_encoder is None):
            continue
        devices = placed.devices_of(re.compile(f"^{re.escape(name)}$"))
        device = devices[0] if devices else placement.head
        if own is not None and latent is not None and name.endswith(f".{own.latent_up}.weight"):
            named = NamedMatrix(name, source.matrix(name))
            num_bytes = policy.latent_bytes(named, latent, dtype=dtype, device=device)
        else:
            stays = own is not None and own.is_decoded(name)
            used = DENSE if stays else of_encoder if is_of_encoder and of_encoder is not None else policy
            # Stacked experts have three dimensions; convolutions of an encoder's patches have four or five, and stay.
            is_convolution = len(source.shape(name)) > (2 if is_of_encoder else 3)
            num_bytes = _bytes_of(
                source,
                name,
                DENSE if is_convolution else used,
                roles.get(name, Role.LINEAR),
                dtype,
                is_decoded=device in policy.decoded_on,
            )
        found[device] = found.get(device, 0) + num_bytes
    return found


def _bytes_of(
    source: WeightSource, name: str, policy: WeightPolicy, role: Role, dtype: torch.dtype, *, is_decoded: bool
) -> int:
    """Return the size of a loaded tensor in bytes.

    :param is_decoded: whether quantized tensors are decoded on its device
    """
    shape = source.shape(name)
    elements = torch.Size(shape).numel()
    if len(shape) < 2:
        return elements * dtype.itemsize
    matrix = source.matrix(name)
    named = NamedMatrix(name, matrix)
    isq = policy.isq_of(named, role)
    if isq is not None:
        return int(elements * weight_bits(isq, matrix.shape[1]) / 8)
    is_kept = policy.is_quantized(named, role) and not is_decoded
    return matrix.num_bytes if is_kept else elements * dtype.itemsize


def weight_bits(isq: IsqType, cols: int) -> float:
    """Return the bits per weight, including its share of the scales."""
    blocks = blocks_for(isq, cols)
    if blocks is not None:
        form = BLOCK_FORMATS[tensor_type_of(blocks)]
        return form.num_bytes * 8 / form.elements
    if isq.family is IsqFamily.ROW:
        return isq.bits + 32 / cols
    return isq.bits + (16 if isq.family is IsqFamily.LEVELS else 32) / GROUP
