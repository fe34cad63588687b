"""Read config.json, checking the type and range of every value, because checkpoints are not trusted."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from attrs import frozen

from paged_sdk.errors import CheckpointError, shown

__all__ = ["ConfigFields"]


_Number = TypeVar("_Number", int, float)


@frozen
class _Range:
    """Describes the numbers that a field may have.

    :ivar low: the smallest number
    :ivar high: the largest number
    :ivar above: whether ``low`` itself is excluded
    """

    low: float
    high: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        """Return whether a number lies within; NaN does not."""
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'above' if self.above else 'at least'} {self.low:g} and at most {self.high:g}"


# Defaults: numbers that float32 holds together with their inverses, and 32-bit integers.
_NUMBER = _Range(-1e30, 1e30)
_WHOLE = _Range(-(2**31), 2**31 - 1)
_FACTOR = _Range(1e-9, 1e9)
_FACTOR_OR_0 = _Range(0.0, 1e9)

_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")

# By field name, in any section. The largest values in use are about 130 layers, 512 experts and 10 million tokens.
_RANGES: Mapping[str, _Range] = MappingProxyType(
    {
        "num_hidden_layers": _Range(1, 10_000),
        "num_local_experts": _Range(0, 2**16),
        "num_experts": _Range(0, 2**16),
        **dict.fromkeys(("n_routed_experts", "n_shared_experts", "n_group", "topk_group"), _Range(0, 2**16)),
        "routed_scaling_factor": _FACTOR,
        "num_attention_heads": _Range(1, 2**16),
        "num_key_value_heads": _Range(1, 2**16),
        "num_global_key_value_heads": _Range(1, 2**16),
        "head_dim": _Range(1, 2**16),
        "global_head_dim": _Range(1, 2**16),
        "hidden_size_per_layer_input": _Range(0, 2**16),
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), _Range(1, 2**16)),
        **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _Range(1, 2**16)),
        "max_position_embeddings": _Range(1, 2**27),
        "original_max_position_embeddings": _Range(1, 2**27),
        **dict.fromkeys(_EPSILONS, _Range(0, 1)),
        **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), _FACTOR),
        **dict.fromkeys(("logits_scaling", "logit_scale", "lm_head_multiplier"), _FACTOR),
        **dict.fromkeys(("attention_in_multiplier", "key_multiplier", "attention_out_multiplier"), _FACTOR),
        **dict.fromkeys(("ssm_in_multiplier", "ssm_multipliers", "ssm_out_multiplier", "mlp_multipliers"), _FACTOR),
        **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_n_groups", "n_groups"), _Range(1, 2**16)),
        **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size"), _Range(1, 2**16)),
        **dict.fromkeys(("mamba_d_conv", "conv_kernel", "mamba_expand"), _Range(1, 2**10)),
        "attention_head_dim": _Range(1, 2**16),
        **dict.fromkeys(("query_pre_attn_scalar", "softmax_scale"), _FACTOR),
        "attn_logit_softcapping": _FACTOR,
        "final_logit_softcapping": _FACTOR,
        "rope_theta": _Range(1, 1e30, above=True),
        "rope_local_base_freq": _Range(1, 1e30, above=True),
        "partial_rotary_factor": _Range(0, 1),
        "factor": _FACTOR,
        "low_freq_factor": _FACTOR,
        "high_freq_factor": _FACTOR,
        "beta_fast": _FACTOR,
        "beta_slow": _FACTOR,
        "mscale": _FACTOR_OR_0,
        "mscale_all_dim": _FACTOR_OR_0,
        "attention_factor": _FACTOR,
        "gguf_attn_factor": _FACTOR,
        **dict.fromkeys(("short_mscale", "long_mscale", "clip_qkv", "alpha"), _FACTOR),
        "llama_4_scaling_beta": _FACTOR_OR_0,
        "router_jitter_noise": _FACTOR_OR_0,
        **dict.fromkeys(("swiglu_alpha", "swiglu_limit"), _FACTOR),
        "short_factor": _FACTOR,
        "long_factor": _FACTOR,
        "inv_freq_divisors": _FACTOR,
    }
)


class ConfigFields:
    """Gives typed access to one section of a model's config. ``null`` counts as absent.

    Numbers are finite and within the field's range.

    :param values: the section, as parsed from JSON
    :param name: dotted prefix of the section's fields, for error messages
    """

    def __init__(self, values: Mapping[str, Any], name: str = "") -> None:
        self._values = values
        self._name = name

    def __contains__(self, key: str) -> bool:
        """Return whether the section has the key, even as ``null``."""
        return key in self._values

    def with_defaults(self, **defaults: object) -> ConfigFields:
        """Return the section with values for missing keys. A key that is present as ``null`` stays ``null``."""
        return ConfigFields({**defaults, **self._values}, self._name)

    def renamed(self, **names: str) -> ConfigFields:
        """Return the section with fields under other names too.

        :param names: the family's own name of each field, by the common name; if a config has both, the own name wins
        """
        own = {new: self._values[old] for new, old in names.items() if old in self._values}
        return ConfigFields({**self._values, **own}, self._name)

    def updated(self, other: ConfigFields) -> ConfigFields:
        """Return the section updated by the values of another, with the other's name unless the other is empty."""
        return ConfigFields({**self._values, **other._values}, other._name if other._values else self._name)

    def is_set(self, key: str) -> bool:
        """Return whether the key has a value other than ``null``, ``false`` and 0."""
        return bool(self._values.get(key))

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer.

        :raises CheckpointError: the value is missing and has no default, or has another type or range
        """
        value = self._required(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return self._within(key, value, _WHOLE)
        raise self.error(key, "a whole number")

    def positive(self, key: str, default: int | None = None) -> int:
        """Return an integer of at least 1.

        :raises CheckpointError: as :meth:`integer`
        """
        value = self.integer(key, default)
        if value >= 1:
            return value
        raise self.error(key, "a whole number of at least 1")

    def optional_positive(self, key: str) -> int | None:
        """Return an integer of at least 1, or None if absent.

        :raises CheckpointError: the value has another type or range
        """
        return None if self._values.get(key) is None else self.positive(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number.

        :raises CheckpointError: the value is missing and has no default, or has another type or range
        """
        value = self._required(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(self._within(key, value, _NUMBER))
        raise self.error(key, "a number")

    def optional_number(self, key: str) -> float | None:
        """Return a number, or None if absent.

        :raises CheckpointError: the value has another type or range
        """
        return None if self._values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """Return True or False.

        :raises CheckpointError: the value has another type
        """
        value = self._required(key, default)
        if isinstance(value, bool):
            return value
        raise self.error(key, "true or false")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string.

        :raises CheckpointError: the value is missing and has no default, or has another type
        """
        value = self._required(key, default)
        if isinstance(value, str):
            return value
        raise self.error(key, "a string")

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty if absent.

        :raises CheckpointError: the value has another type
        """
        value = self._required(key, [])
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return tuple(value)
        raise self.error(key, "a list of strings")

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers; empty if absent.

        :raises CheckpointError: the value has another type, or a number another range
        """
        value = self._required(key, [])
        if isinstance(value, list) and all(
            isinstance(each, int | float) and not isinstance(each, bool) for each in value
        ):
            return tuple(float(self._within(key, each, _NUMBER)) for each in value)
        raise self.error(key, "a list of numbers")

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers; empty if absent.

        :raises CheckpointError: the value has another type, or a number another range
        """
        value = self._required(key, [])
        if isinstance(value, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in value):
            return tuple(self._within(key, each, _WHOLE) for each in value)
        raise self.error(key, "a list of whole numbers")

    def section(self, key: str) -> ConfigFields:
        """Return a nested object; empty if absent.

        :raises CheckpointError: the value has another type
        """
        value = self._required(key, {})
        if isinstance(value, dict):
            return ConfigFields(value, f"{self._name}{key}.")
        raise self.error(key, "an object")

    def values(self) -> dict[str, Any]:
        """Return a copy of the whole section."""
        return dict(self._values)

    def error(self, key: str, allowed: str) -> CheckpointError:
        """Return the error for an invalid value."""
        return CheckpointError(f"{self.shown(key)}: expected {allowed}")

    def shown(self, key: str) -> str:
        """Return a field and its value, for error messages."""
        return f"config.json: {self._name}{key} = {shown(self._values.get(key))}"

    def _within(self, key: str, value: _Number, default: _Range) -> _Number:
        """Return a number after checking the range of its field.

        :raises CheckpointError: the number is outside, as infinity and NaN always are
        """
        allowed = _RANGES.get(key, default)
        if value in allowed:
            return value
        raise self.error(
            key, f"numbers {allowed}" if isinstance(self._values.get(key), list) else f"a number {allowed}"
        )

    def _required(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is not None:
            return default
        raise CheckpointError(f"config.json: {self._name}{key} is missing")
