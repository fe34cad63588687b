"""Checks whether a model's keys and values can be stored as the type that is asked for."""

from __future__ import annotations

from paged_sdk.build.sizing import paging_asked, pool_asked
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.env import CACHE_TYPE, Environment
from paged_sdk.config.paged import PagedCacheType
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.placement import Placement
from paged_sdk.kernels.q4 import GROUP

__all__ = ["check_cache_type"]


def check_cache_type(
    shape: DecoderConfig,
    settings: BuildSettings,
    environment: Environment,
    placement: Placement,
    *,
    has_decoder: bool,
) -> None:
    """Check that a model can have keys and values of 8 or 4 bits, if they are asked for.

    :param settings: those of the pool: a draft model's are its target's
    :param has_decoder: whether the model's family has a decoder here, or transformers runs it
    :raises ConfigError: it cannot
    """
    meta = pool_asked(settings, environment)
    if paging_asked(settings, environment) is False or meta is None or meta.cache_type is PagedCacheType.AUTO:
        return
    setting = "cache_type" if settings.paged_meta else CACHE_TYPE
    if not shape.attention_layers:
        raise ConfigError.of(setting, meta.cache_type.value, f"auto: {shape.model_type} keeps no keys and values")
    if meta.cache_type is not PagedCacheType.Q4:
        return
    other = next((each for each in placement.devices if each.type != "cpu"), None)
    allowed = None
    if other is not None:
        allowed = f"auto or f8e4m3 on {other}: kernels for 4-bit pages are for the CPU only"
    elif not has_decoder:
        allowed = (
            f"auto or f8e4m3 for {shape.model_type}, which transformers runs: its keys are not seen before the rotary "
            "embedding"
        )
    elif shape.values_are_keys:
        allowed = (
            f"auto or f8e4m3 for {shape.model_type}: 4-bit keys and values each need a basis of their own, and its "
            "keys are the values, too"
        )
    elif odd := [str(size) for size in sorted(shape.head_dims) if size % GROUP]:
        sizes = " and ".join(odd)
        allowed = f"auto or f8e4m3 for {shape.model_type}, whose heads of {sizes} are no multiple of {GROUP}"
    if allowed is not None:
        raise ConfigError.of(setting, meta.cache_type.value, allowed)
