"""Decides the form of a model's weights: as stored, quantized while loading, or decoded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from attrs import evolve

from paged_sdk.build.importance import CheckpointImportance
from paged_sdk.build.placement import PlacedNames
from paged_sdk.build.topology import isq_by_name
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.env import ISQ, Environment
from paged_sdk.config.isq import IsqType
from paged_sdk.config.topology import Topology
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.own_pages import LastingMemory
from paged_sdk.kernels.triton import availability
from paged_sdk.logs import get_logger
from paged_sdk.quant.isq import has_groups, is_for_gpus
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.weights.checkpoint import Checkpoint

__all__ = ["check_isq", "encoder_policy", "weight_policy"]

_log = get_logger(__name__)


def weight_policy(
    checkpoint: Checkpoint,
    settings: BuildSettings,
    environment: Environment,
    dtype: torch.dtype,
    placed: PlacedNames,
    workspace: Workspace | None,
    importance: CheckpointImportance | None,
) -> WeightPolicy:
    """Choose the form of the weights.

    :param importance: weights the errors that quantization minimizes
    :raises ConfigError: weights cannot be quantized as requested
    """
    isq, setting = settings.isq, "isq"
    if isq is not None and checkpoint.is_quantized:
        again = "The already quantized weights of %s are requantized to %s, which does not restore what they have lost."
        _log.info(again, checkpoint.path, isq.value)
    if isq is None and environment.isq is not None:
        if checkpoint.is_quantized:
            _log.info("%s = %s leaves %s alone: it is quantized already.", ISQ, environment.isq.value, checkpoint.path)
        else:
            isq, setting = environment.isq, ISQ
    rules = [] if settings.topology is None else isq_by_name(settings.topology)
    devices, has_library = placed.placement.devices, workspace is not None
    without_blocks = [device for device in devices if _why_no_blocks(device) is not None]
    if isq is not None:
        check_isq(isq, settings, devices, dtype, has_library=has_library, setting=setting)
    for expression, own in rules:
        check_isq(own, settings, placed.devices_of(expression), dtype, has_library=has_library)
    types = [each for each in (isq, *(own for _, own in rules)) if each is not None]
    without = next((each for each in types if has_groups(each)), None)
    if importance is not None and without is not None:
        _log.warning("%s has no use for %s: weights are quantized as without.", without.value, importance.source)
    if importance is not None and not types:
        unused = "%s has no effect before re_isq_model is called: with_isq (--isq) and topologies quantize weights."
        _log.warning(unused, importance.source)
    return WeightPolicy(
        # With an explicit dtype, weights are decoded to it; with "auto", they keep their stored form.
        keep_blocks=settings.dtype == "auto" and len(without_blocks) < len(devices),
        decoded_on=without_blocks,
        workspace=workspace,
        isq=isq,
        isq_by_name=rules,
        importance=None if importance is None else importance.of,
        one_form=settings.batch_invariance,
        memory=LastingMemory(),
    )


def encoder_policy(policy: WeightPolicy, topology: Topology | None) -> WeightPolicy:
    """Choose the form of a checkpoint's image encoder. Only matrices that match a regular expression of the topology
    are quantized: ranges select the decoder's layers.

    :param policy: the text decoder's
    """
    selectors = () if topology is None else topology.selectors
    expressions = Topology(tuple(each for each in selectors if not isinstance(each.selection, range)))
    return evolve(policy, isq=None, isq_by_name=isq_by_name(expressions), keep_blocks=False)


def _why_no_blocks(device: torch.device) -> str | None:
    """Return why a device cannot multiply by GGUF blocks; None if it can."""
    return None if device.type == "cpu" else availability.why_not(device)


def check_isq(
    isq: IsqType,
    settings: BuildSettings,
    devices: Iterable[torch.device],
    dtype: torch.dtype,
    *,
    has_library: bool,
    setting: str = "isq",
) -> None:
    """Check that weights can be quantized to a type on some devices.

    :param has_library: whether the native kernels are available
    :param setting: the setting that requests the type, for errors
    :raises ConfigError: they cannot
    """
    for device in devices:
        _check_isq_on(device, isq, has_library=has_library, setting=setting)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError.of("dtype", settings.dtype, f"float32, bfloat16 or float16, beside {setting} = {isq.value}")


def _check_isq_on(device: torch.device, isq: IsqType, *, has_library: bool, setting: str) -> None:
    if (reason := _why_no_blocks(device)) is not None:
        raise ConfigError.of(setting, isq.value, f"a CPU, or a GPU with Triton's kernels (here {device}: {reason})")
    if device.type != "cpu" and not is_for_gpus(isq):
        allowed = ", ".join(each.value for each in IsqType if is_for_gpus(each))
        raise ConfigError.of(setting, isq.value, f"on {device} one of {allowed}")
    if device.type == "cpu" and not has_library and has_groups(isq):
        allowed = ", ".join(each.value for each in IsqType if not has_groups(each))
        raise ConfigError.of(setting, isq.value, f"without the native kernels one of {allowed}")
