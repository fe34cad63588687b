"""Read the rotary embedding's settings, in transformers 5's form (``rope_parameters``) or the older one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from paged_sdk.config.rope import RopeConfig, RopeKind
from paged_sdk.errors import CheckpointError
from paged_sdk.models.config_fields import ConfigFields

__all__ = ["interleaved_axes", "read_rope", "rope_section"]


def rope_section(fields: ConfigFields) -> ConfigFields:
    """Return ``rope_scaling`` if it is set, else ``rope_parameters``."""
    scaling = fields.section("rope_scaling")
    return scaling if scaling.values() else fields.section("rope_parameters")


def read_rope(
    fields: ConfigFields,
    section: ConfigFields,
    *,
    head_dim: int,
    default_theta: float,
    aliases: Mapping[str, str] = MappingProxyType({}),
    is_partial: bool = False,
    is_nested: bool = False,
) -> RopeConfig:
    """Read the settings of one rotary embedding.

    :param fields: the model's config, which holds ``rope_theta`` and ``partial_rotary_factor`` in the older form
    :param section: the section with the scaling's settings
    :param aliases: the family's other names of rope types
    :param is_partial: whether the family may rotate a part of each head; for other families, transformers ignores
        ``partial_rotary_factor`` unless there is scaling
    :param is_nested: whether ``rope_parameters`` has a section for each type of layer
    :raises CheckpointError: a value is missing or invalid
    """
    # If both forms state a value, the newer form wins.
    theta = section.number("rope_theta", fields.number("rope_theta", default_theta))
    kind = _read_kind(section, aliases)
    rotary_dim = _read_rotary_dim(
        fields, section, head_dim, is_partial=is_partial, is_scaled=kind is not RopeKind.DEFAULT
    )
    max_position = fields.positive("max_position_embeddings", 2048)
    original = section.positive("original_max_position_embeddings", max_position)
    if not is_nested:
        # Phi-3 states the trained context outside the section, and this value wins.
        original = fields.optional_positive("original_max_position_embeddings") or original
    extends = kind in (RopeKind.YARN, RopeKind.LONGROPE)
    if original < 2:
        raise CheckpointError(f"config.json: original_max_position_embeddings = {original}: expected at least 2")
    factor = section.number("factor", max_position / original if extends else 1.0)
    low, high = section.number("low_freq_factor", 1.0), section.number("high_freq_factor", 4.0)
    if high <= low:
        raise section.error("high_freq_factor", f"more than low_freq_factor = {low}")
    # transformers reads it beside the sections per layer type.
    truncate = fields.section("rope_parameters") if is_nested else section
    return RopeConfig(
        rotary_dim=rotary_dim,
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        truncate=truncate.flag("truncate", True),
        mscale=section.optional_number("mscale"),
        mscale_all_dim=section.optional_number("mscale_all_dim"),
        attention_factor=section.optional_number("attention_factor"),
        gguf_attn_factor=section.number("gguf_attn_factor", 1.0),
        short_factor=_read_divisors(section, "short_factor", rotary_dim, required=kind is RopeKind.LONGROPE),
        long_factor=_read_divisors(section, "long_factor", rotary_dim, required=kind is RopeKind.LONGROPE),
        inv_freq_divisors=_read_divisors(section, "inv_freq_divisors", rotary_dim, required=False),
    )


def interleaved_axes(section: ConfigFields, num_frequencies: int, default: tuple[int, int, int]) -> tuple[int, ...]:
    """Return the position axis of each frequency, as in ``RopeConfig.axis_of_frequency``: frequencies alternate between
    time, height and width until the sections of height and width are used up, and the rest are time's.

    :param section: the section with the rotary embedding's settings
    :param num_frequencies: half of the elements of a head that are rotated
    :param default: numbers of frequencies of time, height and width if the config has no ``mrope_section``
    :raises CheckpointError: ``mrope_section`` has other numbers than three that add up to ``num_frequencies``
    """
    sections = section.integers("mrope_section")
    if sections and (len(sections) != 3 or min(sections) < 0 or sum(sections) != num_frequencies):
        raise section.error("mrope_section", f"three numbers that add up to {num_frequencies}")
    sections = sections or default
    return tuple(index % 3 if index < 3 * sections[index % 3] else 0 for index in range(num_frequencies))


def _read_rotary_dim(
    fields: ConfigFields, section: ConfigFields, head_dim: int, *, is_partial: bool, is_scaled: bool
) -> int:
    """Return the number of elements of each head that are rotated."""
    if not is_partial and not is_scaled:
        return _even(head_dim, head_dim)
    share = section.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    rotary_dim = _even(int(head_dim * share) if 0 <= share <= 1 else -1, head_dim, f"partial_rotary_factor = {share}: ")
    if rotary_dim != head_dim and not is_partial:
        raise CheckpointError(
            f"config.json: partial_rotary_factor = {share}: expected 1, since the family rotates whole heads"
        )
    return rotary_dim


def _even(rotary_dim: int, head_dim: int, cause: str = "") -> int:
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointError(
            f"config.json: {cause}rotary embedding of {rotary_dim} of {head_dim} elements per head: "
            "expected an even number"
        )
    return rotary_dim


def _read_kind(section: ConfigFields, aliases: Mapping[str, str]) -> RopeKind:
    key = "type" if not section.is_set("rope_type") and section.is_set("type") else "rope_type"
    name = section.text(key, RopeKind.DEFAULT.value)
    try:
        return RopeKind(aliases.get(name, name))
    except ValueError:
        raise section.error(key, f"one of {', '.join(kind.value for kind in RopeKind)}") from None


def _read_divisors(section: ConfigFields, key: str, rotary_dim: int, *, required: bool) -> tuple[float, ...]:
    divisors = section.numbers(key)
    if len(divisors) == rotary_dim // 2 or not (divisors or required):
        return divisors
    raise section.error(key, f"{rotary_dim // 2} numbers")
