"""Read the settings of a PEFT adapter: ``adapter_config.json``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from paged_sdk.errors import AdapterError, shown

__all__ = ["PeftConfig", "is_plain_pattern"]

# Fields that are read below, or do not affect what a loaded adapter computes.
_READ: Final = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"),
        *("target_modules", "exclude_modules", "modules_to_save"),
        *("layers_to_transform", "layers_pattern", "init_lora_weights"),
        *("base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout", "auto_mapping"),
        *("alora_invocation_tokens", "use_dora"),
        *("peft_version", "fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config", "eva_config"),
        *("parent_library", "base_model_class", "adapter_name", "ensure_weight_tying"),
    }
)
_REFUSED: Final = {
    "trainable_token_indices": "trained embeddings are not supported",
    "layer_replication": "layers that are repeated are not supported",
    "target_parameters": "updates of parameters that are no linear layer's are not supported",
    "lora_bias": "biases of an adapter are not supported",
}
_XLORA: Final = "LORA: X-LoRA, whose adapters a second pass weighs for each token, is not supported"
# Initializations that also change the base weights: the adapter needs this changed base, which is not in its file.
_OTHER_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
_SAFE_PATTERN: Final = re.compile(r"(?:\w|\.\*?|\\\.|\\d\+?|[\^$|()-])*")
_MOST_REPEATS: Final = 4
_LAYER: Final = re.compile(r"(?:^|\.)\w+\.(\d+)\.")


def is_plain_pattern(pattern: str) -> bool:
    """Return whether a regular expression from a file takes little time to match, whatever the text."""
    return _SAFE_PATTERN.fullmatch(pattern) is not None and pattern.count("*") + pattern.count("+") <= _MOST_REPEATS


@frozen(kw_only=True)
class PeftConfig:
    """Holds the settings of an adapter's updates.

    :ivar path: the file, for error messages
    :ivar base: name of the base model, or empty
    :ivar uses_root: whether the scale is alpha over the square root of the rank (rsLoRA, arXiv 2312.03732)
    :ivar has_magnitudes: whether each module has a magnitude per row (DoRA)
    :ivar is_tied: whether an update of the embedding also applies to a tied output projection
    :ivar ranks: ranks that differ from ``rank``, by a pattern of module names; ``alphas`` likewise
    :ivar targets: suffixes of the names of target modules; None: the settings list no names
    :ivar excluded: suffixes of the names of modules that are no targets
    :ivar whole: ends of the names of modules that were trained as a whole; the model need not have all of them
    :ivar layers: the numbers of the layers with targets; None: all
    :ivar invocation: see :class:`~paged_sdk.adapters.adapter.Adapter`
    """

    path: Path
    base: str
    rank: int
    alpha: float
    uses_root: bool
    has_magnitudes: bool
    is_tied: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: tuple[str, ...] | None
    excluded: tuple[str, ...]
    whole: tuple[str, ...]
    layers: frozenset[int] | None
    invocation: tuple[int, ...]

    @classmethod
    def read(cls, path: Path, values: Mapping[str, Any]) -> PeftConfig:
        """Make the settings from the file's content.

        :param values: the file's content
        :raises AdapterError: a value is invalid, or needs an unsupported feature
        """
        kind = values.get("peft_type")
        if kind != "LORA":
            raise AdapterError.of(path, "peft_type", kind, _XLORA if kind == "XLORA" else "LORA")
        for name, reason in _REFUSED.items():
            if values.get(name):
                raise AdapterError(f"{path}: {name} = {shown(values[name])}: {reason}", path=path, value=values[name])
        if values.get("bias", "none") != "none":
            raise AdapterError.of(path, "bias", values["bias"], '"none": trained biases are not supported')
        start = values.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(_OTHER_BASE):
            allowed = "an adapter of the base as it is: have PEFT convert it when it is saved"
            raise AdapterError.of(path, "init_lora_weights", start, allowed)
        for name, value in values.items():
            if name not in _READ and value and not (name.endswith("_config") and not any(_values(value))):
                raise AdapterError.of(path, name, value, "no value: this setting is not supported")
        if values.get("modules_to_save") and values.get("alora_invocation_tokens"):
            allowed = "nothing beside alora_invocation_tokens, from which on the adapter applies"
            raise AdapterError.of(path, "modules_to_save", values["modules_to_save"], allowed)
        targets, excluded = values.get("target_modules"), values.get("exclude_modules")
        return cls(
            path=path,
            base=_text(path, "base_model_name_or_path", values),
            rank=_rank(path, "r", values.get("r", 8)),
            alpha=_number(path, "lora_alpha", values.get("lora_alpha", 8)),
            uses_root=_flag(path, "use_rslora", values.get("use_rslora", False)),
            is_tied=_flag(path, "ensure_weight_tying", values.get("ensure_weight_tying", False)),
            has_magnitudes=_flag(path, "use_dora", values.get("use_dora", False)),
            ranks={key: _rank(path, f"rank_pattern.{key}", value) for key, value in _pattern(path, "rank", values)},
            alphas={
                key: _number(path, f"alpha_pattern.{key}", value) for key, value in _pattern(path, "alpha", values)
            },
            # A regular expression from a file may take forever to match; the tensors show the modules anyway.
            targets=None if targets is None or isinstance(targets, str) else _names(path, "target_modules", targets),
            excluded=() if excluded is None or isinstance(excluded, str) else _names(path, "exclude_modules", excluded),
            whole=_names(path, "modules_to_save", values.get("modules_to_save") or []),
            layers=_layers(path, values),
            invocation=_tokens(path, "alora_invocation_tokens", values),
        )

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's update."""
        return self.ranks.get(_key(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the scale of a module's update."""
        rank = self.rank_of(module)
        return self.alphas.get(_key(self.alphas, module), self.alpha) / (math.sqrt(rank) if self.uses_root else rank)

    def is_target(self, module: str) -> bool:
        """Return whether the settings list a module as a target."""
        layer = _LAYER.search(module)
        if self.layers is not None and (layer is None or int(layer[1]) not in self.layers):
            return False
        return _ends_with(module, self.targets or ()) and not _ends_with(module, self.excluded)

    def is_whole(self, module: str) -> bool:
        """Return whether a module, or one around it, was trained as a whole. PEFT trains all whose names end so:
        ``classifier`` means DistilBERT's ``pre_classifier`` too.
        """
        return any(f"{name}." in f"{module}." for name in self.whole)

    @property
    def tells_targets(self) -> bool:
        """Return whether the settings list targets by name, which :meth:`is_target` needs."""
        return self.targets is not None


def _ends_with(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _key(patterns: Mapping[str, object], module: str) -> str:
    """Return the first pattern that matches a module's name, by PEFT's rule; empty if none."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), "")


def _values(value: object) -> tuple[object, ...]:
    return tuple(value.values()) if isinstance(value, dict) else (value,)


def _pattern(path: Path, kind: str, values: Mapping[str, Any]) -> list[tuple[str, object]]:
    name = f"{kind}_pattern"
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise AdapterError.of(path, name, found, "an object")
    for key in found:
        try:
            is_good = is_plain_pattern(key) and re.compile(key) is not None
        except re.error:
            is_good = False
        if not is_good or not key:
            raise AdapterError.of(path, name, key, "names of modules, with .* at most in place of a part")
    return list(found.items())


def _rank(path: Path, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterError.of(path, name, value, "an int >= 1")
    return value


def _number(path: Path, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AdapterError.of(path, name, value, "a number")
    return float(value)


def _flag(path: Path, name: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise AdapterError.of(path, name, value, "true or false")
    return bool(value)


def _text(path: Path, name: str, values: Mapping[str, Any]) -> str:
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise AdapterError.of(path, name, value, "a text")
    return value or ""


def _names(path: Path, name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise AdapterError.of(path, name, value, "names of modules")
    return tuple(value)


def _tokens(path: Path, name: str, values: Mapping[str, Any]) -> tuple[int, ...]:
    value = values.get(name) or []
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        raise AdapterError.of(path, name, value, "token ids")
    return tuple(value)


def _layers(path: Path, values: Mapping[str, Any]) -> frozenset[int] | None:
    value = values.get("layers_to_transform")
    if value is None:
        return None
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in numbers):
        raise AdapterError.of(path, "layers_to_transform", value, "numbers of layers")
    return frozenset(numbers)
