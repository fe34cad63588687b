"""Read what families with Mamba-2 layers have in common."""

from __future__ import annotations

import math
from typing import Final

from paged_sdk.config.recurrent import Mamba2Config
from paged_sdk.models.common_config import FULL
from paged_sdk.models.config_fields import ConfigFields

__all__ = ["LINEAR", "must_not_limit_steps", "read_kinds", "read_mamba2"]

LINEAR: Final = "linear_attention"
"""Transformers' name of layers with a state; earlier configs say mamba, and attention for full attention."""

_EARLIER: Final = {"mamba": LINEAR, "attention": FULL}


def read_mamba2(fields: ConfigFields, *, width: int | None = None) -> Mamba2Config:
    """Read the layers' shape, by the names that begin with ``mamba_``.

    :param width: width of all heads; None: ``mamba_expand`` times the hidden size
    :raises CheckpointError: a value is missing or invalid, or heads and groups do not divide what they are to
    """
    width = fields.positive("mamba_expand", 2) * fields.positive("hidden_size") if width is None else width
    heads, groups = fields.positive("mamba_n_heads", 128), fields.positive("mamba_n_groups", 1)
    if width % heads:
        raise fields.error("mamba_n_heads", f"a divisor of the width {width}")
    head_dim = width // heads
    if (
        fields.values().get("mamba_d_head", "auto") not in ("auto", None)
        and fields.positive("mamba_d_head") != head_dim
    ):
        raise fields.error("mamba_d_head", f"{head_dim}, the width {width} divided by mamba_n_heads = {heads}")
    if heads % groups:
        raise fields.error("mamba_n_groups", f"a divisor of mamba_n_heads = {heads}")
    must_not_limit_steps(fields)
    has_bias = fields.flag("mamba_proj_bias", False)
    return Mamba2Config(
        num_heads=heads,
        head_dim=head_dim,
        state_size=fields.positive("mamba_d_state", 256),
        num_groups=groups,
        kernel_size=fields.positive("mamba_d_conv", 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        input_bias=has_bias,
        output_bias=has_bias,
    )


def must_not_limit_steps(fields: ConfigFields) -> None:
    """Refuse limits of step sizes: implementations apply them to prompts alone, so that a token's result would depend
    on where a prompt ends.

    :raises CheckpointError: the config has limits other than 0 and infinity
    """
    limits = fields.values().get("time_step_limit")
    if limits is None:
        return
    ends = [_number(each) for each in limits] if isinstance(limits, list | tuple) else []
    if ends != [0.0, math.inf]:
        raise fields.error("time_step_limit", "0 and Infinity, which limit nothing")


def _number(value: object) -> float | None:
    """Return a number as transformers writes it to JSON: infinity as ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        value = math.inf if value == {"__float__": "Infinity"} else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_kinds(
    fields: ConfigFields, key: str, count: int | None, default: tuple[str, ...], known: tuple[str, ...]
) -> tuple[str, ...]:
    """Return what each layer has, by transformers' names of today.

    :param count: number of layers; None: as many as there are kinds
    :param default: used if the config does not say
    :param known: the kinds that the family has
    :raises CheckpointError: there is another kind, another number of layers, or no layer with attention
    """
    kinds = tuple(_EARLIER.get(each, each) for each in fields.texts(key)) or default
    if (count is not None and len(kinds) != count) or not {FULL} <= set(kinds) <= set(known):
        layers = "layer" if count is None else f"of {count} layers"
        raise fields.error(key, f"{' or '.join(known)} for each {layers}, and {FULL} once")
    return kinds
